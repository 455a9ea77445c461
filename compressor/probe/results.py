"""Everything that a probe found: what probe.json holds and the report shows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from compressor.evaluation.results import ModelSource
from compressor.probe.comparison import FigureComparison
from compressor.probe.experiment import Loss, RankOnTask, RankOnText
from compressor.probe.head_search import HeadSearch
from compressor.probe.summary import StateSummary

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class ProbedModel:
    """One model's states, and its `loss` on the same texts.

    `key_dim` and `value_dim` are the sides of each state; `rank_threshold` is the share of the largest singular value
    that counts for the numerical rank.
    """

    model: str
    source: ModelSource
    key_dim: int
    value_dim: int
    rank_threshold: float
    loss: Loss
    states: StateSummary


@dataclass(frozen=True, slots=True)
class Truncation:
    """The truncation experiment; `tasks` is empty where none was asked. `window` is how far softmax layers look back
    before a segment, None for all they can."""

    segment: int
    window: int | None
    text: tuple[RankOnText, ...]
    tasks: tuple[RankOnTask, ...]


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """Everything of one run.

    Attributes:
        truncation: None where it was not asked for.
        windowed: the same once more with the softmax layers of a hybrid windowed; None for models without.
        baseline: the model before pruning, which `comparison` is with.
    """

    model: ProbedModel
    truncation: Truncation | None
    windowed: Truncation | None
    searches: tuple[HeadSearch, ...]
    baseline: ProbedModel | None
    comparison: dict[str, FigureComparison] | None
    settings: Mapping[str, Any]
    notes: tuple[str, ...]
    timings_s: Mapping[str, float]
    hardware: Mapping[str, Any]
    versions: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **asdict(self)}

    def summary(self) -> tuple[str, ...]:
        """The main figures, a line each."""
        heads, horizons = self.model.states.heads, self.model.states.horizons
        lines = [
            f"{len(heads)} heads with states of {self.model.value_dim} x {self.model.key_dim}; at the end of the text:"
        ]
        for name, label in (("entropy_effective_rank", "entropy effective rank"), ("utilisation", "utilisation")):
            medians = sorted(head.end[name].median or 0.0 for head in heads)
            middle = (medians[(len(medians) - 1) // 2] + medians[len(medians) // 2]) / 2
            lines.append(f"  {label}: median {middle:.3g}, from {medians[0]:.3g} to {medians[-1]:.3g}")
        if any(head.horizon is not None for head in heads):
            correlation = "none" if horizons.spearman is None else f"{horizons.spearman:.2f}"
            lines.append(
                f"  {horizons.share_short:.0%} of the heads forget within 256 tokens, {len(horizons.long_heads)} keep "
                f"beyond 4096; rank correlation of horizon and effective rank: {correlation}"
            )
        for cut in () if self.truncation is None else self.truncation.text:
            if cut.rank is not None and cut.difference is not None:
                rise, error = cut.difference.all.mean, cut.difference.all.standard_error
                lines.append(
                    f"  states cut to rank {cut.rank}: loss {rise or 0.0:+.4f} +- {error or 0.0:.4f} nats a token"
                )
        for search in self.searches:
            best = search.heads[0] if search.heads else None
            found = (
                "no head alone" if best is None else f"layer {best.layer} head {best.head} {best.rise.mean:+.3f} nats"
            )
            lines.append(f"  {search.name} at rank {search.rank}: {search.whole.mean:+.3f} nats for all heads; {found}")
        return tuple(lines)
