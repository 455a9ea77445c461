"""The main figures of a probe in a few lines, for the terminal and the top of the page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from compressor.evaluation.estimates import Estimate
from compressor.evaluation.results import Score
from compressor.probe.head_search import HeadSearch
from compressor.probe.horizons import LONG_HORIZON, SHORT_HORIZON
from compressor.probe.results import ProbedModel, ProbeResult, Truncation

_SHOWN = (("entropy_effective_rank", "entropy effective rank"), ("utilisation", "utilisation"))


def summary_lines(result: ProbeResult) -> Iterator[str]:
    """A line each; what is inside the first starts with spaces."""
    yield from _of_states(result.model)
    for cut in () if result.truncation is None else result.truncation.text:
        if cut.rank is not None and cut.difference is not None:
            yield f"  states cut to rank {cut.rank}: loss {signed(cut.difference.all)}"
    yield from _of_tasks(result.truncation, "")
    yield from _of_tasks(result.windowed, ", softmax layers windowed")
    for search in result.searches:
        yield _of_search(search)
    yield from _of_comparison(result)


def _of_tasks(truncation: Truncation | None, beside: str) -> Iterator[str]:
    """Scores by rank, a line a task."""
    tasks = () if truncation is None else truncation.tasks
    for name in dict.fromkeys((each.task, each.length) for each in tasks):
        scores = ", ".join(
            f"{'uncut' if each.rank is None else each.rank} {each.score.mean:.0%}"
            for each in tasks
            if (each.task, each.length) == name
        )
        yield f"  {name[0]} at {name[1]} tokens by rank{beside}: {scores}"


def signed(value: Estimate | Score) -> str:
    """A difference in nats a token with its standard error, or why there is none."""
    if value.mean is None:
        return "not measured: there is no such token"
    if value.standard_error is None:
        return f"{value.mean:+.4f} nats a token (of one sequence: no standard error)"
    return f"{value.mean:+.4f} +- {value.standard_error:.4f} nats a token"


def _of_states(model: ProbedModel) -> Iterator[str]:
    heads, horizons = model.states.heads, model.states.horizons
    yield f"{len(heads)} heads with states of {model.value_dim} x {model.key_dim}; at the end of the text:"
    for name, label in _SHOWN:
        values = sorted(value for head in heads if (value := head.end[name].median) is not None)
        yield f"  {label}: median {_median(values):.3g}, from {values[0]:.3g} to {values[-1]:.3g}"
    if any(head.horizon is not None for head in heads):
        correlation = "none" if horizons.spearman is None else f"{horizons.spearman:.2f}"
        yield (
            f"  {horizons.share_short:.0%} of the {len(heads)} heads forget within {SHORT_HORIZON} tokens, "
            f"{len(horizons.long_heads)} of them keep beyond {LONG_HORIZON}; rank correlation of horizon and effective "
            f"rank: {correlation}"
        )


def _of_search(search: HeadSearch) -> str:
    best = search.heads[0] if search.heads else None
    found = "no head alone" if best is None else f"layer {best.layer} head {best.head} {signed(best.rise)}"
    return f"  {search.name} at rank {search.rank}: {signed(search.whole)} for all heads; {found}"


def _of_comparison(result: ProbeResult) -> Iterator[str]:
    if result.baseline is None or result.comparison is None or result.loss_difference is None:
        return
    figures = ", ".join(
        f"{label} {result.comparison[name].before:.3g} -> {result.comparison[name].after:.3g}" for name, label in _SHOWN
    )
    yield f"baseline {result.baseline.model} -> {result.model.model}, means over heads: {figures}"
    losses = (result.baseline.loss.all.mean, result.model.loss.all.mean)
    shown = " -> ".join("none" if loss is None else f"{loss:.4f}" for loss in losses)
    yield f"  loss {shown}, {signed(result.loss_difference.all)}"


def _median(ordered: Sequence[float]) -> float:
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2
