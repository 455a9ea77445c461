"""Decay horizons and correlations against brute force."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from compressor.probe.horizons import decay_horizon, mean_ranks, pearson, spearman, summarise_horizons


def test_horizon_is_where_a_share_of_one_over_e_is_left() -> None:
    for tau in (2.0, 300.0, 1e5):
        assert float(decay_horizon(torch.tensor(-1 / tau, dtype=torch.float64))) == pytest.approx(tau)
    horizons = decay_horizon(torch.tensor([0.0, -0.5], dtype=torch.float64))
    assert horizons.tolist() == [math.inf, 2.0]


def test_ranks_and_correlations_with_ties() -> None:
    generator = np.random.default_rng(0)
    x, y = generator.integers(0, 6, 40).astype(float), generator.integers(0, 6, 40).astype(float)
    ranks = [
        [sum(other < one for other in v) + (sum(other == one for other in v) + 1) / 2 for one in v] for v in (x, y)
    ]
    assert mean_ranks(torch.tensor(x)).tolist() == ranks[0]
    expected = np.corrcoef(*ranks)[0, 1]
    assert spearman(torch.tensor(x), torch.tensor(y)) == pytest.approx(expected)
    assert pearson(torch.tensor(x), torch.tensor(y)) == pytest.approx(np.corrcoef(x, y)[0, 1])


def test_monotone_is_one_and_infinity_is_the_largest() -> None:
    x = torch.tensor([1.0, 10.0, math.inf, 100.0])
    assert spearman(x, torch.tensor([1.0, 2.0, 4.0, 3.0])) == pytest.approx(1)
    assert spearman(x, torch.tensor([4.0, 3.0, 1.0, 2.0])) == pytest.approx(-1)


def test_no_correlation_to_take() -> None:
    assert spearman(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0])) is None
    assert spearman(torch.full((4,), math.inf), torch.arange(4.0)) is None


def test_summary() -> None:
    horizons = torch.tensor([10.0, 256.0, 257.0, 5000.0])
    summary = summarise_horizons(horizons, torch.arange(4.0), ((0, 0), (0, 1), (2, 0), (2, 1)))
    assert summary.spearman == pytest.approx(1)
    assert summary.share_short == 0.5
    assert summary.long_heads == ((2, 1),)
