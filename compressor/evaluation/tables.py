"""Figures as a person reads them: rows of words, without a library that draws them.

Where all prompts of a task agree there is no spread to take a standard error from, and a 0 would claim certainty. The
error that is printed then is "<1/n": what the standard error of n prompts would be had one of them differed wholly.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from compressor.evaluation.pairing import (
    differences,
    matched_tasks,
    matched_texts,
    memory_difference,
    task_difference,
    text_difference,
)
from compressor.evaluation.results import Difference, ModelFigures, NamedText, Score, TaskFigures
from compressor.evaluation.text_names import shortly_named

NOT_MEASURED = "not measured"
Row = tuple[str, str, str, str]
"""(figure, before, after, difference ± standard error)."""

_ROUNDING = 1e-12
"""Equal values have a standard error of no more than this: the mean of thirds is not a third to the last bit."""

_MEMORY = {True: "memory, forms that calibration may use", False: "memory, unseen forms"}


def model_rows(figures: ModelFigures) -> Iterator[tuple[str, str, str]]:
    """(figure, value, standard error) of one model alone."""
    for text in shortly_named([figures])[0].texts:
        yield from _text_rows(text)
    for task in figures.tasks:
        yield _task_label(task), _share(task.score), _share_error(task.score, [task])
    for seen, score in ((True, figures.seen), (False, figures.unseen)):
        if score is not None:
            asked = [task for task in figures.tasks if task.seen == seen]
            yield _MEMORY[seen], _share(score), _share_error(score, asked)
    yield from _lm_eval_rows(figures)


def comparison_rows(before: ModelFigures, after: ModelFigures) -> Iterator[Row]:
    """Everything that either was measured on, without widths and sizes; what one lacks is "not measured"."""
    return _comparison_rows(*shortly_named([before, after]))


def _comparison_rows(before: ModelFigures, after: ModelFigures) -> Iterator[Row]:
    for one, other in matched_texts(before, after):
        yield from _text_comparison(one, other)
    yield from _divergences(before, after)
    for task, other_task in matched_tasks(before, after):
        yield _task_comparison(task, other_task)
    yield from _memory(before, after)
    yield from _lm_eval_comparison(before, after)


def several_rows(models: Sequence[ModelFigures]) -> list[list[str]]:
    """Label, figure of the first model, and for each of the others its figure and difference from the first.

    What the first model has in a row can depend on the other one (a mean over the tasks of both): such rows stay apart.
    """
    rows: dict[tuple[str, str], dict[int, tuple[str, str]]] = {}
    first, *others = shortly_named(models)
    for number, model in enumerate(others):
        for label, old, new, change in _comparison_rows(first, model):
            rows.setdefault((label, old), {})[number] = (new, change)
    elsewhere = {(label, number) for (label, _), cells in rows.items() for number in cells}
    table = []
    for (label, old), cells in rows.items():
        row = [label, old]
        for number in range(len(others)):
            row += cells.get(number, ("" if (label, number) in elsewhere else NOT_MEASURED, ""))
        table.append(row)
    return table


def headings(models: Sequence[ModelFigures]) -> list[str]:
    """The models' names; where two are equal, with the folder above as the user wrote it, or else a number."""
    names = [model.model for model in models]
    parents = [_parent(model) for model in models]
    told = [
        f"{name} ({parent})" if parent and names.count(name) > 1 else name
        for name, parent in zip(names, parents, strict=True)
    ]
    return [
        f"{name} ({told[: number + 1].count(name)})" if told.count(name) > 1 else name
        for number, name in enumerate(told)
    ]


def _parent(model: ModelFigures) -> str | None:
    if model.source is None or model.source.given is None or model.source.revision is not None:
        return None
    parts = model.source.given.replace("\\", "/").rstrip("/").split("/")
    return parts[-2] if len(parts) > 1 and parts[-2] not in {"", ".", ".."} else None


def _text_comparison(one: NamedText | None, other: NamedText | None) -> Iterator[Row]:
    old, new = ({} if text is None else {label: value for label, value, _ in _text_rows(text)} for text in (one, other))
    for label in dict.fromkeys((*new, *old)):
        yield label, old.get(label, NOT_MEASURED), new.get(label, NOT_MEASURED), ""
    name = "".join(text.name for text in ((one,) if other is None else (other,)) if text is not None)
    change = text_difference(one, other)
    if change is not None:
        yield _change_row(change, f"loss, {name}", "")
    else:
        losses = [None if text is None else text.figures.loss.mean for text in (one, other)]
        old_loss, new_loss = (NOT_MEASURED if loss is None else f"{loss:.4f}" for loss in losses)
        yield f"loss, {name}", old_loss, new_loss, ""


def _divergences(before: ModelFigures, after: ModelFigures) -> Iterator[Row]:
    """Of each model to the reference that the other has, too; it is 0 by definition for that reference itself."""
    for reference in dict.fromkeys((after.reference, before.reference)):
        for kind in ("text", "prompts"):
            old, new = (_divergence(model, reference, kind) for model in (before, after))
            if old is None and new is None:
                continue
            apart = None not in (old, new) and _asked(before, kind) != _asked(after, kind)
            old_cell, new_cell = (
                f"{value:.4f}" if value is not None else "0" if _is_reference(model, reference) else NOT_MEASURED
                for model, value in ((before, old), (after, new))
            )
            label = f"KL to {reference or 'the original'} a token, {kind}"
            yield label, old_cell, new_cell, "(unpaired)" if apart else ""


