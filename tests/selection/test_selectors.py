"""The selectors behind the registry's names."""

from __future__ import annotations

import pytest
import torch

from compressor.errors import RequestError
from compressor.selection.base import HeadStatistics
from compressor.selection.registry import build_selector, method_names
from compressor.selection.request import Scoring
from tests.selection import oracle
from tests.selection.matrices import correlated, gaussian, generator, gram


def statistics(weight_q: list[float], weight_k: list[float]) -> HeadStatistics:
    width = len(weight_q)
    return HeadStatistics(
        gram_q=gram(correlated(40, width, 1))[None],
        gram_k=gram(correlated(40, width, 2))[None],
        weight_l1_q=torch.tensor([weight_q], dtype=torch.float64),
        weight_l1_k=torch.tensor([weight_k], dtype=torch.float64),
        tokens=40,
    )


@pytest.mark.parametrize(
    ("scoring", "keep", "expected"),
    [
        ("qk", 2, [1, 3]),  # sums 4, 7, 4, 6, 4
        ("qk", 3, [0, 1, 3]),
        ("qk", 4, [0, 1, 2, 3]),
        ("k", 2, [1, 2]),  # 1, 5, 2, 2, 0
        ("q", 2, [3, 4]),  # 3, 2, 2, 4, 4
        ("q", 3, [0, 3, 4]),
    ],
)
def test_l1_keeps_the_largest_sums_and_the_lowest_of_ties(scoring: Scoring, keep: int, expected: list[int]) -> None:
    made = statistics([3, 2, 2, 4, 4], [1, 5, 2, 2, 0])
    choice = build_selector("l1", scoring, 1.5).select(made, keep, generator(0))
    assert choice.indices.tolist() == [expected]
    rho = oracle.exchange_factors(_stacked(scoring), expected).max()
    assert float(choice.diagnostics.max_rho) == pytest.approx(rho)


def test_l1_of_equal_channels_keeps_the_first() -> None:
    choice = build_selector("l1", "qk", 1.5).select(statistics([1] * 100, [2] * 100), 30, generator(0))
    assert choice.indices.tolist() == [list(range(30))]


@pytest.mark.parametrize("scoring", ["qk", "k", "q"])
def test_drrqr_reads_the_activations_that_scoring_names(scoring: Scoring) -> None:
    made = statistics([1] * 5, [1] * 5)
    choice = build_selector("drrqr", scoring, 1.1).select(made, 2, generator(0))
    expected, swaps = oracle.strong_columns(_stacked(scoring), 2, 1.1)
    assert choice.indices.tolist() == [expected]
    assert choice.diagnostics.swaps.tolist() == [swaps]


def _stacked(scoring: Scoring) -> oracle.Matrix:
    rows = {"q": [correlated(40, 5, 1)], "k": [correlated(40, 5, 2)]}
    rows["qk"] = rows["q"] + rows["k"]
    return torch.cat(rows[scoring]).numpy()


def test_drrqr_answers_differ_by_scoring() -> None:
    made = statistics([1] * 12, [1] * 12)
    chosen = [build_selector("drrqr", s, 1.5).select(made, 6, generator(0)).indices.tolist() for s in ("qk", "k", "q")]
    assert len({str(choice) for choice in chosen}) == 3


def test_random_draws_from_the_given_generator_alone() -> None:
    made = statistics([1] * 12, [1] * 12)
    selector = build_selector("random", "qk", 1.5)
    state = torch.get_rng_state()
    first = selector.select(made, 5, generator(3)).indices
    torch.manual_seed(99)
    second = selector.select(made, 5, generator(3)).indices
    torch.set_rng_state(state)
    assert torch.equal(first, second)
    expected = torch.randperm(12, generator=generator(3))[:5].sort().values
    assert torch.equal(first[0], expected)
    assert not torch.equal(first, selector.select(made, 5, generator(4)).indices)


def test_random_draws_each_head_and_every_channel() -> None:
    heads = 400
    eye = torch.eye(6, dtype=torch.float64).repeat(heads, 1, 1)
    ones = torch.ones(heads, 6, dtype=torch.float64)
    made = HeadStatistics(gram_q=eye, gram_k=eye, weight_l1_q=ones, weight_l1_k=ones, tokens=1)
    indices = build_selector("random", "qk", 1.5).select(made, 3, generator(0)).indices
    share = indices.flatten().bincount(minlength=6) / heads
    assert (share - 0.5).abs().max() < 0.1  # four standard deviations


@pytest.mark.parametrize("method", method_names())
@pytest.mark.parametrize("keep", [1, 5, 6])
def test_every_method_keeps_exactly_keep_channels_twice_the_same(method: str, keep: int) -> None:
    activations = gaussian(40, 6, 5) * 100
    made = HeadStatistics(
        gram_q=gram(activations).repeat(3, 1, 1),
        gram_k=torch.zeros(3, 6, 6, dtype=torch.float64),
        weight_l1_q=torch.ones(3, 6, dtype=torch.float64),
        weight_l1_k=torch.ones(3, 6, dtype=torch.float64),
        tokens=40,
    )
    selector = build_selector(method, "qk", 1.5)
    first = selector.select(made, keep, generator(0)).indices
    assert first.shape == (3, keep)
    assert first.dtype == torch.int64
    assert torch.equal(first, selector.select(made, keep, generator(0)).indices)


@pytest.mark.parametrize("method", method_names())
@pytest.mark.parametrize("keep", [0, 6])
def test_every_method_refuses_a_width_outside_the_head(method: str, keep: int) -> None:
    with pytest.raises(RequestError) as caught:
        build_selector(method, "qk", 1.5).select(statistics([1] * 5, [1] * 5), keep, generator(0))
    assert str(caught.value) == f"Cannot keep {keep} of 5 key channels; choose a width from 1 to 5."
