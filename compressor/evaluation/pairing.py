"""Differences between two models, paired where both were asked the same."""

from __future__ import annotations

import math
from collections.abc import Iterator

from compressor.evaluation.results import Difference, ModelFigures, TaskFigures, score_of
from compressor.evaluation.text_loss import loss_difference


def differences(before: ModelFigures, after: ModelFigures) -> tuple[Difference, ...]:
    """Of every text (next-token loss, nats) and task that both were measured on, in the order of `after`."""
    return (*_text_differences(before, after), *_task_differences(before, after), *_lm_eval_differences(before, after))


def _text_differences(before: ModelFigures, after: ModelFigures) -> Iterator[Difference]:
    known = {text.name: text.figures for text in before.texts}
    for text in after.texts:
        one, other = known.get(text.name), text.figures
        if one is None or one.loss.mean is None or other.loss.mean is None:
            continue
        name = f"loss on {text.name}"
        if one.text_sha256 == other.text_sha256:
            error = loss_difference(one, other).standard_error
            yield Difference(name, one.loss.mean, other.loss.mean, other.loss.mean - one.loss.mean, error, True)
        else:
            error = _independent(one.loss.standard_error, other.loss.standard_error)
            yield Difference(name, one.loss.mean, other.loss.mean, other.loss.mean - one.loss.mean, error, False)


def _task_differences(before: ModelFigures, after: ModelFigures) -> Iterator[Difference]:
    known = {(task.task, task.length, task.mode): task for task in before.tasks}
    for task in after.tasks:
        one = known.get((task.task, task.length, task.mode))
        if one is not None:
            yield _task_difference(one, task)


def _task_difference(one: TaskFigures, other: TaskFigures) -> Difference:
    name = f"{other.task} at {other.length}"
    change = other.score.mean - one.score.mean
    if one.prompts_sha256 != other.prompts_sha256:
        error = _independent(one.score.standard_error, other.score.standard_error)
        return Difference(name, one.score.mean, other.score.mean, change, error, False)
    paired = score_of([right - left for left, right in zip(one.scores, other.scores, strict=True)])
    return Difference(name, one.score.mean, other.score.mean, change, paired.standard_error, True)


def _lm_eval_differences(before: ModelFigures, after: ModelFigures) -> Iterator[Difference]:
    if before.lm_eval is None or after.lm_eval is None:
        return
    for name, task in after.lm_eval.tasks.items():
        one = before.lm_eval.tasks.get(name)
        for metric, value in task.metrics.items():
            if one is None or metric not in one.metrics:
                continue
            left, right = one.metrics[metric], value
            paired = (one.version, one.samples) == (task.version, task.samples) and len(left.documents) > 1
            paired = paired and len(left.documents) == len(right.documents)
            error = (
                score_of([b - a for a, b in zip(left.documents, right.documents, strict=True)]).standard_error
                if paired
                else _independent(left.standard_error, right.standard_error)
            )
            label = f"lm_eval:{name} {metric}"
            yield Difference(label, left.value, right.value, right.value - left.value, error, paired)


def _independent(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else math.hypot(one, other)
