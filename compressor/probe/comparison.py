"""A model before and after pruning, head by head, on the same texts."""

from __future__ import annotations

from dataclasses import dataclass

from compressor.errors import RequestError
from compressor.probe.horizons import pearson, spearman
from compressor.probe.spectra import FIGURES
from compressor.probe.summary import StateSummary, column


@dataclass(frozen=True, slots=True)
class FigureComparison:
    """One figure at the end of the texts: means over heads, and correlations of the heads before and after."""

    before: float
    after: float
    pearson: float | None
    spearman: float | None


def compare_states(before: StateSummary, after: StateSummary) -> dict[str, FigureComparison]:
    """For each of FIGURES but the condition number, whose mean says nothing where it is infinite.

    Raises:
        RequestError: the two models have other heads.
    """
    require_same_heads([(head.layer, head.head) for head in before.heads], [(h.layer, h.head) for h in after.heads])
    found = {}
    for name in FIGURES[:-1]:
        one, other = column(before, name), column(after, name)
        found[name] = FigureComparison(
            float(one.mean()), float(other.mean()), pearson(one, other), spearman(one, other)
        )
    return found


def require_same_heads(before: list[tuple[int, int]], after: list[tuple[int, int]]) -> None:
    """Raises:
    RequestError: heads cannot be paired.
    """
    if before != after:
        raise RequestError(
            f"the baseline has {len(before)} linear-attention heads and the model {len(after)}, or in other layers; "
            "compare a model with what was cut from it."
        )
