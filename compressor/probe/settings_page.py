"""Tables of the page that stand beside the figures: losses, a comparison with the baseline, and what was measured."""

from __future__ import annotations

from collections.abc import Mapping

from compressor.evaluation.estimates import Estimate
from compressor.probe import html_report as html
from compressor.probe.results import ProbedModel, ProbeResult
from compressor.probe.terms import LABELS


def comparison_tables(result: ProbeResult) -> list[str]:
    """The loss of both, and their states; none without a baseline."""
    baseline, difference = result.baseline, result.loss_difference
    if baseline is None or difference is None or result.comparison is None:
        return []
    pairs: tuple[tuple[str, Estimate, Estimate, Estimate], ...] = (
        ("all tokens", baseline.loss.all, result.model.loss.all, difference.all),
        ("copied tokens", baseline.loss.copied, result.model.loss.copied, difference.copied),
        ("other tokens", baseline.loss.rest, result.model.loss.rest, difference.rest),
    )
    losses = [(name, one.mean, other.mean, less.mean, less.standard_error) for name, one, other, less in pairs]
    states = [
        (LABELS[name], each.before, each.after, each.pearson, each.spearman) for name, each in result.comparison.items()
    ]
    return [
        html.table(("loss, nats a token", "baseline", "model", "difference", "standard error"), losses),
        html.table(("mean over heads", "baseline", "model", "correlation of heads", "rank correlation"), states),
    ]


def loss_by_position(result: ProbeResult) -> str:
    """Loss by the tokens read before, with that of a baseline where there is one."""
    model, baseline, difference = result.model, result.baseline, result.loss_difference
    names = [f"{max(1, bucket.start):,} to {bucket.stop - 1:,}" for bucket in model.loss.by_position]
    losses = [bucket.loss for bucket in model.loss.by_position]
    if baseline is None or difference is None:
        rows = [(name, loss.mean, loss.standard_error) for name, loss in zip(names, losses, strict=True)]
        return html.table(("tokens read before", "loss, nats a token", "standard error"), rows)
    before, less = ([bucket.loss for bucket in each.by_position] for each in (baseline.loss, difference))
    compared = [
        (name, one.mean, other.mean, change.mean, change.standard_error)
        for name, one, other, change in zip(names, before, losses, less, strict=True)
    ]
    return html.table(("tokens read before", "baseline", "model", "difference", "standard error"), compared)


def settings_shown(result: ProbeResult) -> Mapping[str, html.Cell]:
    """The models, and the settings that this run had a use for."""
    shown: dict[str, html.Cell] = {"model": _source(result.model)}
    if result.baseline is not None:
        shown["baseline"] = _source(result.baseline)
    unused = set() if result.settings["tasks"] else {"samples"}
    for name, value in result.settings.items():
        if name not in unused and value is not None and value != []:
            shown[name.replace("_", " ")] = _value(value)
    return shown


def _source(model: ProbedModel) -> str:
    source = model.source
    name = model.model if source.given is None else source.given
    revision = "" if source.revision is None else f" at {source.revision}"
    return f"{name}{revision}, weights {source.weights_sha256[:12]}"


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return _list(value)
    return str(value)


def _list(values: list[object]) -> str:
    """`8 x 2048` for equal ones."""
    if len(values) > 1 and len(set(map(str, values))) == 1:
        return f"{len(values)} x {values[0]}"
    return ", ".join(str(value) for value in values)
