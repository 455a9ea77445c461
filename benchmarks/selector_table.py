"""The table of every method, scoring and ratio, from result files of benchmarks.selectors and benchmarks.recovery.

    python -m benchmarks.selector_table --results docs/results/selectors-*.json \\
        --recovery docs/results/recovery.json --output table.md --figure docs/selectors.png

One line a cut; an arrow leads from before the refit to after it. Perplexity a token of each text; KL(original || cut)
in nats a token; memory scores in percent, and their paired differences in points with standard errors, "<" before that
of one prompt where all prompts agree (compressor.evaluation.tables). After the arrow of four million tokens of training
stands what benchmarks.recovery measured of the method's cut. What the files lack is told to be not measured. Files of
one model must be measured under the same settings: prompts are paired by their place.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.options import check_options
from benchmarks.output_files import draw_figure, replaced, told_in_one_sentence
from benchmarks.resumable import Columns, Row, different_settings, read_result
from benchmarks.selector_cuts import DENSE, FISHER, KEYS, METHODS, made_cuts
from benchmarks.selector_figures import COLORS
from benchmarks.selector_measures import memory_difference
from compressor.errors import RequestError
from compressor.selection.request import SCORINGS

RATIOS = (0.25, 0.5, 0.75)
RECOVERED = ("drrqr", FISHER)
"""Methods whose cuts are trained."""
TRAINED = "mixers-4M"
NOT_MEASURED = "not measured"
COLUMNS = (
    "model", "removed", "method", "scoring", "epsilon", "perplexity, {texts}", "KL text", "KL prompts", "memory",
    "memory less original's", "memory less drrqr's", "after 4 M tokens: KL text, KL prompts, memory",
)  # fmt: skip
NUMBER = int | float
MEASURED: Columns = {"model": str, "ratio": NUMBER, "method": str, "kl_text": NUMBER, "kl_prompts": NUMBER}
OF_SELECTORS: Columns = {
    **MEASURED, "scoring": str, "norm_epsilon": str, "perplexity": dict, "memory": NUMBER | None, "scores": dict,
}  # fmt: skip
OF_RECOVERY: Columns = {**MEASURED, "variant": str, "memory": NUMBER}
FREE = ("no_refit", "memory_prompts", "memory_methods", "text", "batch_size", "device")
"""Settings that say where and how much was measured, and change no figure of a row beyond rounding."""
ROUNDING = 1e-10
"""Points: equal values have a standard error of no more than this."""


@told_in_one_sentence()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, nargs="+", required=True, help="files of benchmarks.selectors")
    parser.add_argument("--recovery", type=Path, nargs="*", default=[], help="files of benchmarks.recovery")
    parser.add_argument("--ratios", type=float, nargs="+", default=list(RATIOS))
    parser.add_argument("--output", type=Path, help="write the table there and print it not")
    parser.add_argument("--figure", type=Path)
    arguments = parser.parse_args()
    check_options(arguments)
    rows = merged(read_rows(arguments.results))
    recovered = [
        row for file in arguments.recovery for row in read_result(file, OF_RECOVERY, "benchmarks.recovery").rows
    ]
    table = markdown(rows, recovered, arguments.ratios)
    if arguments.output is None:
        print(table)
    else:
        with replaced(arguments.output) as partial:
            partial.write_text(table, encoding="utf-8")
    draw_before_and_after(rows, arguments.figure)


def read_rows(files: Sequence[Path]) -> list[Row]:
    """The rows of files of benchmarks.selectors, one file after the other.

    Raises:
        RequestError: a file is no such file, or two files have measured one model under other settings.
    """
    results = [read_result(file, OF_SELECTORS, "benchmarks.selectors") for file in files]
    first: dict[str, tuple[Path, Mapping[str, Any]]] = {}
    for result in results:
        settings = {name: value for name, value in result.settings.items() if name not in FREE}
        # Texts of the same name may lie in another folder elsewhere.
        settings["calibration"] = Path(str(settings.get("calibration"))).name
        for model in dict.fromkeys(row["model"] for row in result.rows):
            file, others = first.setdefault(model, (result.path, settings))
            different = different_settings(settings, others)
            if different:
                raise RequestError(
                    f"{result.path} has measured {model} with another {', '.join(different)} than {file}: "
                    "their prompts cannot be paired; give files of one model with the same settings."
                )
    return [row for result in results for row in result.rows]


def merged(rows: Sequence[Row]) -> list[Row]:
    """One row a cut, the first; files of the same model at other ratios all have the original."""
    found: dict[tuple[object, ...], Row] = {}
    for row in rows:
        found.setdefault(_key(row), row)
    return list(found.values())


def markdown(rows: Sequence[Row], recovered: Sequence[Row], ratios: Collection[float]) -> str:
    """Every cut of every model in `rows`, measured or not, at `ratios` and at the epsilons of the model's cuts."""
    known = {_key(row): row for row in rows}
    texts = list(dict.fromkeys(name for row in rows for name in row["perplexity"]))
    header = [column.format(texts=" / ".join(texts)) for column in COLUMNS]
    lines = [header, ["---"] * len(header)]
    for model in dict.fromkeys(row["model"] for row in rows):
        dense = known.get(_key({"model": model, **DENSE}))
        if dense is not None:
            lines.append([model, "0", "original", "", "", _texts(dense, texts), "0", "0", _memory(dense), "", "", ""])
        for cut in _cuts_of(rows, model, dense, ratios):
            drrqr = known.get(_key({**cut, "method": "drrqr", "scoring": "qk"}))
            place = [model, f"{cut['ratio']:g}", cut["method"], cut["scoring"], cut["norm_epsilon"]]
            cells = _measured(known.get(_key(cut)), dense, drrqr, texts)
            lines.append([*place, *cells, _trained(cut, recovered)])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _key(row: Row) -> tuple[object, ...]:
    return tuple(row[name] for name in KEYS)


