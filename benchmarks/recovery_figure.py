"""The table and the curve of `benchmarks.recovery`'s rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from rich.console import Console
from rich.table import Table

from benchmarks.resumable import Row
from compressor.errors import RequestError


def print_table(rows: Sequence[Row]) -> None:
    texts = list(dict.fromkeys(name for row in rows for name in row["perplexity"]))
    columns = [
        "model",
        "ratio",
        "method",
        "variant",
        *texts,
        "KL text",
        "KL prompts",
        "memory, tokens",
        "memory",
        "to dense",
        "s",
    ]
    table = Table(*columns, "settings")
    for row in rows:
        error = row["memory_standard_error"]
        table.add_row(
            row["model"],
            f"{row['ratio']:g}",
            row["method"] if row["ratio"] else "",
            row["variant"],
            *(f"{row['perplexity'][name]:.2f}" if name in row["perplexity"] else "not measured" for name in texts),
            f"{row['kl_text']:.4f}",
            f"{row['kl_prompts']:.4f}",
            f"{100 * row['memory_tokens']:.1f}",
            f"{100 * row['memory']:.1f}",
            f"{100 * row['memory_difference']:+.1f}" + ("" if error is None else f" ± {100 * error:.1f}"),
            f"{row['seconds']:.0f}",
            " ".join(row["settings"]),
        )
    Console(width=200).print(table)


def draw(rows: Sequence[Row], path: Path) -> None:
    """Perplexity on the first text, and memory, of the variants that every cut by the first row's method has.

    Raises:
        RequestError: there is no such cut, or a model was not measured as it is.
    """
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    groups: dict[tuple[str, float], dict[str, Row]] = {}
    for row in rows:
        if row["ratio"] > 0 and row["method"] == rows[0]["method"]:
            groups.setdefault((row["model"], row["ratio"]), {})[row["variant"]] = row
    dense = {row["model"]: row for row in rows if row["variant"] == "dense"}
    missing = [model for model, _ in groups if model not in dense]
    if missing or not groups:
        raise RequestError(
            f"no row of {missing[0]} as it is, which cuts are compared with; measure its variant dense."
            if missing
            else f"no cut by {rows[0]['method']}, which the first row has, was measured; leave out --figure."
        )
    names = [name for name in next(iter(groups.values())) if all(name in members for members in groups.values())]
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    for (model, ratio), members in groups.items():
        text = next(iter(dense[model]["perplexity"]))
        base = dense[model]["perplexity"][text]
        style = {"marker": "o", "label": f"{model} at {ratio:g}"}
        axes[0].plot(names, [100 * (members[name]["perplexity"][text] / base - 1) for name in names], **style)
        axes[1].plot(names, [100 * members[name]["memory_tokens"] for name in names], **style)
    axes[0].set_ylabel("perplexity on prose above the original's, %")
    axes[1].set_ylabel("memory, % of answer tokens")
    for axis in axes:
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes[1].legend(fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)
