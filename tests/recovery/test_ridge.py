"""Ridge least squares from sums, against numpy's least squares and errors of every single token."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from compressor.recovery.ridge import RIDGES, NormalEquations, fit

INPUTS, OUTPUTS = 12, 7


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def sums(weight: Tensor, inputs: Tensor, targets: Tensor, block: int | None = None) -> NormalEquations:
    result = NormalEquations(weight)
    size = block or len(inputs)
    for x, y in zip(inputs.split(size), targets.split(size), strict=True):
        result.add(x, y)
    return result


def problem(tokens: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Old weights, inputs of unequal scales that go together, and targets of other weights and noise."""
    weight = draw(OUTPUTS, INPUTS, seed=0)
    inputs = draw(tokens, INPUTS, seed=seed) @ draw(INPUTS, INPUTS, seed=1) * torch.logspace(-2, 0, INPUTS)
    truth = weight + draw(OUTPUTS, INPUTS, seed=2)
    return weight, inputs, inputs @ truth.mT + 0.5 * draw(tokens, OUTPUTS, seed=seed + 100)


def least_squares(weight: Tensor, inputs: Tensor, targets: Tensor, ridge: float) -> Tensor:
    """Weights near `weight`, from the stacked system [X; sqrt(s) I] D^T = [E; 0]."""
    scale = float(inputs.square().mean(0).mean()) * len(inputs)
    rows = np.concatenate([inputs.numpy(), np.sqrt(ridge * scale) * np.eye(INPUTS)])
    right = np.concatenate([(targets - inputs @ weight.mT).numpy(), np.zeros((INPUTS, OUTPUTS))])
    return weight + torch.from_numpy(np.linalg.lstsq(rows, right, rcond=None)[0]).mT


def squared_error(weight: Tensor, inputs: Tensor, targets: Tensor) -> float:
    return float((targets - inputs @ weight.double().mT).square().sum())


@pytest.mark.parametrize("block", [1, 7, 512, 700])
def test_streamed_sums_are_those_of_all_tokens(block: int) -> None:
    weight, inputs, targets = problem(1300, seed=3)
    streamed = sums(weight, inputs, targets, block)
    missed = targets - inputs @ weight.mT
    assert streamed.tokens == 1300
    torch.testing.assert_close(streamed.gram, inputs.mT @ inputs)
    torch.testing.assert_close(streamed.cross, missed.mT @ inputs)
    torch.testing.assert_close(streamed.error, missed.square().sum())
    torch.testing.assert_close(streamed.energy, targets.square().sum())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_activations_of_any_dtype_are_summed_in_float64(dtype: torch.dtype) -> None:
    weight, inputs, targets = (tensor.to(dtype) for tensor in problem(900, seed=3))
    result = sums(weight, inputs, targets)
    missed = targets.double() - inputs.double() @ weight.double().mT
    assert result.gram.dtype == result.cross.dtype == torch.float64
    torch.testing.assert_close(result.gram, inputs.double().mT @ inputs.double(), rtol=1e-13, atol=1e-11)
    torch.testing.assert_close(result.cross, missed.mT @ inputs.double(), rtol=1e-13, atol=1e-11)


@pytest.mark.parametrize("ridge", [1e-6, 1e-3, 1e-1, 10.0])
def test_one_ridge_gives_the_least_squares_weights(ridge: float) -> None:
    weight, inputs, targets = problem(60, seed=3)
    both = sums(weight, inputs, targets)
    result = fit(both, both, torch.float64, (ridge,))
    expected = least_squares(weight, inputs, targets, ridge)
    assert result.weight is not None
    torch.testing.assert_close(result.weight, expected, rtol=1e-8, atol=1e-9)
    assert result.error_before == pytest.approx(squared_error(weight, inputs, targets), rel=1e-12)
    assert result.error_after == pytest.approx(squared_error(expected, inputs, targets), rel=1e-9)


