"""The learning rate against values worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from compressor.recovery.schedule import learning_rate

HALF = math.sqrt(0.5)


@pytest.mark.parametrize(
    ("steps", "warmup_share", "expected"),
    [
        # Warm-up of 4; the cosine falls over 4 steps: (1 + cos(pi/4)) / 2, 1/2, (1 - cos(pi/4)) / 2, 0, of 8 - 2, on 2.
        (8, 0.5, [2, 4, 6, 8, 5 + 3 * HALF, 5, 5 - 3 * HALF, 2]),
        # ceil(0.3 * 5) = 2, then three steps: cosines of 60, 120 and 180 degrees.
        (5, 0.3, [4, 8, 6.5, 3.5, 2]),
        # No warm-up: the peak comes first.
        (5, 0.0, [8, 5 + 3 * HALF, 5, 5 - 3 * HALF, 2]),
        # A warm-up of one step is the peak.
        (3, 0.01, [8, 5, 2]),
        # Warm-up alone.
        (4, 1.0, [2, 4, 6, 8]),
        (2, 0.0, [8, 2]),
        (1, 0.0, [8]),
        (1, 0.5, [8]),
    ],
)
def test_values(steps: int, warmup_share: float, expected: list[float]) -> None:
    rates = [learning_rate(step, steps, warmup_share, peak=8.0, final=2.0) for step in range(steps)]
    assert rates == pytest.approx(expected)


@pytest.mark.parametrize(("steps", "warmup_share", "warmup"), [(100, 0.07, 7), (50, 0.14, 7), (100, 0.071, 8)])
def test_a_rounding_error_does_not_lengthen_the_warm_up(steps: int, warmup_share: float, warmup: int) -> None:
    rates = [learning_rate(step, steps, warmup_share, peak=1.0, final=0.0) for step in range(steps)]
    assert rates.index(1.0) == warmup - 1


def test_as_the_factor_of_a_torch_scheduler() -> None:
    """It is asked once more than there are steps."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=8.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate(step, 5, 0.3, 1.0, 0.25))
    rates = []
    for _ in range(5):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx([4, 8, 6.5, 3.5, 2])
    assert scheduler.get_last_lr() == pytest.approx([2])


@pytest.mark.parametrize(("step", "steps", "share"), [(-1, 5, 0.1), (0, 0, 0.1), (0, 5, -0.1), (0, 5, 1.1)])
def test_impossible_runs_are_refused(step: int, steps: int, share: float) -> None:
    with pytest.raises(ValueError, match=f"step {step} of {steps} with a warm-up share of {share}"):
        learning_rate(step, steps, share, 1.0, 0.0)
