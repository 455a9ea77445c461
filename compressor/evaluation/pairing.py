"""Differences between two models, paired where both were asked the same."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from compressor.errors import RequestError
from compressor.evaluation.results import (
    Difference,
    ModelFigures,
    NamedText,
    Score,
    TaskFigures,
    mean_of_scores,
    score_of,
)
from compressor.evaluation.text_loss import TextFigures, loss_difference

Key = TypeVar("Key")
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class MeanDifference:
    """The mean over `common` tasks that both models were asked, of `total` that either was."""

    change: Difference
    common: int
    total: int


def differences(before: ModelFigures, after: ModelFigures) -> tuple[Difference, ...]:
    """Of every text (next-token loss, nats) and task that both were measured on, in the order of `after`."""
    found = [text_difference(one, other) for one, other in matched_texts(before, after)]
    found += [task_difference(one, other) for one, other in matched_tasks(before, after)]
    return (*(change for change in found if change is not None), *_lm_eval_differences(before, after))


def matched_texts(before: ModelFigures, after: ModelFigures) -> Iterator[tuple[NamedText | None, NamedText | None]]:
    """Texts by name, in the order of `after`, then those that only `before` has; None where one model lacks it."""
    return _matched({text.name: text for text in before.texts}, {text.name: text for text in after.texts})


def matched_tasks(before: ModelFigures, after: ModelFigures) -> Iterator[tuple[TaskFigures | None, TaskFigures | None]]:
    """The same for tasks, which match where form, length and mode are the same."""
    return _matched(_by_form(before.tasks), _by_form(after.tasks))


def text_difference(one: NamedText | None, other: NamedText | None) -> Difference | None:
    """Of the next-token loss, nats a token; None where one model lacks it."""
    if one is None or other is None:
        return None
    before, after = one.figures.loss, other.figures.loss
    if before.mean is None or after.mean is None:
        return None
    paired = _same_windows(one.figures, other.figures)
    error = (
        loss_difference(one.figures, other.figures).standard_error
        if paired
        else _independent(before.standard_error, after.standard_error)
    )
    return Difference(f"loss on {other.name}", before.mean, after.mean, after.mean - before.mean, error, paired)


def task_difference(one: TaskFigures | None, other: TaskFigures | None) -> Difference | None:
    """Of the score; None where one model lacks it."""
    if one is None or other is None:
        return None
    name = f"{other.task} at {other.length}"
    change = other.score.mean - one.score.mean
    paired = one.prompts_sha256 == other.prompts_sha256 and len(one.scores) == len(other.scores)
    error = (
        score_of([right - left for left, right in zip(one.scores, other.scores, strict=True)]).standard_error
        if paired
        else _independent(one.score.standard_error, other.score.standard_error)
    )
    return Difference(name, one.score.mean, other.score.mean, change, error, paired)


def memory_difference(before: ModelFigures, after: ModelFigures, seen: bool) -> MeanDifference | None:
    """Of the mean score over the tasks of one kind (`TaskFigures.seen`) that both were asked; None without any.

    The standard error takes the tasks' prompts as independent of each other: sqrt(sum SE_t^2) / tasks.
    """
    pairs = [(one, other) for one, other in matched_tasks(before, after) if _is_seen(one, other) == seen]
    changes = [change for one, other in pairs if (change := task_difference(one, other)) is not None]
    mean = mean_of_scores([Score(change.difference, change.standard_error) for change in changes])
    if mean is None:
        return None
    old, new = (
        math.fsum(values) / len(changes) for values in zip(*((c.before, c.after) for c in changes), strict=True)
    )
    paired = all(change.paired for change in changes)
    name = "memory, seen forms" if seen else "memory, unseen forms"
    return MeanDifference(Difference(name, old, new, mean.mean, mean.standard_error, paired), len(changes), len(pairs))


def require_something_in_common(models: Sequence[ModelFigures]) -> None:
    """Raises:
    RequestError: there is a model that was asked nothing that the first one was asked.
    """
    first = models[0]
    for model in models[1:]:
        if not differences(first, model):
            raise RequestError(
                f"{first.model} and {model.model} were measured on different texts and tasks, in none of which they "
                f"can be compared ({_asked(first)}; {_asked(model)}); measure both with the same ones."
            )


def _asked(model: ModelFigures) -> str:
    tasks = [f"{task.task} at {task.length} {task.mode}" for task in model.tasks]
    lm_eval = [] if model.lm_eval is None else [f"lm_eval:{name}" for name in model.lm_eval.tasks]
    return ", ".join([*(text.name for text in model.texts), *tasks, *lm_eval]) or "nothing"


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


def _matched(before: Mapping[Key, Value], after: Mapping[Key, Value]) -> Iterator[tuple[Value | None, Value | None]]:
    for key in dict.fromkeys((*after, *before)):
        yield before.get(key), after.get(key)


def _by_form(tasks: Sequence[TaskFigures]) -> dict[tuple[str, int, str], TaskFigures]:
    return {(task.task, task.length, task.mode): task for task in tasks}


def _is_seen(one: TaskFigures | None, other: TaskFigures | None) -> bool:
    return any(task.seen for task in ((one,) if other is None else (other,)) if task is not None)


def _same_windows(one: TextFigures, other: TextFigures) -> bool:
    before, after = ([window.tokens for window in each.window_losses] for each in (one, other))
    return one.text_sha256 == other.text_sha256 and before == after


def _independent(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else math.hypot(one, other)
