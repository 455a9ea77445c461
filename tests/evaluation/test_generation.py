"""Batched greedy generation against full passes without a cache, one prompt and one token at a time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compressor.errors import RunError
from compressor.evaluation import generation
from compressor.evaluation.generation import generate_greedily
from tests.families import SUPPORTED_VARIANTS, tiny_checkpoint, tiny_tokens

LENGTHS = (70, 93, 64, 131, 75, 71)


def ragged_prompts() -> list[Tensor]:
    return [tiny_tokens(length, seed) for seed, length in enumerate(LENGTHS)]


def one_by_one(model: Any, prompt: Tensor, count: int) -> list[int]:
    """The oracle: each token from a full pass over everything before it."""
    tokens = prompt[None]
    with torch.no_grad():
        for _ in range(count):
            logits = model(tokens, use_cache=False).logits[:, -1]
            tokens = torch.cat([tokens, logits.argmax(-1)[:, None]], dim=1)
    return tokens[0, len(prompt) :].tolist()


def never(indices: Sequence[int], outputs: Sequence[list[int]]) -> list[bool]:
    return [False] * len(indices)


def ignore(tokens: int) -> None:
    pass


@pytest.mark.parametrize("name", SUPPORTED_VARIANTS)
def test_ragged_batches(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of other lengths and limits, rows that are dropped on the way, and prompts read in two calls."""
    model = tiny_checkpoint(name, tmp_path).model
    prompts, limits = ragged_prompts(), [10, 10, 10, 10, 3, 3]
    expected = [one_by_one(model, prompt, limit) for prompt, limit in zip(prompts, limits, strict=True)]
    monkeypatch.setattr(generation, "STEPS_BETWEEN_CHECKS", 4)
    assert generate_greedily(model, prompts, limits, 6, frozenset(), never, ignore) == expected
    monkeypatch.setattr(generation, "SMALLEST_PIECE", 40)
    monkeypatch.setattr(generation, "TOKENS_PER_FORWARD", 1)
    assert generate_greedily(model, prompts, limits, 3, frozenset(), never, ignore) == expected


def test_end_tokens_and_answers_end_rows(tmp_path: Path) -> None:
    model = tiny_checkpoint("gated_deltanet", tmp_path).model
    prompts = ragged_prompts()
    expected = [one_by_one(model, prompt, 30) for prompt in prompts]
    end = expected[2][5]
    stopped: list[int] = []

    def finished(indices: Sequence[int], outputs: Sequence[list[int]]) -> list[bool]:
        done = [index == 0 and len(tokens) >= 4 for index, tokens in zip(indices, outputs, strict=True)]
        stopped.extend(index for index, enough in zip(indices, done, strict=True) if enough)
        return done

    seen: list[int] = []
    outputs = generate_greedily(model, prompts, [30] * 6, 4, {end}, finished, seen.append)
    assert stopped == [0]
    assert 4 <= len(outputs[0]) < 4 + generation.STEPS_BETWEEN_CHECKS
    for index, (output, whole) in enumerate(zip(outputs, expected, strict=True)):
        cut = whole[: whole.index(end)] if end in whole else whole
        assert output == (cut[: len(output)] if index == 0 else cut)
    assert len(outputs[2]) <= 5
    assert sum(seen) == sum(LENGTHS)


def test_prompts_far_apart_in_length_do_not_share_a_batch(tmp_path: Path) -> None:
    """A row would otherwise read thousands of its own tokens one by one."""
    model = tiny_checkpoint("delta_net", tmp_path).model
    prompts = [tiny_tokens(length) for length in (5, 300, 20, 310, 69)]
    seen: list[int] = []
    outputs = generate_greedily(model, prompts, [2] * 5, 8, frozenset(), never, seen.append)
    assert seen == [5 + 20 + 69, 300 + 310]
    assert outputs == [one_by_one(model, prompt, 2) for prompt in prompts]


def test_one_pass_reads_the_prompts(tmp_path: Path) -> None:
    """The chunked kernels read what the rows have in common; a step is one token of every row."""
    model = tiny_checkpoint("gated_deltanet", tmp_path).model
    shapes: list[tuple[int, ...]] = []
    hook = model.get_input_embeddings().register_forward_pre_hook(lambda _, inputs: shapes.append(inputs[0].shape))
    generate_greedily(model, [tiny_tokens(200), tiny_tokens(203)], [4, 4], 2, frozenset(), never, ignore)
    hook.remove()
    assert shapes == [(2, 200)] + [(2, 1)] * 6


def test_broken_weights_are_a_failed_run(tmp_path: Path) -> None:
    model = tiny_checkpoint("gated_deltanet", tmp_path).model
    with torch.no_grad():
        model.get_output_embeddings().weight[3] = torch.nan
    with pytest.raises(RunError, match="logits that are NaN or infinite while it generates"):
        generate_greedily(model, [tiny_tokens(70)], [4], 1, frozenset(), never, ignore)