def _divergence(model: ModelFigures, reference: str | None, kind: str) -> float | None:
    if model.reference != reference:
        return None
    return model.kl_text if kind == "text" else model.kl_prompts


def _is_reference(model: ModelFigures, reference: str | None) -> bool:
    return model.reference is None and model.model == reference


def _asked(model: ModelFigures, kind: str) -> list[str]:
    """Hashes of what the mean divergence of this kind is over."""
    if kind == "text":
        return sorted(text.figures.text_sha256 for text in model.texts)
    return sorted(task.prompts_sha256 for task in model.tasks)


def _task_comparison(one: TaskFigures | None, other: TaskFigures | None) -> Row:
    change = task_difference(one, other)
    label = "".join(_task_label(task) for task in ((one,) if other is None else (other,)) if task is not None)
    if change is not None and one is not None and other is not None:
        return _change_row(change, label, "%", _change_of_one_prompt([(one, other)], change.paired))
    old, new = (NOT_MEASURED if task is None else _share(task.score) for task in (one, other))
    return label, old, new, ""


def _memory(before: ModelFigures, after: ModelFigures) -> Iterator[Row]:
    for seen, label in _MEMORY.items():
        mean = memory_difference(before, after, seen)
        if mean is not None:
            some = f" ({mean.common} of {mean.total} in common)" if mean.common < mean.total else ""
            matched = matched_tasks(before, after)
            pairs = [(one, other) for one, other in matched if one and other and other.seen == seen]
            yield _change_row(mean.change, label + some, "%", _change_of_one_prompt(pairs, mean.change.paired))


def _lm_eval_comparison(before: ModelFigures, after: ModelFigures) -> Iterator[Row]:
    changes = {change.name: change for change in differences(before, after)}
    old, new = ({label: value for label, value, _ in _lm_eval_rows(model)} for model in (before, after))
    for label in dict.fromkeys((*new, *old)):
        if label in changes:
            yield _change_row(changes[label], label, "")
        else:
            yield label, old.get(label, NOT_MEASURED), new.get(label, NOT_MEASURED), ""


def _change_row(change: Difference, label: str, unit: str, bound: float | None = None) -> Row:
    """`bound` is what is said of a standard error of 0; None where equal values are no accident."""
    scale, form = (100, ".1f") if unit else (1, ".4f")
    error = "" if change.standard_error is None else f" ± {scale * change.standard_error:{form}}"
    if bound is not None and change.standard_error is not None and change.standard_error < _ROUNDING:
        error = f" ± <{scale * bound:{form}}"
    paired = "" if change.paired else " (unpaired)"
    before, after = (f"{scale * value:{form}}{unit}" for value in (change.before, change.after))
    return label, before, after, f"{scale * change.difference:+{form}}{error}{paired}"


def _text_rows(text: NamedText) -> Iterator[tuple[str, str, str]]:
    """(figure, value, standard error): that of exp(loss) is, to first order, exp(loss) times the loss's own."""
    figures, name = text.figures, text.name
    loss_error = figures.loss.standard_error
    perplexities = (
        ("token", figures.token_perplexity, loss_error),
        ("word", figures.word_perplexity, None),
        ("byte", figures.byte_perplexity, None),
    )
    for unit, value, error in perplexities:
        if value is not None:
            form = ".3f" if unit == "byte" else ".2f"
            yield f"perplexity a {unit}, {name}", f"{value:{form}}", "" if error is None else f"{value * error:{form}}"
    if figures.copied.mean is not None and figures.rest.mean is not None:
        yield f"loss on copied tokens, {name}", f"{figures.copied.mean:.3f} (rest {figures.rest.mean:.3f})", ""


def _task_label(task: TaskFigures) -> str:
    return f"{task.task} at {task.length}, {task.mode}{'' if task.seen else ' (unseen form)'}"


def _lm_eval_rows(figures: ModelFigures) -> Iterator[tuple[str, str, str]]:
    if figures.lm_eval is None:
        return
    for name, task in figures.lm_eval.tasks.items():
        for metric, value in task.metrics.items():
            error = "" if value.standard_error is None else f"{value.standard_error:.4f}"
            yield f"lm_eval:{name} {metric}", f"{value.value:.4f}", error
    if figures.lm_eval.six_task_average is not None:
        yield "lm_eval: average of six tasks", f"{figures.lm_eval.six_task_average:.4f}", ""


def _share(score: Score) -> str:
    return f"{score.mean:.1%}"


def _share_error(score: Score, tasks: Sequence[TaskFigures]) -> str:
    """`tasks` are those that the score is the mean of."""
    if score.standard_error is None:
        return ""
    if score.standard_error < _ROUNDING:
        return f"<{_error_of_one_prompt(tasks):.1%}"
    return f"{score.standard_error:.1%}"


def _error_of_one_prompt(tasks: Sequence[TaskFigures]) -> float:
    """Standard error of the mean over tasks of which each has one prompt that is 1 while its others are 0.

    Of n values so: mean 1/n, variance 1/n, standard error 1/n.
    """
    return math.hypot(*(1 / len(task.scores) for task in tasks)) / len(tasks)


def _change_of_one_prompt(pairs: Sequence[tuple[TaskFigures, TaskFigures]], paired: bool) -> float:
    """The same of a difference: unpaired, both models have such a prompt."""
    before, after = (_error_of_one_prompt(tasks) for tasks in zip(*pairs, strict=True))
    return before if paired else math.hypot(before, after)
