"""Figures as a person reads them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.table import Table

from compressor.evaluation.pairing import differences
from compressor.evaluation.results import Difference, ModelFigures, Score, TaskFigures
from compressor.evaluation.text_loss import TextFigures


def model_table(figures: ModelFigures) -> Table:
    """One model alone."""
    table = Table("", "value", "± standard error", title=figures.model)
    for text in figures.texts:
        for label, value in _text_rows(text.name, text.figures):
            table.add_row(label, value, "")
    for task in figures.tasks:
        table.add_row(_task_label(task), f"{task.score.mean:.1%}", _error(task.score.standard_error))
    for label, score in _memory(figures):
        table.add_row(label, f"{score.mean:.1%}", _error(score.standard_error))
    for label, value in _lm_eval_rows(figures):
        table.add_row(label, value, "")
    return table


def comparison_rows(before: ModelFigures, after: ModelFigures) -> Iterator[tuple[str, str, str, str]]:
    """(figure, before, after, difference ± standard error), without widths and sizes."""
    changes = {change.name: change for change in differences(before, after)}
    known = {text.name: text.figures for text in before.texts}
    for text in after.texts:
        if text.name in known:
            old = dict(_text_rows(text.name, known[text.name]))
            for label, value in _text_rows(text.name, text.figures):
                yield label, old.get(label, "not measured"), value, ""
            yield _change_row(changes[f"loss on {text.name}"], f"loss, {text.name}", "")
    for label, divergence in (("text", after.kl_text), ("prompts", after.kl_prompts)):
        if divergence is not None:
            yield f"KL to {after.reference or 'the original'} a token, {label}", "0", f"{divergence:.4f}", ""
    for task in after.tasks:
        change = changes.get(f"{task.task} at {task.length}")
        if change is not None:
            yield _change_row(change, _task_label(task), "%")
    for (label, one), (_, other) in zip(_memory(before), _memory(after), strict=False):
        yield label, f"{one.mean:.1%}", f"{other.mean:.1%}", f"{other.mean - one.mean:+.1%}"
    for name, change in changes.items():
        if name.startswith("lm_eval:"):
            yield _change_row(change, name, "")


def comparison_table(models: Sequence[ModelFigures]) -> Table:
    """The first model against each of the others."""
    first = models[0]
    headings = [column for model in models[1:] for column in (model.model, "difference ± s.e.")]
    table = Table("", first.model, *headings)
    table.add_row("key width of a head", str(first.key_dim), *_pairs(str(model.key_dim) for model in models[1:]))
    states = (f"{model.state_bytes_per_sequence:,}" for model in models[1:])
    table.add_row("state bytes per sequence", f"{first.state_bytes_per_sequence:,}", *_pairs(states))
    rows: dict[str, dict[int, tuple[str, str, str]]] = {}
    for number, model in enumerate(models[1:]):
        for label, old, new, change in comparison_rows(first, model):
            rows.setdefault(label, {})[number] = (old, new, change)
    for label, cells in rows.items():
        old = next(iter(cells.values()))[0]
        missing = (old, "not measured", "")
        table.add_row(label, old, *(part for n in range(len(models) - 1) for part in cells.get(n, missing)[1:]))
    return table


def _pairs(values: Iterator[str]) -> list[str]:
    return [part for value in values for part in (value, "")]


def _change_row(change: Difference, label: str, unit: str) -> tuple[str, str, str, str]:
    scale, form = (100, ".1f") if unit else (1, ".4f")
    error = "" if change.standard_error is None else f" ± {scale * change.standard_error:{form}}"
    paired = "" if change.paired else " (unpaired)"
    before, after = (f"{scale * value:{form}}{unit}" for value in (change.before, change.after))
    return label, before, after, f"{scale * change.difference:+{form}}{error}{paired}"


def _text_rows(name: str, figures: TextFigures) -> Iterator[tuple[str, str]]:
    perplexities = (
        ("token", figures.token_perplexity),
        ("word", figures.word_perplexity),
        ("byte", figures.byte_perplexity),
    )
    for unit, value in perplexities:
        if value is not None:
            yield f"perplexity a {unit}, {name}", f"{value:.3f}" if unit == "byte" else f"{value:.2f}"
    if figures.copied.mean is not None and figures.rest.mean is not None:
        yield f"loss on copied tokens, {name}", f"{figures.copied.mean:.3f} (rest {figures.rest.mean:.3f})"


def _task_label(task: TaskFigures) -> str:
    return f"{task.task} at {task.length}, {task.mode}{'' if task.seen else ' (unseen form)'}"


def _memory(figures: ModelFigures) -> list[tuple[str, Score]]:
    pairs = (("memory, forms that calibration may use", figures.seen), ("memory, unseen forms", figures.unseen))
    return [(label, score) for label, score in pairs if score is not None]


def _lm_eval_rows(figures: ModelFigures) -> Iterator[tuple[str, str]]:
    if figures.lm_eval is None:
        return
    for name, task in figures.lm_eval.tasks.items():
        for metric, value in task.metrics.items():
            error = "" if value.standard_error is None else f" ± {value.standard_error:.4f}"
            yield f"lm_eval:{name} {metric}", f"{value.value:.4f}{error}"
    if figures.lm_eval.six_task_average is not None:
        yield "lm_eval: average of six tasks", f"{figures.lm_eval.six_task_average:.4f}"


def _error(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"
