"""The list of methods and what wrong requests get."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import pytest

from compressor.errors import RequestError
from compressor.selection.registry import (
    ENTRIES,
    build_selector,
    candidate_methods,
    check_selector,
    get_selector_entry,
    index_entries,
    method_names,
    selector_names,
)
from compressor.selection.request import Scoring


def test_every_entry_names_a_selector_and_its_paper() -> None:
    assert {"drrqr", "l1", "energy", "s-wanda", "gradient", "ghost", "random"} <= set(selector_names())
    assert {"fisher", "auto"} == set(method_names()) - set(selector_names())
    for entry in ENTRIES:
        if entry.class_name is not None:
            selector = build_selector(entry.name, "qk", 1.5)
            assert (type(selector).__module__, type(selector).__name__) == (entry.module, entry.class_name)
        else:
            assert find_spec(entry.module) is not None
        assert entry.paper.startswith("https://arxiv.org/abs/")
        assert entry.description


def test_auto_tries_more_where_keys_are_not_normalised() -> None:
    for normalizes_keys in (True, False):
        assert candidate_methods("fisher", normalizes_keys) == ("fisher",)
    assert candidate_methods("auto", normalizes_keys=True) == ("drrqr", "energy", "fisher")
    assert candidate_methods("auto", normalizes_keys=False) == ("drrqr", "energy", "fisher", "ghost", "gradient")


def test_what_a_method_tries_tries_nothing_itself() -> None:
    for name in candidate_methods("auto", normalizes_keys=False):
        assert candidate_methods(name, normalizes_keys=False) == (name,)


@pytest.mark.parametrize("name", ["fisher", "auto"])
def test_a_method_that_runs_the_model_chooses_nothing_from_statistics(name: str) -> None:
    with pytest.raises(RequestError, match=f"The method {name} runs the model and chooses nothing from statistics"):
        build_selector(name, "qk", 1.5)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("fisher", "which masks a channel of keys and queries at once"),
        ("auto", "which tries methods that have none"),
        ("ghost", "which multiplies what keys write by what queries read"),
    ],
)
def test_scoring_of_a_method_without_one_is_refused(name: str, reason: str) -> None:
    with pytest.raises(RequestError) as caught:
        check_selector(name, "q", 1.5)
    assert str(caught.value) == f"Scoring 'q' means nothing to the method {name}, {reason}; leave it at 'qk'."


def test_parameters_are_stored() -> None:
    selector = build_selector("drrqr", "k", 2.0)
    assert (selector.scoring, selector.f) == ("k", 2.0)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("rrqr", "did you mean drrqr? "),
        ("DRRQR", "did you mean drrqr? "),
        ("randm", "did you mean random? "),
        ("wanda", "did you mean s-wanda? "),
        ("gradients", "did you mean gradient? "),
        ("magic", ""),
    ],
)
def test_unknown_method_gets_the_nearest_name_and_the_list(name: str, hint: str) -> None:
    with pytest.raises(RequestError) as caught:
        get_selector_entry(name)
    assert str(caught.value) == f"Unknown method {name!r}: {hint}Known methods: {', '.join(method_names())}."


def test_scoring_of_a_method_that_scores_nothing_is_refused() -> None:
    with pytest.raises(RequestError) as caught:
        build_selector("random", "k", 1.5)
    assert str(caught.value) == (
        "Scoring 'k' means nothing to the method random, which scores no channel; leave it at 'qk'."
    )


def test_unknown_scoring_is_refused() -> None:
    unknown: Scoring = "v"  # type: ignore[assignment]
    with pytest.raises(RequestError) as caught:
        check_selector("drrqr", unknown, 1.5)
    assert str(caught.value) == "Unknown scoring 'v'; choose one of qk, k, q."


def test_f_below_one_is_refused_before_anything_is_built() -> None:
    with pytest.raises(RequestError) as caught:
        check_selector("drrqr", "qk", 0.5)
    assert str(caught.value) == (
        "f = 0.5 cannot bound the exchange factor rho; choose a finite f of at least 1, such as 1.5."
    )


def test_a_name_listed_twice_is_rejected() -> None:
    with pytest.raises(ValueError, match="The method 'l1' is listed twice, for L1Selector and L1Selector"):
        index_entries([*ENTRIES, ENTRIES[1]])


def test_requests_are_checked_without_importing_torch() -> None:
    code = (
        "import sys; from compressor.selection.registry import check_selector; check_selector('drrqr', 'k', 1.5); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
