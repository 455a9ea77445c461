"""One row a run: accuracy by position, betas, keys of the solving head, accuracy against kept key width."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.state_tracking.inspection import BETA_BINS

_COLORS = {"rrqr": "tab:blue", "energy": "tab:orange", "random": "tab:green"}


def draw(runs: list[dict[str, Any]], path: Path) -> None:
    """Runs that were interrupted before their end are left out."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    whole = [run for run in runs if "pruning" in run]
    figure, axes = plt.subplots(max(1, len(whole)), 4, figsize=(16, 2.8 * max(1, len(whole))), squeeze=False)
    for row, run in zip(axes, whole, strict=False):
        _draw_positions(row[0], run)
        _draw_betas(row[1], run)
        _draw_components(row[2], run)
        _draw_pruning(row[3], run)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=80)
    plt.close(figure)


def _draw_positions(axis: Any, run: dict[str, Any]) -> None:
    test, settings = run["test"], run["settings"]
    model = settings["model"]
    points = [
        (bucket * test["bucket"] + test["bucket"] / 2, value)
        for bucket, value in enumerate(test["accuracy_by_bucket"])
        if value is not None
    ]
    axis.plot(*zip(*points, strict=True))
    axis.axhline(run["chance"], color="gray", linestyle=":", label="chance")
    axis.axvline(settings["training"]["longest"], color="gray", linestyle="--", label="trained to")
    eigenvalues = "[-1, 1]" if model["negative_eigenvalues"] else "[0, 1]"
    title = f"{settings['task']}, n_h {model['num_householder']}, depth {model['depth']}, {eigenvalues}"
    if model.get("initial_beta") is not None:
        title += f", betas from {model['initial_beta']:g}"
    axis.set_title(title, fontsize=10)
    axis.set(xlabel="position", ylabel="accuracy", ylim=(0, 1.03))
    axis.legend(fontsize=7)


def _draw_betas(axis: Any, run: dict[str, Any]) -> None:
    centres = [2.0 * (bin_index + 0.5) / BETA_BINS for bin_index in range(BETA_BINS)]
    head = run["solving_head"]
    for betas in betas_of(run, head):
        axis.plot(centres, betas["histogram"], marker=".", label=f"step {betas['step']}")
    axis.set(title=f"betas of head {head['head']}, layer {head['layer']}", xlabel="beta", ylabel="share")
    axis.legend(fontsize=6)


def betas_of(run: dict[str, Any], head: dict[str, Any]) -> list[dict[str, Any]]:
    """Distributions of one head, a Householder step each."""
    return [betas for betas in run["betas"] if (betas["layer"], betas["head"]) == (head["layer"], head["head"])]


def _draw_components(axis: Any, run: dict[str, Any]) -> None:
    head = run["solving_head"]
    for name, label in (("variance_share", "about the mean"), ("energy_share", "about zero")):
        axis.plot(range(1, len(head[name]) + 1), head[name], marker=".", label=label)
    axis.set(title=f"keys of head {head['head']}, layer {head['layer']}", xlabel="component", ylabel="share")
    axis.legend(fontsize=7)


def _draw_pruning(axis: Any, run: dict[str, Any]) -> None:
    lengths = list(run["test"]["accuracy"])
    for method, color in _COLORS.items():
        cells = [cell for cell in run["pruning"] if cell["method"] == method]
        for length, style in {lengths[0]: "-", lengths[-1]: "--"}.items():
            values = [cell["accuracy"][length] for cell in cells]
            label = f"{method}, to {length}"
            axis.plot([cell["keep"] for cell in cells], values, style, color=color, marker=".", label=label)
    axis.set(title="channels kept, no recovery", xlabel="key channels a head", ylabel="accuracy", ylim=(0, 1.03))
    axis.legend(fontsize=6)
