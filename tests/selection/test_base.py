"""What selectors read and answer is checked where it is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from compressor.errors import RunError
from compressor.selection.base import ChannelChoice, HeadStatistics
from compressor.selection.diagnostics import diagnose


def statistics() -> HeadStatistics:
    eye = torch.eye(4, dtype=torch.float64).repeat(2, 1, 1)
    ones = torch.ones(2, 4, dtype=torch.float64)
    return HeadStatistics(gram_q=2 * eye, gram_k=eye, weight_l1_q=2 * ones, weight_l1_k=ones, tokens=9)


def spoilt(tensor: Tensor, value: float) -> Tensor:
    tensor = tensor.clone()
    tensor[1].flatten()[0] = value
    return tensor


def test_scoring_says_which_statistics_are_read() -> None:
    made = statistics()
    assert [float(made.gram(scoring)[0, 0, 0]) for scoring in ("qk", "k", "q")] == [3, 1, 2]
    assert [float(made.channel_scores("weight_l1", scoring)[0, 0]) for scoring in ("qk", "k", "q")] == [3, 1, 2]
    assert (made.heads, made.width) == (2, 4)


SHAPE = "the shape of gram_q's heads and channels."
REFUSED: dict[str, tuple[Callable[[HeadStatistics], HeadStatistics], str]] = {
    "square": (
        lambda s: replace(s, gram_q=s.gram_q[:, :3]),
        "gram_q has shape [2, 3, 4]; give one square matrix per head, [N, d, d].",
    ),
    "no heads": (
        lambda s: replace(s, gram_q=s.gram_q[:0]),
        "gram_q has shape [0, 4, 4]; give one square matrix per head, [N, d, d].",
    ),
    "tokens": (
        lambda s: replace(s, tokens=0),
        "The statistics count 0 tokens; give calibration data with at least 1.",
    ),
    "heads": (
        lambda s: replace(s, gram_k=s.gram_k[:1]),
        f"gram_k has shape [1, 4, 4] and torch.float64; give [2, 4, 4] of torch.float64, {SHAPE}",
    ),
    "dtype": (
        lambda s: replace(s, gram_q=s.gram_q.float()),
        f"gram_q has shape [2, 4, 4] and torch.float32; give [2, 4, 4] of torch.float64, {SHAPE}",
    ),
    "weights": (
        lambda s: replace(s, weight_l1_k=s.weight_l1_k[:, :3]),
        f"weight_l1_k has shape [2, 3] and torch.float64; give [2, 4] of torch.float64, {SHAPE}",
    ),
    "nan": (
        lambda s: replace(s, gram_k=spoilt(s.gram_k, torch.nan)),
        "gram_k of stacked head 1 is not finite; check the activations and weights of that head.",
    ),
    "energy": (
        lambda s: replace(s, energy_k=s.weight_l1_k[:1]),
        f"energy_k has shape [1, 4] and torch.float64; give [2, 4] of torch.float64, {SHAPE}",
    ),
    "gradient": (
        lambda s: replace(s, gradient_q=spoilt(s.weight_l1_q, torch.nan)),
        "gradient_q of stacked head 1 is not finite; check the activations and weights of that head.",
    ),
    "infinite": (
        lambda s: replace(s, weight_l1_q=spoilt(s.weight_l1_q, torch.inf)),
        "weight_l1_q of stacked head 1 is not finite; check the activations and weights of that head.",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_statistics_refuse(name: str) -> None:
    change, message = REFUSED[name]
    with pytest.raises(RunError) as caught:
        change(statistics())
    assert str(caught.value) == message


@pytest.mark.parametrize("row", [[1, 0], [2, 2]])
def test_choice_is_ascending_and_unique(row: list[int]) -> None:
    diagnostics = diagnose(statistics().gram_k, torch.tensor([[0, 1], [0, 1]]))
    with pytest.raises(RunError) as caught:
        ChannelChoice(torch.tensor([[0, 1], row]), diagnostics)
    assert str(caught.value) == "Kept channels of stacked head 1 are not ascending and unique; sort them first."


def test_choice_has_one_row_per_head_of_int64() -> None:
    diagnostics = diagnose(statistics().gram_k, torch.tensor([[0, 1], [0, 1]]))
    with pytest.raises(RunError) as caught:
        ChannelChoice(torch.tensor([0, 1], dtype=torch.int32), diagnostics)
    assert str(caught.value) == "Kept channels have shape [2] and torch.int32; give [N, keep] of torch.int64."
