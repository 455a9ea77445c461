"""Differences and their standard errors against the formulas written out."""

from __future__ import annotations

import math
import statistics

import pytest

from compressor.evaluation.pairing import differences
from compressor.evaluation.results import ModelFigures, Score, TaskFigures, collect, mean_of_scores, score_of
from compressor.evaluation.tables import comparison_rows


def task(scores: tuple[float, ...], sha256: str = "same", seen: bool = True) -> TaskFigures:
    score = score_of(scores)
    return TaskFigures("vt", 512, len(scores), seen, "teacher-forced", sha256, score, score, None, None, scores)


def model(name: str, *tasks: TaskFigures) -> ModelFigures:
    return collect(name, 64, 4096, None, (), tasks)


def test_score_is_mean_and_standard_error_of_independent_values() -> None:
    values = (1.0, 0.0, 0.5, 1.0)
    assert score_of(values) == Score(0.625, pytest.approx(statistics.stdev(values) / 2))
    assert score_of((0.25,)) == Score(0.25, None)


def test_the_same_prompts_are_paired() -> None:
    before, after = (1.0, 0.0, 1.0, 1.0), (0.0, 0.0, 1.0, 0.0)
    (change,) = differences(model("a", task(before)), model("b", task(after)))
    changes = [b - a for a, b in zip(before, after, strict=True)]
    assert change.paired
    assert change.difference == pytest.approx(-0.5)
    assert change.standard_error == pytest.approx(statistics.stdev(changes) / 2)


def test_other_prompts_are_not_paired() -> None:
    before, after = (1.0, 0.0, 1.0, 1.0), (0.0, 0.0, 1.0)
    (change,) = differences(model("a", task(before)), model("b", task(after, sha256="other")))
    assert not change.paired
    expected = math.sqrt(statistics.variance(before) / 4 + statistics.variance(after) / 3)
    assert change.standard_error == pytest.approx(expected)
    rows = comparison_rows(model("a", task(before)), model("b", task(after, sha256="other")))
    assert "(unpaired)" in next(row for row in rows if row[0].startswith("vt"))[3]


def test_seen_and_unseen_forms_are_averaged_apart() -> None:
    figures = model("a", task((1.0, 1.0)), task((0.0, 1.0)), task((0.0, 0.0), seen=False))
    assert figures.seen == Score(0.75, pytest.approx(0.25))
    assert figures.unseen == Score(0, 0)
    assert mean_of_scores([]) is None
