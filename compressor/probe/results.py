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
        baseline: the model before pruning, which `comparison` is with, and `loss_difference`, of model less baseline.
    """

    model: ProbedModel
    truncation: Truncation | None
    windowed: Truncation | None
    searches: tuple[HeadSearch, ...]
    baseline: ProbedModel | None
    comparison: dict[str, FigureComparison] | None
    loss_difference: Loss | None
    settings: Mapping[str, Any]
    notes: tuple[str, ...]
    timings_s: Mapping[str, float]
    hardware: Mapping[str, Any]
    versions: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **asdict(self)}
