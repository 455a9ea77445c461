"""Prompts put to a model: teacher-forced in one pass, or answered by greedy generation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from compressor.evaluation.forward import TokenFigures, forward_tokens
from compressor.evaluation.generation import generate_greedily
from compressor.evaluation.prompt_tokens import PromptTokens
from compressor.evaluation.scoring import string_match
from compressor.prompts.base import Prompt


@dataclass(frozen=True)
class PromptResult:
    """One prompt, teacher-forced: the model is shown the ideal completion as far as it goes.

    `score`, in [0, 1], is the share of the answers all of whose tokens are the model's most probable
    ones, or, for a prompt that matches in part, whether any answer is such. `token_accuracy` is that
    share of the completion's tokens. `kl` is KL(reference || model) in nats a token, over prompt and
    completion, `kl_answers` over the completion; None without a reference.
    """

    score: float
    token_accuracy: float
    kl: float | None
    kl_answers: float | None


@dataclass(frozen=True)
class GenerationResult:
    """One prompt, answered by generation: RULER's string match of `output`, which ends once that is settled."""

    score: float
    output: str


def ask_teacher_forced(
    model: PreTrainedModel,
    prompts: Sequence[Prompt],
    encoded: Sequence[PromptTokens],
    batch_size: int,
    on_tokens: Callable[[int], None],
) -> list[PromptResult]:
    """Results in the order of `prompts`; `on_tokens` gets the number of tokens of each batch done.

    Raises:
        RequestError, RunError: as `forward_tokens` does.
    """
    figures = forward_tokens(model, [tokens.whole for tokens in encoded], batch_size, None, on_tokens)
    return [_result(*parts) for parts in zip(prompts, encoded, figures, strict=True)]


def compare_teacher_forced(
    reference: PreTrainedModel,
    model: PreTrainedModel,
    prompts: Sequence[Prompt],
    encoded: Sequence[PromptTokens],
    batch_size: int,
    on_tokens: Callable[[int], None],
) -> tuple[list[PromptResult], list[PromptResult]]:
    """Results of `reference` and of `model`, these with divergences, from one pass over the prompts.

    Raises:
        RequestError, RunError: as `forward_tokens` does.
    """
    figures = forward_tokens(model, [tokens.whole for tokens in encoded], batch_size, reference, on_tokens)
    before = [figure.reference for figure in figures if figure.reference is not None]
    return (
        [_result(*parts) for parts in zip(prompts, encoded, before, strict=True)],
        [_result(*parts) for parts in zip(prompts, encoded, figures, strict=True)],
    )


def _result(prompt: Prompt, tokens: PromptTokens, figures: TokenFigures) -> PromptResult:
    """`figures` are of the tokens after the first, so token i of `whole` stands at i - 1."""
    right = [bool(figures.correct[first - 1 : last - 1].all()) for first, last in tokens.answers]
    score = float(any(right)) if prompt.match == "part" else sum(right) / len(right)
    completion = slice(len(tokens.prompt) - 1, None)
    accuracy = float(figures.correct[completion].double().mean())
    if figures.kl is None:
        return PromptResult(score, accuracy, None, None)
    kl = figures.kl.double()
    return PromptResult(score, accuracy, float(kl.mean()), float(kl[completion].mean()))


def ask_by_generation(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    encoded: Sequence[PromptTokens],
    max_new_tokens: Mapping[str, int],
    batch_size: int,
    on_tokens: Callable[[int], None],
) -> list[GenerationResult]:
    """Results in the order of `prompts`; `max_new_tokens` is by task.

    Generation ends at the model's or the tokenizer's end of sequence, at the task's limit, or once all
    answers have occurred, after which more text cannot change the score. `on_tokens` gets the number of
    prompt tokens of each batch done.

    Raises:
        RunError: a logit is NaN or infinite.
    """

    def answered(indices: Sequence[int], outputs: Sequence[list[int]]) -> list[bool]:
        texts = _decode(tokenizer, outputs)
        return [string_match(prompts[index], text) == 1 for index, text in zip(indices, texts, strict=True)]

    outputs = generate_greedily(
        model,
        [tokens.prompt for tokens in encoded],
        [max_new_tokens[prompt.task] for prompt in prompts],
        batch_size,
        end_tokens(model, tokenizer),
        answered,
        on_tokens,
    )
    texts = _decode(tokenizer, outputs)
    pairs = zip(prompts, texts, strict=True)
    return [GenerationResult(string_match(prompt, text), text) for prompt, text in pairs]


def end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Tokens that end a text for the tokenizer or for the model's own generation config."""
    configured = model.generation_config.eos_token_id
    ends = configured if isinstance(configured, list) else [configured]
    return frozenset(token for token in (*ends, tokenizer.eos_token_id) if isinstance(token, int))


def _decode(tokenizer: PreTrainedTokenizerBase, outputs: Sequence[list[int]]) -> list[str]:
    return tokenizer.batch_decode(list(outputs), skip_special_tokens=True, clean_up_tokenization_spaces=False)
