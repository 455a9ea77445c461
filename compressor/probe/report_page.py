"""The report of a probe as one page, and its figures."""

from __future__ import annotations

from collections.abc import Mapping

from compressor.probe import html_report as html
from compressor.probe.experiment import RankOnText
from compressor.probe.figures import (
    draw_comparison,
    draw_curves,
    draw_heat_maps,
    draw_reasons,
    draw_spectra,
    draw_truncation,
    png,
)
from compressor.probe.head_search import HeadSearch
from compressor.probe.horizons import LONG_HORIZON, SHORT_HORIZON
from compressor.probe.main_figures import summary_lines
from compressor.probe.results import ProbedModel, ProbeResult, Truncation
from compressor.probe.settings_page import comparison_tables, loss_by_position, settings_shown
from compressor.probe.summary import HeadSummary
from compressor.probe.terms import CONDITION_BOUND, LABELS, TERMS

CAPTIONS = {
    "heat_maps": "States at the end of the texts, layers x heads, medians over documents.",
    "curves": "Along the text: medians over documents and the heads of a layer; of a few layers, shaded from the "
    "lowest head to the highest.",
    "spectra": "Singular values at the end of the texts over the largest one: mean over documents, median over heads.",
    "reasons": "Effective rank against decay horizon and against the rank of the decayed key covariance; condition "
    "number against its lower bound 1/sqrt(utilisation). Dashed: y = x.",
    "truncation": "States cut to r directions after every segment: rise of the loss on text, with paired standard "
    "errors where there is more than one document; by position in it; scores of retrieval tasks.",
    "windowed": "The same with softmax layers that see one segment back: only states reach further.",
    "comparison": "Baseline and model: utilisation along the text, utilisation of each head, singular values, "
    "loss by position.",
}


def draw_all(result: ProbeResult) -> dict[str, bytes]:
    """PNG images by name, a name of CAPTIONS each."""
    states = result.model.states
    figures = {
        "heat_maps": draw_heat_maps(states),
        "curves": draw_curves(states),
        "spectra": draw_spectra(states),
        "reasons": draw_reasons(states),
    }
    if result.truncation is not None and (result.truncation.text or result.truncation.tasks):
        figures["truncation"] = draw_truncation(result.truncation.text, result.truncation.tasks)
    if result.windowed is not None and (result.windowed.text or result.windowed.tasks):
        figures["windowed"] = draw_truncation(result.windowed.text, result.windowed.tasks)
    if result.baseline is not None:
        figures["comparison"] = draw_comparison(result.baseline, result.model)
    return {name: png(figure) for name, figure in figures.items()}


def report_page(result: ProbeResult, images: Mapping[str, bytes]) -> str:
    """One HTML file; `images` as `draw_all` gives them."""
    shown = {name: html.figure(image, CAPTIONS[name]) for name, image in images.items()}
    parts = [html.paragraph(line) for line in summary_lines(result)]
    parts += [html.paragraph(f"note: {note}", "note") for note in result.notes]
    parts += [html.heading("How much of the state is used"), shown["heat_maps"], shown["curves"], shown["spectra"]]
    parts += [html.details("All heads", _heads(result.model))]
    parts += [html.heading("Why"), *_reasons(result.model), shown["reasons"]]
    if result.truncation is not None:
        parts += [html.heading("Whether the model needs it")]
        parts += [shown["truncation"]] if "truncation" in shown else []
        parts += _truncation(result.truncation)
    if result.windowed is not None:
        parts += [html.heading("The same, where only states reach back")]
        parts += [shown["windowed"]] if "windowed" in shown else []
        parts += _truncation(result.windowed)
    for search in result.searches:
        parts += [html.heading(f"Heads that carry {search.name}"), *_search(search)]
    if result.baseline is not None:
        parts += [html.heading(f"Beside the baseline {result.baseline.model}"), shown["comparison"]]
        parts += comparison_tables(result)
    parts += [html.heading("Loss by position in the text"), loss_by_position(result)]
    parts += [html.heading("What the words mean"), html.definitions(TERMS)]
    parts += [html.heading("Settings"), html.facts(settings_shown(result)), html.facts(dict(result.versions))]
    return html.page(f"Probe of {result.model.model}", parts)


