"""Tables and figures of benchmarks.selectors and benchmarks.pca."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, median

from matplotlib.axes import Axes

from benchmarks.cuts import overlap
from benchmarks.resumable import Row

COLORS = {
    "drrqr": "tab:blue",
    "energy": "tab:green",
    "l1": "tab:orange",
    "s-wanda": "tab:red",
    "gradient": "tab:purple",
    "random": "tab:gray",
    "fisher": "black",
    "ghost": "tab:olive",
    "pca-exact": "tab:cyan",
    "pca-nearest": "tab:pink",
    "pca-shared": "tab:brown",
}
STYLES = {"qk": "-", "k": "--", "q": ":"}
HEAD_FIGURES = ("condition_number", "sigma_min", "sigma_max", "energy")


def print_cuts(rows: Sequence[Row]) -> None:
    """One line a cut."""
    texts = list(dict.fromkeys(text for row in rows for text in row["perplexity"]))
    names = "".join(f"{text:>9}" for text in texts)
    divergences = f"{'KL text':>9}{'KL prompts':>11}"
    print(f"{'model':<14}{'method':<13}{'scoring':<8}{'keep':>5} {'epsilon':<8}{names}{divergences}{'memory':>8}")
    for row in rows:
        figures = "".join(f"{_number(row['perplexity'].get(text), 2):>9}" for text in texts)
        divergences = f"{_number(row['kl_text'], 4):>9}{_number(row['kl_prompts'], 4):>11}"
        place = f"{row['model']:<14}{row['method']:<13}{row['scoring']:<8}{row['key_dim']:>5} {row['norm_epsilon']:<8}"
        print(f"{place}{figures}{divergences}{_number(row['memory'], 1):>8}")


def print_heads(rows: Sequence[Row]) -> None:
    """Medians over the heads of each cut, and the mean share of channels that it has in common with drrqr's."""
    print(
        f"\n{'model':<14}{'method':<10}{'scoring':<8}{'keep':>5}{'condition':>11}{'largest':>11}{'sigma_min':>11}"
        f"{'sigma_max':>11}{'energy':>8}{'as drrqr':>10}"
    )
    for row in choices(rows):
        conditions = [math.inf if value is None else value for value in row["heads"]["condition_number"]]
        shared = overlap_with(rows, row, "drrqr")
        print(
            f"{row['model']:<14}{row['method']:<10}{row['scoring']:<8}{row['key_dim']:>5}{median(conditions):>11.4g}"
            f"{max(conditions):>11.4g}{median(row['heads']['sigma_min']):>11.4g}"
            f"{median(row['heads']['sigma_max']):>11.4g}{fmean(row['heads']['energy']):>8.3f}{_number(shared, 3):>10}"
        )


def choices(rows: Sequence[Row]) -> Iterator[Row]:
    """The rows of cuts, one of each choice of channels: the norm epsilon does not change it."""
    seen = set()
    for row in rows:
        choice = (row["model"], row["method"], row["scoring"], row["ratio"])
        if "heads" in row and choice not in seen:
            seen.add(choice)
            yield row


def overlap_with(rows: Sequence[Row], row: Row, method: str) -> float | None:
    """Mean over heads of the share of channels that `method`, scoring both streams, keeps too; None without it."""
    for other in choices(rows):
        same_cut = (other["model"], other["ratio"]) == (row["model"], row["ratio"])
        if same_cut and (other["method"], other["scoring"]) == (method, "qk"):
            return fmean(overlap(row["heads"]["kept"], other["heads"]["kept"]))
    return None


