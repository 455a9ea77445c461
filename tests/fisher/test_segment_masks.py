"""Masks of segments against float64 finite differences and plain products."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn.functional import normalize

from compressor.fisher.masks import masked, segment_variables
from compressor.fisher.settings import Removal
from tests.families import tiny_checkpoint


def draws(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(("tokens", "segment"), [(6, 3), (7, 3), (2, 5), (5, 1)])
def test_gradients_are_those_of_finite_differences(tokens: int, segment: int) -> None:
    activations = draws(2, tokens, 2, 3).requires_grad_()
    variables = draws(2, -(-tokens // segment), 2, 3, seed=1).exp().requires_grad_()
    assert torch.autograd.gradcheck(lambda a, v: masked(a, v, segment), (activations, variables))


def test_each_token_is_multiplied_by_the_root_of_its_segment_s_mask() -> None:
    activations, variables = draws(1, 5, 1, 2), draws(1, 2, 1, 2, seed=1).square()
    product = masked(activations, variables, 3)
    for token in range(5):
        assert torch.equal(product[0, token], activations[0, token] * variables[0, token // 3].sqrt())


def test_a_mask_of_zero_gives_no_gradient_and_lets_none_through() -> None:
    activations, variables = draws(1, 4, 1, 2).requires_grad_(), torch.tensor([[[[0.0, 1.0]]]]).double()
    variables.requires_grad_()
    gradients = torch.autograd.grad(masked(activations, variables, 4).square().sum(), [activations, variables])
    assert gradients[0][..., 0].eq(0).all()
    assert gradients[0][..., 1].ne(0).all()
    assert float(gradients[1][..., 0]) == 0
    assert float(gradients[1][..., 1]) > 0


@pytest.mark.parametrize("removal", ["chord", "arc"])
def test_removals_count_as_far_as_they_turn_the_normalised_vector(removal: Removal) -> None:
    """Oracle: each channel taken out in turn, and the loss's slope in the direction in which the vector goes."""
    activations, variables = draws(1, 1, 1, 5), torch.ones(1, 1, 1, 5, dtype=torch.float64, requires_grad=True)
    weights = draws(5, seed=1)
    loss = (weights * normalize(masked(activations, variables, 1, removal), dim=-1)).sum()
    (gradient,) = torch.autograd.grad(loss, [variables])
    before = normalize(activations[0, 0, 0], dim=0)
    for channel in range(5):
        vector = activations[0, 0, 0].clone()
        vector[channel] = 0
        after = normalize(vector, dim=0)
        across = after - (after @ before) * before
        way = across.norm() if removal == "chord" else (after @ before).acos()
        change = way * (weights @ normalize(across, dim=0))
        assert float(gradient[0, 0, 0, channel]) == pytest.approx(-0.5 * float(change), rel=1e-9)


def test_a_vector_of_one_channel_and_one_of_none_have_finite_removals() -> None:
    activations = torch.tensor([[[[0.0, 2.0, 0.0]], [[0.0, 0.0, 0.0]]]])
    variables = torch.ones(1, 1, 1, 3, requires_grad=True)
    for removal in ("chord", "arc"):
        (gradient,) = torch.autograd.grad(masked(activations, variables, 2, removal).sum(), [variables])
        assert gradient.isfinite().all()
        assert float(gradient[0, 0, 0, 1]) > 1  # the root's own gradient


def test_half_precision_gradients_are_summed_in_single() -> None:
    activations = torch.ones(1, 2000, 1, 1, dtype=torch.bfloat16)
    variables = torch.ones(1, 1, 1, 1, requires_grad=True)
    product = masked(activations, variables, 2000)
    assert product.dtype == torch.bfloat16
    (gradient,) = torch.autograd.grad(product.float().sum(), [variables])
    assert float(gradient) == 1000  # bfloat16 would stop at 256


def test_variables_are_leaves_of_all_segments_with_the_mask_s_value(tmp_path: Path) -> None:
    tiny = tiny_checkpoint("gated_deltanet", tmp_path)
    mask = torch.rand(2, 2, 16, generator=torch.Generator().manual_seed(0)) < 0.5
    variables = segment_variables(tiny.mixers, mask, (3, 50), 20, torch.bfloat16)
    assert list(variables) == [mixer.layer for mixer in tiny.mixers]
    for position, variable in enumerate(variables.values()):
        assert variable.shape == (3, 3, 2, 16)
        assert variable.is_leaf
        assert variable.requires_grad
        assert variable.dtype == torch.float32
        assert torch.equal(variable.detach().bool(), mask[position].expand(3, 3, 2, 16))
