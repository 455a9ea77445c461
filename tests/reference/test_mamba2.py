"""The chunked scans, ours and transformers' own, against the state-space model token by token in float64."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import Tensor

from compressor.reference.dispatch import DeviceSwitch
from compressor.reference.mamba2 import chunked_scan, recurrent_scan
from compressor.reference.mamba2_backend import enable_for_mamba2

HYBRIDS = ("bamba", "falcon_h1", "granitemoehybrid", "nemotron_h", "zamba2")


def inputs(tokens: int, groups: int) -> tuple[Tensor, ...]:
    """x, dt, A, B, C and a first state in float64; 4 heads of 3 channels, 5 state channels."""
    generator = torch.Generator().manual_seed(tokens)
    shapes = ((2, tokens, 4, 3), (2, tokens, 4), (4,), (2, tokens, groups, 5), (2, tokens, groups, 5), (2, 4, 3, 5))
    x, dt, rate, key, query, state = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return x, dt.abs(), -rate.abs(), key, query, state


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("tokens", [1, 63, 64, 200])
def test_chunks_and_steps_agree_with_their_gradients(tokens: int, groups: int) -> None:
    results = []
    for scan in (recurrent_scan, chunked_scan):
        leaves = [tensor.clone().requires_grad_() for tensor in inputs(tokens, groups)]
        output, state = scan(*leaves)
        gradients = torch.autograd.grad(output.square().sum() + state.sum(), leaves)
        results.append((output, state, *gradients))
    for stepwise, chunked in zip(*results, strict=True):
        torch.testing.assert_close(chunked, stepwise, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("family", "tokens", "groups"),
    [
        *(("mamba2", tokens, groups) for tokens in (1, 64, 200) for groups in (1, 2)),
        *((family, 200, 2) for family in HYBRIDS),
    ],
)
def test_stock_transformers_computes_the_same_with_gradients(family: str, tokens: int, groups: int) -> None:
    """In float32: its scan takes no other dtype. The switch stands in front of whatever kernel is importable."""
    path = f"transformers.models.{family}.modeling_{family}"
    enable_for_mamba2(path)
    chunk_scan = vars(importlib.import_module(path))["mamba2_chunk_scan"]
    assert isinstance(chunk_scan, DeviceSwitch)
    leaves = [tensor.requires_grad_() for tensor in inputs(tokens, groups)]
    expected = recurrent_scan(*leaves)
    expected_gradients = torch.autograd.grad(expected[0].square().sum(), leaves)
    single = [tensor.detach().float().requires_grad_() for tensor in leaves]
    *arguments, state = single
    actual = chunk_scan(*arguments, chunk_size=32, initial_states=state, return_final_states=True)
    for ours, stock in zip(expected, actual, strict=True):
        torch.testing.assert_close(stock.double(), ours, rtol=1e-4, atol=1e-4)
    for ours, stock in zip(expected_gradients, torch.autograd.grad(actual[0].square().sum(), single), strict=True):
        torch.testing.assert_close(stock.double(), ours, rtol=1e-3, atol=1e-3 * float(ours.abs().max()))