def draw_cuts(rows: Sequence[Row], path: Path) -> None:
    """KL on text, KL on prompts and memory against the share removed: a row of panels a norm epsilon and model."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = sorted({(row["model"], row["norm_epsilon"]) for row in rows if row["method"] != "dense"})
    figures = ("kl_text", "kl_prompts", "memory")
    figure, axes = plt.subplots(len(panels), 3, figsize=(14, 3.6 * len(panels)), squeeze=False)
    for line_of_axes, (model, epsilon) in zip(axes, panels, strict=True):
        for axis, name in zip(line_of_axes, figures, strict=True):
            of_panel = [row for row in rows if (row["model"], row["norm_epsilon"]) == (model, epsilon)]
            _draw_lines(axis, of_panel, name)
            dense = [row["memory"] for row in rows if (row["model"], row["method"]) == (model, "dense")]
            if name == "memory" and dense:
                axis.axhline(dense[0], color="black", linewidth=0.8, label="original")
            axis.set(title=f"{model}, epsilon {epsilon}", xlabel="share of key/query channels removed")
            if name != "memory":
                axis.set_yscale("log")
    for axis, label in zip(axes[0], ("KL on text", "KL on prompts", "memory score, %"), strict=True):
        axis.set_ylabel(label)
    axes[0][-1].legend(fontsize=6, ncols=2)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _draw_lines(axis: Axes, rows: Sequence[Row], name: str) -> None:
    for method, scoring in dict.fromkeys((row["method"], row["scoring"]) for row in rows if row["method"] != "dense"):
        line = sorted(
            (row["ratio"], row[name])
            for row in rows
            if (row["method"], row["scoring"]) == (method, scoring) and row[name] is not None
        )
        axis.plot(
            [ratio for ratio, _ in line],
            [value for _, value in line],
            STYLES[scoring],
            color=COLORS.get(method, "black"),
            marker="o",
            markersize=3,
            label=f"{method} {scoring}",
        )


def draw_heads(rows: Sequence[Row], path: Path) -> None:
    """Spread over the heads of what `print_heads` summarises, for cuts that score both streams, by method and ratio;
    beside it the overlap of each two methods at each ratio. A row of panels a model."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    made = [row for row in choices(rows) if row["scoring"] == "qk"]
    models = sorted({row["model"] for row in made})
    ratios = sorted({row["ratio"] for row in made})
    columns = len(HEAD_FIGURES) + len(ratios)
    figure, axes = plt.subplots(len(models), columns, figsize=(3.6 * columns, 3.6 * len(models)), squeeze=False)
    for line_of_axes, model in zip(axes, models, strict=True):
        of_model = [row for row in made if row["model"] == model]
        for axis, name in zip(line_of_axes, HEAD_FIGURES, strict=False):
            _draw_spread(axis, of_model, ratios, name)
        line_of_axes[0].set_ylabel(model)
        for axis, ratio in zip(line_of_axes[len(HEAD_FIGURES) :], ratios, strict=True):
            _draw_overlap(axis, [row for row in of_model if row["ratio"] == ratio], ratio)
    patches, labels = axes[0][0].get_legend_handles_labels()
    by_label = dict(zip(labels, patches, strict=True))
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.legend(by_label.values(), by_label.keys(), loc="lower center", ncols=len(by_label))
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _draw_spread(axis: Axes, rows: Sequence[Row], ratios: Sequence[float], name: str) -> None:
    """A box of all heads for each method, ratio by ratio."""
    methods = list(dict.fromkeys(row["method"] for row in rows))
    for row in rows:
        position = ratios.index(row["ratio"]) * (len(methods) + 1) + methods.index(row["method"])
        values = [value for value in row["heads"][name] if value is not None]
        box = axis.boxplot(values, positions=[position], widths=0.8, patch_artist=True, showfliers=False)
        for patch in box["boxes"]:
            patch.set(facecolor=COLORS.get(row["method"], "black"), label=row["method"])
    middle = [index * (len(methods) + 1) + (len(methods) - 1) / 2 for index in range(len(ratios))]
    axis.set_xticks(middle, [f"{ratio:g}" for ratio in ratios])
    axis.set(title=name.replace("_", " "), xlabel="share of key/query channels removed")
    if name in ("condition_number", "sigma_min"):
        axis.set_yscale("log")


def _draw_overlap(axis: Axes, rows: Sequence[Row], ratio: float) -> None:
    methods = [row["method"] for row in rows]
    shares = [[fmean(overlap(a["heads"]["kept"], b["heads"]["kept"])) for b in rows] for a in rows]
    axis.imshow(shares, vmin=1 - ratio, vmax=1.0, cmap="Blues")
    for line, row_of_shares in enumerate(shares):
        for column, share in enumerate(row_of_shares):
            color = "white" if share > 1 - 0.3 * ratio else "black"
            axis.text(column, line, f"{share:.2f}", ha="center", va="center", fontsize=6, color=color)
    axis.set_xticks(range(len(methods)), methods, rotation=60, fontsize=7)
    axis.set_yticks(range(len(methods)), methods, fontsize=7)
    axis.set(title=f"overlap, {ratio:g} removed (chance {1 - ratio:.2f})")
    axis.title.set_fontsize(8)


def _number(value: float | None, digits: int) -> str:
    return "none" if value is None else f"{value:.{digits}f}"
