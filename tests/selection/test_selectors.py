"""The selectors behind the registry's names."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from compressor.errors import RequestError
from compressor.selection.base import HeadStatistics
from compressor.selection.registry import build_selector, get_selector_entry, selector_names
from compressor.selection.request import Scoring, Statistic
from tests.selection import oracle
from tests.selection.matrices import correlated, gaussian, generator, gram


def statistics(weight_q: list[float], weight_k: list[float]) -> HeadStatistics:
    width = len(weight_q)
    ones = torch.ones(1, width, dtype=torch.float64)
    return HeadStatistics(
        gram_q=gram(correlated(40, width, 1))[None],
        gram_k=gram(correlated(40, width, 2))[None],
        weight_l1_q=torch.tensor([weight_q], dtype=torch.float64),
        weight_l1_k=torch.tensor([weight_k], dtype=torch.float64),
        tokens=40,
        **dict.fromkeys(OPTIONAL, ones),
    )


OPTIONAL = ("energy_q", "energy_k", "wanda_q", "wanda_k", "gradient_q", "gradient_k")

# The methods that judge each channel by itself, and what they judge it by.
BY_CHANNEL: dict[str, Statistic] = {"l1": "weight_l1", "energy": "energy", "s-wanda": "wanda", "gradient": "gradient"}


def with_scores(statistic: Statistic, of_queries: list[float], of_keys: list[float]) -> HeadStatistics:
    """One head whose every other statistic is the same for all channels."""
    scores = {f"{statistic}_q": as_head(of_queries), f"{statistic}_k": as_head(of_keys)}
    return replace(statistics([1] * len(of_queries), [1] * len(of_queries)), **scores)  # type: ignore[arg-type]


def as_head(values: list[float]) -> Tensor:
    return torch.tensor([values], dtype=torch.float64)


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
@pytest.mark.parametrize("method", BY_CHANNEL)
def test_the_largest_sums_are_kept_and_the_lowest_of_ties(
    method: str, scoring: Scoring, keep: int, expected: list[int]
) -> None:
    made = with_scores(BY_CHANNEL[method], [3, 2, 2, 4, 4], [1, 5, 2, 2, 0])
    choice = build_selector(method, scoring, 1.5).select(made, keep, generator(0))
    assert choice.indices.tolist() == [expected]
    rho = oracle.exchange_factors(_stacked(scoring), expected).max()
    assert float(choice.diagnostics.max_rho) == pytest.approx(rho)


@pytest.mark.parametrize("method", BY_CHANNEL)
def test_of_equal_channels_the_first_are_kept(method: str) -> None:
    made = with_scores(BY_CHANNEL[method], [1] * 100, [2] * 100)
    choice = build_selector(method, "qk", 1.5).select(made, 30, generator(0))
    assert choice.indices.tolist() == [list(range(30))]


def test_a_method_says_what_it_needs() -> None:
    for method, statistic in BY_CHANNEL.items():
        assert get_selector_entry(method).needs == {statistic}
    assert get_selector_entry("drrqr").needs == frozenset()


@pytest.mark.parametrize("method", ["energy", "s-wanda", "gradient"])
@pytest.mark.parametrize("absent", ["q", "k"])
def test_a_method_whose_statistics_were_not_collected_says_so(method: str, absent: str) -> None:
    statistic = BY_CHANNEL[method]
    without: dict[str, Tensor | None] = {f"{statistic}_{absent}": None}
    made = replace(statistics([1] * 5, [1] * 5), **without)  # type: ignore[arg-type]
    with pytest.raises(RequestError) as caught:
        build_selector(method, "qk", 1.5).select(made, 2, generator(0))
    assert str(caught.value) == (
        f"The statistics hold no {statistic} of the channels, which the chosen method scores by; calibrate again for "
        "that method, or choose one that reads activations alone, such as drrqr."
    )


def test_ghost_keeps_the_channels_that_are_both_written_and_read() -> None:
    """Balanced truncation of y_t = C_t . sum_s B_s with the same decay for all channels, by hand."""
    keys = [[3.0, 1.0, 0.0, 2.0], [-3.0, 1.0, 0.0, 1.0]]  # energies 18, 2, 0, 5
    queries = [[0.1, 2.0, 9.0, 1.0], [0.1, 2.0, 9.0, -1.0]]  # 0.02, 8, 162, 2: products 0.36, 16, 0, 10
    made = replace(
        statistics([1] * 4, [1] * 4),
        gram_k=gram(torch.tensor(keys, dtype=torch.float64))[None],
        gram_q=gram(torch.tensor(queries, dtype=torch.float64))[None],
    )
    for keep, expected in ((1, [1]), (2, [1, 3]), (3, [0, 1, 3])):
        choice = build_selector("ghost", "qk", 1.5).select(made, keep, generator(0))
        assert choice.indices.tolist() == [expected]


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


@pytest.mark.parametrize("method", selector_names())
@pytest.mark.parametrize("keep", [1, 5, 6])
def test_every_method_keeps_exactly_keep_channels_twice_the_same(method: str, keep: int) -> None:
    activations = gaussian(40, 6, 5) * 100
    made = HeadStatistics(
        gram_q=gram(activations).repeat(3, 1, 1),
        gram_k=torch.zeros(3, 6, 6, dtype=torch.float64),
        weight_l1_q=torch.ones(3, 6, dtype=torch.float64),
        weight_l1_k=torch.ones(3, 6, dtype=torch.float64),
        tokens=40,
        **dict.fromkeys(OPTIONAL, torch.ones(3, 6, dtype=torch.float64)),
    )
    selector = build_selector(method, "qk", 1.5)
    first = selector.select(made, keep, generator(0)).indices
    assert first.shape == (3, keep)
    assert first.dtype == torch.int64
    assert torch.equal(first, selector.select(made, keep, generator(0)).indices)


@pytest.mark.parametrize("method", selector_names())
@pytest.mark.parametrize("keep", [0, 6])
def test_every_method_refuses_a_width_outside_the_head(method: str, keep: int) -> None:
    with pytest.raises(RequestError) as caught:
        build_selector(method, "qk", 1.5).select(statistics([1] * 5, [1] * 5), keep, generator(0))
    assert str(caught.value) == f"Cannot keep {keep} of 5 key channels; choose a width from 1 to 5."
