"""Standard errors against the textbook's mean, and against the spread that simulation shows."""

from __future__ import annotations

import math
import statistics

import pytest
import torch

from compressor.evaluation.estimates import Estimate, estimate, estimate_ratio


def test_equal_clusters_give_the_standard_error_of_their_means() -> None:
    means = [3.0, 4.5, 2.5, 3.25, 5.0]
    values = torch.tensor([mean + offset for mean in means for offset in (-1.0, 0.0, 1.0)])
    clusters = torch.tensor([number for number in (7, 3, 9, 1, 5) for _ in range(3)])
    found = estimate(values, clusters)
    assert found.tokens == 15
    assert found.mean == pytest.approx(statistics.mean(means))
    assert found.standard_error == pytest.approx(statistics.stdev(means) / math.sqrt(5))


def test_standard_error_is_the_spread_of_the_mean_over_samples_of_clusters() -> None:
    generator = torch.Generator().manual_seed(0)
    means, errors = [], []
    for _ in range(400):
        counts = torch.randint(5, 60, (80,), generator=generator)
        levels = 3 + torch.randn(80, generator=generator)  # what the tokens of one text have in common
        clusters = torch.arange(80).repeat_interleave(counts)
        values = levels[clusters] + torch.randn(len(clusters), generator=generator)
        found = estimate(values, clusters)
        assert found.mean is not None
        assert found.standard_error is not None
        means.append(found.mean)
        errors.append(found.standard_error)
    spread = statistics.stdev(means)
    assert statistics.mean(errors) == pytest.approx(spread, rel=0.1)
    naive = math.sqrt(2) / math.sqrt(80 * 32)  # as if every token were drawn for itself
    assert spread > 3 * naive


def test_order_of_tokens_does_not_matter() -> None:
    generator = torch.Generator().manual_seed(1)
    values, clusters = torch.rand(500, generator=generator).double(), torch.randint(0, 9, (500,), generator=generator)
    order = torch.randperm(500, generator=generator)
    one, other = estimate(values, clusters), estimate(values[order], clusters[order])
    assert (one.mean, one.standard_error) == pytest.approx((other.mean, other.standard_error), rel=1e-12)


def test_too_few_for_an_estimate() -> None:
    assert estimate(torch.tensor([]), torch.tensor([], dtype=torch.long)) == Estimate(0, None, None)
    assert estimate(torch.tensor([2.0, 4.0]), torch.tensor([3, 3])) == Estimate(2, 3.0, None)
    assert estimate_ratio(torch.tensor([6.0]), torch.tensor([4])) == Estimate(4, 1.5, None)
