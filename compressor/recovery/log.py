"""What a training run reports: a file with one JSON object a line, and the curve drawn from it.

A step's line has the fields of `StepRecord`. An evaluation's line has `step`, the steps done before it, and
`evaluation`, its figures by name; a figure that is NaN or infinite is null.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from compressor.errors import RequestError, RunError
from compressor.json_text import parse_json

LOG_FILE = "training.jsonl"


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One finished step; the losses are those of the weights before it, in nats a predicted token.

    Attributes:
        step: counted from 1.
        loss: what was minimised, the weighted sum of the three terms that follow.
        kl: to the teacher, at the temperature; 0 without a teacher.
        cross_entropy: at temperature 1.
        matching: error of `matching`, without unit; 0 where it is not computed.
        learning_rate: of this step.
        gradient_norm: before it was limited.
        tokens: trained on so far.
        seconds: of training so far, over all runs that were resumed, without evaluation and checkpoints.
        tokens_per_second: of this step alone.
    """

    step: int
    loss: float
    kl: float
    cross_entropy: float
    matching: float
    learning_rate: float
    gradient_norm: float
    tokens: int
    seconds: float
    tokens_per_second: float


class TrainingLog:
    """Appends to a file. Every line is handed to the system at once, so that a killed process loses none.

    Every method raises RunError where the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def begin(self, finished_steps: int) -> None:
        """Start the file anew, or keep of it what a run that goes on after `finished_steps` does not repeat."""
        with _explained(self.path):
            kept = [json.dumps(line) + "\n" for line in read_log(self.path) if _is_before(line, finished_steps)]
            partial = self.path.with_name(f".{self.path.name}.partial")
            partial.write_text("".join(kept), encoding="utf-8")
            partial.replace(self.path)

    def append(self, record: StepRecord) -> None:
        self._append(asdict(record))

    def append_evaluation(self, step: int, figures: Mapping[str, float]) -> None:
        finite = {name: value if math.isfinite(value) else None for name, value in figures.items()}
        self._append({"step": step, "evaluation": finite})

    def sync(self) -> None:
        """Return when the lines are on the disk."""
        with _explained(self.path), self.path.open("rb") as file:
            os.fsync(file.fileno())

    def _append(self, line: Mapping[str, Any]) -> None:
        with _explained(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")


def read_log(path: Path) -> list[dict[str, Any]]:
    """All lines of a log that are whole, in order; none where there is no file."""
    if not path.exists():
        return []
    lines = []
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = parse_json(text)
        except ValueError:
            continue  # cut short by a full disk
        if isinstance(line, dict) and isinstance(line.get("step"), int):
            lines.append(line)
    return lines


def draw_curve(log: Path, figure_path: Path) -> None:
    """Draw losses, learning rate and, where there are any, evaluations over the steps; PNG, SVG or PDF by the name.

    Raises:
        RequestError: the log holds no steps, or the figure cannot be written.
    """
    from matplotlib.figure import Figure

    lines = read_log(log)
    records = [line for line in lines if "loss" in line]
    evaluations = [line for line in lines if "evaluation" in line]
    if not records:
        raise RequestError(f"{log} holds no training steps to draw; give the log of a run that did at least 1.")
    figure = Figure(figsize=(11 if evaluations else 8, 3.8), layout="constrained")
    losses, rates, *rest = figure.subplots(1, 3 if evaluations else 2)
    _draw_lines(losses, "nats a token", _columns(records, ("loss", "kl", "cross_entropy", "matching")))
    _draw_lines(rates, "learning rate", _columns(records, ("learning_rate",)))
    for axes in rest:
        names = tuple(dict.fromkeys(name for line in evaluations for name in line["evaluation"]))
        flat = [{"step": line["step"], **line["evaluation"]} for line in evaluations]
        _draw_lines(axes, "held-out evaluation", _columns(flat, names), marker="o")
    try:
        figure.savefig(figure_path, dpi=150)
    except (OSError, ValueError) as error:  # ValueError: a file ending that names no format
        reason = error.strerror if isinstance(error, OSError) else error
        raise RequestError(f"{figure_path} cannot be written: {reason}; choose another file.") from error


Column = tuple[list[int], list[float]]


def _columns(lines: list[dict[str, Any]], names: tuple[str, ...]) -> dict[str, Column]:
    """Steps and values of every name that has another value than 0 somewhere; a line without a value is left out."""
    columns = {}
    for name in names:
        points = [(line["step"], line[name]) for line in lines if line.get(name) is not None]
        if any(value for _, value in points):
            columns[name] = ([step for step, _ in points], [value for _, value in points])
    return columns


def _draw_lines(axes: Any, label: str, columns: Mapping[str, Column], marker: str | None = None) -> None:
    for name, (steps, values) in columns.items():
        axes.plot(steps, values, marker=marker, label=name.replace("_", " "))
    values = [value for _, column in columns.values() for value in column]
    if values and min(values) > 0 and max(values) > 10 * min(values):
        axes.set_yscale("log")
    axes.set(xlabel="step", ylabel=label)
    axes.grid(alpha=0.3)
    if len(columns) > 1:
        axes.legend(fontsize="small")


def _is_before(line: Mapping[str, Any], finished_steps: int) -> bool:
    """An evaluation after the last finished step is made once more."""
    return line["step"] < finished_steps + ("evaluation" not in line)


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunError(
            f"{path} cannot be written ({error.strerror}); the checkpoints beside it are kept: make room or the folder "
            "writable, and run again with --resume."
        ) from error
