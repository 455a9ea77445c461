"""Teacher-forced answers by hand, and that they agree with generation on trained models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from compressor.evaluation.asking import (
    ask_by_generation,
    ask_teacher_forced,
    compare_teacher_forced,
    end_tokens,
)
from compressor.evaluation.generation import _pieces, generate_greedily
from compressor.evaluation.prompt_tokens import PromptTokens, encode_prompts
from tests.evaluation.hand_made_prompts import NEEDLES, completion_prompt
from tests.families import open_tiny, tiny_checkpoint, tiny_tokens


def ignore(tokens: int) -> None:
    pass


def test_scores_of_one_full_pass(tmp_path: Path) -> None:
    """A completion that is the model's own choice but for one token, in the second of three answers."""
    model = tiny_checkpoint("gated_deltanet", tmp_path).model
    whole = tiny_tokens(80)
    with torch.no_grad():
        for position in range(80, 90):
            whole = torch.cat([whole, model(whole[None], use_cache=False).logits[0, -1:].argmax(-1)])
            if position == 85:
                whole[85] = (whole[85] + 1) % 64
        log_p = model(whole[None], use_cache=False).logits[0, :-1].double().log_softmax(-1)
    tokens = PromptTokens(whole[:80], whole, ((80, 82), (84, 87), (88, 90)))
    answers = ("a", "b", "c")
    prompts = [completion_prompt("", "a b c", answers, match) for match in ("all", "part")]
    twice = [tokens, PromptTokens(whole[:80], whole, ((84, 87),))]
    other = tiny_checkpoint("gated_deltanet", tmp_path / "other").model
    with torch.no_grad():
        other.get_output_embeddings().weight.mul_(1.3)
        log_q = other(whole[None], use_cache=False).logits[0, :-1].double().log_softmax(-1)
    alone = ask_teacher_forced(model, prompts, twice, 2, ignore)
    assert [result.score for result in alone] == [pytest.approx(2 / 3), 0]
    assert alone[0].token_accuracy == pytest.approx(0.9)
    assert alone[0].kl is None
    assert alone[0].kl_answers is None
    divergence = (log_p.exp() * (log_p - log_q)).sum(-1)
    before, after = compare_teacher_forced(model, other, prompts, twice, 2, ignore)
    assert [(result.score, result.token_accuracy, result.kl) for result in before] == [
        (result.score, result.token_accuracy, None) for result in alone
    ]
    for result in after:
        assert result.kl == pytest.approx(float(divergence.mean()), rel=1e-4)
        assert result.kl_answers == pytest.approx(float(divergence[79:].mean()), rel=1e-4)
    any_answer = ask_teacher_forced(model, prompts[1:], [tokens], 1, ignore)
    assert any_answer[0].score == 1


def generated(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, encoded: list[PromptTokens], batch_size: int
) -> list[list[int]]:
    """As many tokens as each completion has."""
    limits = [len(tokens.whole) - len(tokens.prompt) for tokens in encoded]
    prompts = [tokens.prompt for tokens in encoded]
    ends = end_tokens(model, tokenizer)
    return generate_greedily(model, prompts, limits, batch_size, ends, lambda rows, _: [False] * len(rows), ignore)


def check_agreement(folder: Path) -> None:
    """Generation begins with the completion exactly where every token of it is the most probable one."""
    model, tokenizer = open_tiny(folder).model, AutoTokenizer.from_pretrained(folder)
    wrong = [completion_prompt(prompt.text, " 7654321", ("7654321",)) for prompt in NEEDLES[:2]]
    prompts = [*NEEDLES, *wrong, completion_prompt(NEEDLES[0].text[:200], " and so on it went", ("so",))]
    encoded = encode_prompts(tokenizer, prompts, model.get_input_embeddings().num_embeddings)
    forced = ask_teacher_forced(model, prompts, encoded, 3, ignore)
    outputs = generated(model, tokenizer, encoded, 4)
    assert outputs == generated(model, tokenizer, encoded, 1)
    for result, tokens, output in zip(forced, encoded, outputs, strict=True):
        completion = tokens.whole[len(tokens.prompt) :].tolist()
        assert (output == completion) == (result.token_accuracy == 1)
    accuracies = [result.token_accuracy for result in forced]
    assert accuracies[:5].count(1) >= 4
    assert accuracies[5:].count(1) == 0
    asked = ask_by_generation(model, tokenizer, NEEDLES, encoded[:5], {"niah_single_1": 20}, 4, ignore)
    assert [result.score for result in asked] == [result.score for result in forced[:5]]
    for result, prompt in zip(asked, NEEDLES, strict=True):
        assert (prompt.answers[0] in result.output) == (result.score == 1)


def test_agreement_on_the_bundled_model(demo_model: Path) -> None:
    check_agreement(demo_model)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gdn-28m", "deltanet-14m", "deltaproduct-14m", "qwen35-18m"])
def test_agreement_on_larger_models(name: str, shared_models: Path) -> None:
    check_agreement(shared_models / name)


def test_end_tokens_of_both_configs(demo_model: Path) -> None:
    model, tokenizer = open_tiny(demo_model).model, AutoTokenizer.from_pretrained(demo_model)
    model.generation_config.eos_token_id = [7, 9]
    assert end_tokens(model, tokenizer) == {7, 9, tokenizer.eos_token_id}
    model.generation_config.eos_token_id = None
    assert end_tokens(model, tokenizer) == {tokenizer.eos_token_id}


@pytest.mark.parametrize("rows", [1, 7, 32, 256, 5000])
@pytest.mark.parametrize("length", [1, 63, 64, 777, 2048])
def test_prompts_are_read_in_pieces_of_few_sizes(rows: int, length: int) -> None:
    pieces = _pieces(rows, length, on_gpu=True)
    assert sum(pieces) == sum(_pieces(rows, length, on_gpu=False)) == length
    assert len(set(pieces)) <= 3
    # What fla tunes for: the number of tokens of a call, in units of 2048.
    assert len({-(-rows * piece // 2048) for piece in pieces}) <= 2 or rows > 2048