def _cuts_of(rows: Sequence[Row], model: str, dense: Row | None, ratios: Collection[float]) -> Iterator[Row]:
    """Ratio by ratio, and within a ratio method by method: what should be there, and what is beside it."""
    own = [row for row in rows if row["model"] == model and row["method"] != "dense"]
    asked = [] if dense is None else dense.get("methods", [])
    methods = list(dict.fromkeys([*METHODS, *asked, *(row["method"] for row in own)]))
    epsilons = sorted({row["norm_epsilon"] for row in own})
    for epsilon in epsilons:
        for ratio in sorted(ratios):
            for cut in made_cuts(methods, SCORINGS, [ratio], [epsilon]):
                yield {"model": model, **cut}


def _measured(row: Row | None, dense: Row | None, drrqr: Row | None, texts: Sequence[str]) -> list[str]:
    if row is None:
        return [NOT_MEASURED] * 6
    after = row.get("after_refit")
    pairs = [(_texts(row, texts), after and _texts(after, texts))]
    pairs += [(f"{row[name]:.3f}", after and f"{after[name]:.3f}") for name in ("kl_text", "kl_prompts")]
    pairs.append((_memory(row), after and _memory(after)))
    # The original is not refitted; drrqr's cut is.
    for other, other_after in ((dense, dense), (drrqr, None if drrqr is None else drrqr.get("after_refit"))):
        if other is row:
            pairs.append(("", ""))
        else:
            pairs.append((_difference(row, other), after and _difference(after, other_after)))
    return [_arrow(*pair) for pair in pairs]


def _arrow(before: str, after: str | None) -> str:
    later = NOT_MEASURED if after is None else after
    return before if before == later and before in ("", NOT_MEASURED) else f"{before} → {later}"


def _texts(row: Row, texts: Sequence[str]) -> str:
    return " / ".join(f"{row['perplexity'][name]:.1f}" if name in row["perplexity"] else "none" for name in texts)


def _memory(row: Row) -> str:
    return NOT_MEASURED if row["memory"] is None else f"{row['memory']:.1f}"


def _difference(row: Row, other: Row | None) -> str:
    if other is None or "scores" not in row or "scores" not in other:
        return NOT_MEASURED
    found = memory_difference(row, other)
    if found is None:
        return NOT_MEASURED
    difference, error = found
    if error is None:
        return f"{difference:+.1f}"
    if error < ROUNDING:
        return f"{difference:+.1f} ± <{_error_of_one_prompt(row, other):.1f}"
    return f"{difference:+.1f} ± {error:.1f}"


