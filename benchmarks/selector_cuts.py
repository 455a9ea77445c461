"""Which cuts benchmarks.selectors measures, the most telling first."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

from benchmarks.resumable import Row
from compressor.errors import RequestError
from compressor.preparation import Source
from compressor.selection.registry import get_selector_entry

FISHER = "fisher"
METHODS = ("drrqr", FISHER, "energy", "l1", "s-wanda", "gradient", "random")
OF_STATE_SPACES = ("ghost",)
"""Measured too where keys are not normalised."""
FIRST_METHODS, FIRST_RATIOS = METHODS[:4], (0.5, 0.75)
"""What a measurement that is cut off should have."""
KEYS = ("model", "method", "scoring", "ratio", "norm_epsilon")
DENSE: Row = {"method": "dense", "scoring": "qk", "ratio": 0.0, "norm_epsilon": "keep"}
"""How the original is known but for the model."""


def methods_of(source: Source, named: Sequence[str] | None) -> list[str]:
    """Those that were named, or all that mean something to the family."""
    if named is not None:
        return list(named)
    return [*METHODS, *(() if source.architecture.normalizes_keys else OF_STATE_SPACES)]


def check_scorings(named: Sequence[str], scorings: Sequence[str]) -> None:
    """Raises RequestError for a method that was named and has none of the scorings."""
    for method in named:
        if "qk" not in scorings and not get_selector_entry(method).has_scoring:
            raise RequestError(
                f"--methods {method} has the scoring qk alone, which --scorings {' '.join(scorings)} leaves out; add "
                "qk, or leave the method out."
            )


def ordered_cuts(methods: Sequence[str], arguments: argparse.Namespace) -> list[Row]:
    """What a row of each cut is known by but for the model; the original comes before all."""
    cuts = list(made_cuts(methods, arguments.scorings, arguments.ratios, arguments.norm_epsilon))
    return [DENSE, *sorted(cuts, key=_order)]


def made_cuts(
    methods: Sequence[str], scorings: Sequence[str], ratios: Sequence[float], epsilons: Sequence[str]
) -> Iterator[Row]:
    """Every method with each of `scorings` that it has, by method."""
    for method in methods:
        for scoring in scorings if get_selector_entry(method).has_scoring else {"qk"}.intersection(scorings):
            for ratio in ratios:
                for epsilon in epsilons:
                    yield {"method": method, "scoring": scoring, "ratio": ratio, "norm_epsilon": epsilon}


def _order(cut: Row) -> tuple[bool, bool, bool, float]:
    late = cut["method"] not in FIRST_METHODS, cut["ratio"] not in FIRST_RATIOS
    return (cut["scoring"] != "qk", *late, cut["ratio"])
