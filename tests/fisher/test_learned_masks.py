"""Masks trained by gradient descent, the baseline of the Fisher benchmark."""

from __future__ import annotations

import pytest
import torch

from benchmarks.learned_masks import LearnedSettings, backward, learned_masks, soft_top_k
from compressor.fisher.progressive import alone
from compressor.fisher.statistics import MaskedModel, masked_divergence, prepared
from tests.families import tiny_checkpoint


def scores(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_soft_masks_add_up_to_the_width_and_become_the_largest() -> None:
    for temperature in (1.0, 0.1):
        masks = soft_top_k(scores(3, 20), 7, temperature)
        torch.testing.assert_close(masks.sum(-1), torch.full((3,), 7.0, dtype=torch.float64), rtol=1e-5, atol=0)
    hard = soft_top_k(scores(3, 20), 7, 1e-3) > 0.5
    assert torch.equal(hard.nonzero()[:, 1].view(3, 7), scores(3, 20).topk(7).indices.sort().values)


def test_the_threshold_moves_with_the_scores() -> None:
    assert torch.autograd.gradcheck(lambda values: soft_top_k(values, 3, 0.7), scores(2, 6).requires_grad_())


@pytest.fixture(scope="module")
def masked(tmp_path_factory: pytest.TempPathFactory) -> MaskedModel:
    tiny = tiny_checkpoint("gated_deltanet", tmp_path_factory.mktemp("model"))
    return MaskedModel(tiny.architecture, tiny.model, tiny.mixers)


@pytest.fixture(scope="module")
def ids() -> list[torch.Tensor]:
    return list(torch.randint(0, 64, (4, 40), generator=torch.Generator().manual_seed(5)).split(2))


def test_training_finds_channels_that_diverge_less_than_where_it_began(
    masked: MaskedModel, ids: list[torch.Tensor]
) -> None:
    energy = torch.rand(masked.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def kl(steps: int) -> float:
        settings, generator = LearnedSettings(steps, 0.2, (0.2, 0.05)), torch.Generator().manual_seed(0)
        learned = learned_masks(masked, ids, 6, 1.0, energy, settings, generator)
        assert learned.kept.sum(-1).unique().tolist() == [6]
        assert len(learned.divergences) == steps
        return masked_divergence(masked, ids, learned.kept, 1.0, alone)

    assert kl(60) < 0.95 * kl(0)
    assert not any(parameter.grad is not None for parameter in masked.model.parameters())


def test_gradients_are_those_of_the_divergence(masked: MaskedModel, ids: list[torch.Tensor]) -> None:
    soft = torch.rand(masked.shape, generator=torch.Generator().manual_seed(2)).requires_grad_()
    direction = torch.randn(masked.shape, generator=torch.Generator().manual_seed(3))
    with prepared(masked, gradient_checkpointing=False):
        backward(masked, ids[0], soft, 1.0)
        ahead, behind = (
            backward(masked, ids[0], (soft.detach() + step * direction).clamp_min(1e-6).requires_grad_(), 1.0)
            for step in (1e-3, -1e-3)
        )
    if soft.grad is None:
        pytest.fail("no gradient reached the masks")
    assert float((soft.grad * direction).sum()) == pytest.approx((ahead - behind) / 2e-3, rel=0.05)