def _heads(model: ProbedModel) -> str:
    columns = (
        "layer",
        "head",
        *LABELS.values(),
        CONDITION_BOUND,
        "horizon",
        "mean key",
        "keys in horizon",
        "decayed keys",
    )
    rows = [
        (
            head.layer, head.head, *(head.end[name].median for name in LABELS if name != "condition_number"),
            _condition(head, model.rank_threshold), head.condition_bound, head.horizon,
            head.mean_key_norm, head.rank_in_horizon, head.rank_decayed,
        )
        for head in model.states.heads
    ]  # fmt: skip
    return html.table(columns, rows)


def _condition(head: HeadSummary, rank_threshold: float) -> html.Cell:
    """The condition number, as far as the rounding of the state lets it be known."""
    value = head.end["condition_number"].median
    return value if value is not None and value <= 1 / rank_threshold else f"> {1 / rank_threshold:,.0f}"


def _reasons(model: ProbedModel) -> list[str]:
    horizons = model.states.horizons
    if all(head.horizon is None for head in model.states.heads):
        return [html.paragraph("This family has no decay: every horizon is infinite.")]
    long = ", ".join(f"{layer}.{head}" for layer, head in horizons.long_heads) or "none"
    values: dict[str, html.Cell] = {
        "rank correlation of decay horizon and effective rank (Spearman)": horizons.spearman,
        f"share of heads that forget within {SHORT_HORIZON} tokens": horizons.share_short,
        f"heads (layer.head) with a horizon above {LONG_HORIZON} tokens": long,
    }
    return [html.facts(values)]


def _truncation(truncation: Truncation) -> list[str]:
    parts = [html.paragraph(f"States are cut after every {truncation.segment} tokens.")]
    if truncation.text:
        columns = ("rank", "loss", "rise", "standard error", "rise, copied tokens", "rise, others", "states by SVD")
        parts.append(html.table(columns, [_text_row(each) for each in truncation.text]))
    if truncation.tasks:
        task_columns = ("task", "length", "rank", "score", "change", "standard error", "answer loss", "rise")
        rows = [
            (
                each.task,
                each.length,
                "all" if each.rank is None else each.rank,
                each.score.mean,
                None if each.score_difference is None else each.score_difference.mean,
                None if each.score_difference is None else each.score_difference.standard_error,
                each.answer_loss.mean,
                None if each.loss_difference is None else each.loss_difference.mean,
            )
            for each in truncation.tasks
        ]
        parts.append(html.table(task_columns, rows))
    return parts


def _text_row(cut: RankOnText) -> tuple[html.Cell, ...]:
    if cut.difference is None:
        return ("all", cut.loss.all.mean, None, None, None, None, None)
    rise = cut.difference
    return (
        cut.rank,
        cut.loss.all.mean,
        rise.all.mean,
        rise.all.standard_error,
        rise.copied.mean,
        rise.rest.mean,
        cut.exact,
    )


def _search(search: HeadSearch) -> list[str]:
    parts = [
        html.paragraph(
            f"Rise of the loss, in nats a token, where states are cut to rank {search.rank}: all heads "
            f"{search.whole.mean:.4g}; below, one layer at a time, then one head at a time in the layers that matter."
        )
    ]
    for columns, effects in ((("layer", ""), search.layers), (("layer", "head"), search.heads)):
        rows = [(one.layer, one.head, one.rise.mean, one.rise.standard_error) for one in effects]
        if rows:
            parts.append(html.table((*columns, "rise", "standard error"), rows))
    return parts