def _error_of_one_prompt(row: Row, other: Row) -> float:
    """Standard error in points, had one prompt a task of those that both were asked differed wholly.

    One of n values so: standard error 1/n. Of the mean over tasks: sqrt(sum 1/n^2) / tasks.
    """
    scores = [(words.split(), other["scores"][task].split()) for task, words in row["scores"].items()]
    return 100 * math.hypot(*(1 / min(len(one), len(another)) for one, another in scores)) / len(scores)


def _trained(cut: Row, recovered: Sequence[Row]) -> str:
    """Of the cut's training runs, with the same epsilon where there are such, what diverges least; as it was made."""
    if cut["method"] not in RECOVERED or cut["scoring"] != "qk":
        return ""
    runs = [
        row
        for row in recovered
        if (row["model"], row["ratio"]) == (cut["model"], cut["ratio"])
        and row["method"].split(",")[0] == cut["method"]
        and row["variant"].startswith(TRAINED)
    ]
    same = [row for row in runs if row["variant"].endswith("scaled") == (cut["norm_epsilon"] == "scaled")]
    if not runs:
        return NOT_MEASURED
    best = min(same or runs, key=lambda row: row["kl_text"] + row["kl_prompts"])
    figures = f"{best['kl_text']:.3f}, {best['kl_prompts']:.3f}, {100 * best['memory']:.1f}"
    epsilon = "scaled" if best["variant"].endswith("scaled") else "keep"
    notes = [*best["method"].split(", ")[1:], *([f"epsilon {epsilon}"] if epsilon != cut["norm_epsilon"] else [])]
    return f"{figures} ({', '.join(notes)})" if notes else figures


def draw_before_and_after(rows: Sequence[Row], path: Path | None) -> None:
    """KL on text, KL on prompts and memory against the share removed, dotted before the refit and solid after it, of
    cuts that score both streams: a row of panels a model and norm epsilon; nothing when `path` is None.

    Raises:
        RequestError: there is no such cut, or the figure cannot be written.
    """
    cuts = [row for row in rows if row["method"] != "dense" and row["scoring"] == "qk"]
    draw_figure(path, cuts, lambda partial: _draw_panels(rows, cuts, partial))


def _draw_panels(rows: Sequence[Row], cuts: Sequence[Row], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = sorted({(row["model"], row["norm_epsilon"]) for row in cuts})
    names = {"kl_text": "KL on text", "kl_prompts": "KL on prompts", "memory": "memory score, %"}
    size = (4.2 * len(names), 3.4 * len(panels))
    figure, axes = plt.subplots(len(panels), len(names), figsize=size, squeeze=False, layout="constrained")
    for line_of_axes, (model, epsilon) in zip(axes, panels, strict=True):
        of_panel = [row for row in cuts if (row["model"], row["norm_epsilon"]) == (model, epsilon)]
        for axis, (name, label) in zip(line_of_axes, names.items(), strict=True):
            for method in dict.fromkeys(row["method"] for row in of_panel):
                own = sorted((row for row in of_panel if row["method"] == method), key=lambda row: row["ratio"])
                for style, made in (
                    (":", own),
                    ("-", [{**row, **row.get("after_refit", {name: None})} for row in own]),
                ):
                    points = [(row["ratio"], row[name]) for row in made if row[name] is not None]
                    color, label_of = COLORS.get(method, "black"), method if style == "-" else None
                    axis.plot(*zip(*points, strict=True) if points else ([], []), style, color=color, marker="o",
                              markersize=3, label=label_of)  # fmt: skip
            dense = [row[name] for row in rows if (row["model"], row["method"]) == (model, "dense")]
            if name == "memory" and dense and dense[0] is not None:
                axis.axhline(dense[0], color="black", linewidth=0.8, label="original")
            elif name != "memory":
                axis.set_yscale("log")
            axis.set(title=f"{model}, epsilon {epsilon}", xlabel="share of channels removed", ylabel=label)
    axes[0][-1].legend(fontsize=6, ncols=2)
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    main()