@pytest.mark.parametrize("tokens", [8, 20, 500])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_ridge_errs_least_on_the_held_out_tokens(tokens: int, dtype: torch.dtype) -> None:
    """Also of fewer tokens than inputs, where the Gram matrix is singular."""
    weight, inputs, targets = problem(tokens, seed=3)
    weight = weight.to(dtype).double()
    _, unseen_inputs, unseen_targets = problem(80, seed=4)
    result = fit(sums(weight, inputs, targets), sums(weight, unseen_inputs, unseen_targets), dtype)
    errors = {
        ridge: squared_error(least_squares(weight, inputs, targets, ridge).to(dtype), unseen_inputs, unseen_targets)
        for ridge in RIDGES
    }
    assert result.weight is not None
    assert result.weight.dtype == dtype
    assert result.ridge is not None
    assert result.ridge == min(errors, key=errors.__getitem__)
    assert RIDGES[0] < result.ridge < RIDGES[-1]
    assert result.error_after == pytest.approx(errors[result.ridge], rel=1e-6)
    assert result.error_after == pytest.approx(squared_error(result.weight, unseen_inputs, unseen_targets), rel=1e-9)
    assert result.error_after < result.error_before


def test_a_linear_target_is_found_exactly() -> None:
    weight, inputs, _ = problem(200, seed=3)
    truth = draw(OUTPUTS, INPUTS, seed=9)
    both = sums(weight, inputs, inputs @ truth.mT)
    result = fit(both, both, torch.float64, (1e-14,))
    assert result.weight is not None
    torch.testing.assert_close(result.weight, truth, rtol=1e-6, atol=1e-6)
    assert result.error_after < 1e-12 * result.error_before


def test_a_large_ridge_leaves_the_old_weights() -> None:
    weight, inputs, targets = problem(200, seed=3)
    both = sums(weight, inputs, targets)
    changes = []
    for ridge in (1e-6, 1.0, 1e6, 1e9):
        result = fit(both, both, torch.float64, (ridge,))
        assert result.weight is not None
        changes.append(float((result.weight - weight).norm()))
    assert changes == sorted(changes, reverse=True)
    assert changes[-1] < 1e-8 * changes[0]


def test_what_does_not_carry_over_is_not_taken() -> None:
    weight, inputs, targets = problem(300, seed=3)
    missed = targets - inputs @ weight.mT
    opposite = sums(weight, inputs, inputs @ weight.mT - missed)
    result = fit(sums(weight, inputs, targets), opposite, torch.float64)
    assert result.weight is None
    assert result.ridge is None
    assert result.error_after == result.error_before == float(opposite.error)


def test_a_change_that_rounding_loses_is_not_taken() -> None:
    weight = torch.ones(OUTPUTS, INPUTS, dtype=torch.bfloat16)
    inputs = draw(300, INPUTS, seed=3)
    both = sums(weight, inputs, inputs @ (weight.double() + 1e-4).mT)
    assert fit(both, both, torch.bfloat16).weight is None
    in_float32 = fit(both, both, torch.float32)
    assert in_float32.weight is not None
    torch.testing.assert_close(in_float32.weight, torch.full((OUTPUTS, INPUTS), 1 + 1e-4))


def test_dead_inputs_change_nothing() -> None:
    weight, inputs, targets = problem(300, seed=3)
    silent = sums(weight, torch.zeros_like(inputs), targets)
    assert fit(silent, silent, torch.float64).weight is None
    inputs[:, 4] = 0
    partly = sums(weight, inputs, targets)
    result = fit(partly, partly, torch.float64)
    assert result.weight is not None
    assert result.weight.isfinite().all()
    torch.testing.assert_close(result.weight[:, 4], weight[:, 4], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("side", ["inputs", "targets"])
def test_broken_activations_are_seen(value: float, side: str) -> None:
    weight, inputs, targets = problem(30, seed=3)
    assert sums(weight, inputs, targets).finite
    {"inputs": inputs, "targets": targets}[side][17, 3] = value
    assert not sums(weight, inputs, targets).finite


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sums_on_a_gpu(dtype: torch.dtype) -> None:
    weight, inputs, targets = (tensor.to(dtype) for tensor in problem(2100, seed=3))
    expected = sums(weight, inputs, targets)
    found = sums(weight.cuda(), inputs.cuda(), targets.cuda())
    for name in ("gram", "cross", "error", "energy"):
        one, other = vars(expected)[name], vars(found)[name].cpu()
        assert other.dtype == torch.float64
        # Below the square root of a block's 512 terms times float32's half unit, 6e-8, and ten times that for its tail.
        assert float((one - other).norm() / one.norm()) < 1e-5
