"""Loss and KL against formulas written out in float64."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from compressor.evaluation.language_modelling import cross_entropy_sum, kl_divergence_sum, next_token_logits
from tests.families import tiny_checkpoint, tiny_tokens


def random_logits(seed: int, scale: float = 3.0) -> torch.Tensor:
    return scale * torch.randn(1100, 37, generator=torch.Generator().manual_seed(seed))


def test_sums_over_more_positions_than_one_step() -> None:
    p, q = random_logits(0), random_logits(1)
    targets = torch.randint(0, 37, (1100,), generator=torch.Generator().manual_seed(2))
    probabilities = p.double().exp() / p.double().exp().sum(-1, keepdim=True)
    others = q.double().exp() / q.double().exp().sum(-1, keepdim=True)
    loss = -probabilities[torch.arange(1100), targets].log().sum()
    divergence = (probabilities * (probabilities.log() - others.log())).sum()
    assert cross_entropy_sum(p, targets) == pytest.approx(float(loss), rel=1e-6)
    assert kl_divergence_sum(p, q) == pytest.approx(float(divergence), rel=1e-6)
    assert kl_divergence_sum(p, p) == 0


def test_kl_is_measured_against_the_original() -> None:
    sharp, flat = random_logits(0, scale=6.0), torch.zeros(1100, 37)
    assert kl_divergence_sum(sharp, flat) != pytest.approx(kl_divergence_sum(flat, sharp), rel=0.05)
    entropy = float(-(sharp.double().softmax(-1) * sharp.double().log_softmax(-1)).sum())
    assert kl_divergence_sum(sharp, flat) == pytest.approx(1100 * math.log(37) - entropy, rel=1e-6)


def test_loss_of_the_stock_class(tmp_path: Path) -> None:
    tiny = tiny_checkpoint("q35", tmp_path)
    sequence = tiny_tokens(90)
    with torch.inference_mode():
        loss = tiny.model(input_ids=sequence[None], labels=sequence[None], use_cache=False).loss
    total = cross_entropy_sum(next_token_logits(tiny.model, sequence), sequence[1:])
    assert total / 89 == pytest.approx(float(loss), rel=1e-5)
