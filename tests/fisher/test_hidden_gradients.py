"""Divergence and scores from hidden states against plain autograd through all logits at once."""

from __future__ import annotations

import bisect
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from compressor.fisher.logits import divergence, drawn_labels, hidden_gradients


def draws(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


HEAD = draws(11, 4, seed=0)
HIDDEN, DENSE = draws(9, 4, seed=1), draws(9, 4, seed=2)
UNIFORMS = torch.rand(9, generator=torch.Generator().manual_seed(3))


def expected_labels(probabilities: Tensor, uniforms: Tensor) -> list[int]:
    rows = zip(probabilities.tolist(), uniforms.tolist(), strict=True)
    return [bisect.bisect_right(list(accumulate(row)), uniform) for row, uniform in rows]


@pytest.mark.parametrize("chunk", [1, 25, 10**6])
def test_sums_and_gradients_are_those_of_autograd(chunk: int) -> None:
    hidden = HIDDEN.clone().requires_grad_()
    log_masked, log_dense = (hidden @ HEAD.T).log_softmax(-1), (DENSE @ HEAD.T).log_softmax(-1)
    kl = (log_dense.exp() * (log_dense - log_masked)).sum()
    labels = torch.tensor(expected_labels(log_masked.exp(), UNIFORMS))
    score = -log_masked.gather(1, labels[:, None]).sum()
    expected_kl, expected_score = (torch.autograd.grad(loss, hidden, retain_graph=True)[0] for loss in (kl, score))

    result = hidden_gradients(HIDDEN, HEAD, DENSE, UNIFORMS, chunk)
    assert result.divergence is not None
    torch.testing.assert_close(result.kl, kl.detach())
    torch.testing.assert_close(result.divergence, expected_kl)
    torch.testing.assert_close(result.score, expected_score)
    torch.testing.assert_close(divergence(HIDDEN, HEAD, DENSE, chunk), kl.detach())


def test_without_dense_states_there_is_no_divergence() -> None:
    result = hidden_gradients(HIDDEN, HEAD, None, UNIFORMS)
    assert result.divergence is None
    assert float(result.kl) == 0
    same = hidden_gradients(HIDDEN, HEAD, HIDDEN, UNIFORMS)
    assert torch.equal(same.score, result.score)
    torch.testing.assert_close(same.divergence, torch.zeros_like(HIDDEN))


def test_half_precision_states_give_gradients_in_their_dtype() -> None:
    exact = hidden_gradients(HIDDEN, HEAD, DENSE, UNIFORMS)
    half = hidden_gradients(HIDDEN.bfloat16(), HEAD.bfloat16(), DENSE.bfloat16(), UNIFORMS)
    assert half.divergence is not None
    assert exact.divergence is not None
    assert half.divergence.dtype == torch.bfloat16
    torch.testing.assert_close(half.divergence.double(), exact.divergence, rtol=0.1, atol=0.05)


def test_labels_are_drawn_as_often_as_their_probability() -> None:
    probabilities = torch.tensor([0.0, 0.5, 0.0, 0.2, 0.3, 0.0])
    count = 1000
    uniforms = (torch.arange(count) + 0.5) / count
    counts = drawn_labels(probabilities.expand(count, -1).contiguous(), uniforms).bincount(minlength=6)
    assert counts.tolist() == [0, 500, 0, 200, 300, 0]


def test_the_ends_of_the_interval_give_labels_that_can_be() -> None:
    probabilities = torch.tensor([[0.0, 0.5, 0.5, 0.0]]).expand(2, -1).contiguous()
    largest = torch.nextafter(torch.tensor(1.0), torch.tensor(0.0))
    assert drawn_labels(probabilities, torch.stack([torch.tensor(0.0), largest])).tolist() == [1, 2]
