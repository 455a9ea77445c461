"""Runs of several result files in one, so that runs can be made side by side."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import takewhile
from pathlib import Path
from typing import Any

from benchmarks.output_files import replaced
from benchmarks.state_tracking.models import ModelSettings
from benchmarks.state_tracking.pace import TrainingSettings
from benchmarks.state_tracking.runs import RunSettings
from compressor.errors import RequestError

_PARTS = (("test", "chance"), ("betas", "heads", "solving_head"), ("pruning",))
"""What a run has gained each time that it was written."""


def stored_runs(path: Path | None) -> list[dict[str, Any]]:
    """The runs of a result file; none where there is no such file."""
    return [] if path is None or not path.exists() else _read(path)["runs"]


def is_whole(run: Mapping[str, Any]) -> bool:
    """Whether the run was not interrupted."""
    return _progress(run) == len(_PARTS)


def run_key(settings: Mapping[str, Any]) -> str:
    """The same text for the settings of the same run; a setting that came after the file was written has its default.

    Raises:
        TypeError: settings are missing, unknown or of another kind.
        RequestError: no such model can be.
    """
    model, training = ModelSettings(**settings["model"]), TrainingSettings(**settings["training"])
    return json.dumps(asdict(RunSettings(**{**settings, "model": model, "training": training})), sort_keys=True)


def merge(parts: Sequence[Path], output: Path | None) -> list[dict[str, Any]]:
    """Add the runs of `parts` to those of `output`, in place of runs with the same settings; returns all of them.

    An interrupted run takes the place of a shorter one alone. Every run keeps the environment that it was made in,
    which an output of its own has once for all.

    Raises:
        RequestError: no output, or one that cannot be written, or a part that is no result of this command.
    """
    if output is None:
        raise RequestError("--merge needs --output, the file that the runs are added to.")
    merged: dict[str, dict[str, Any]] = {}
    for path in (*([output] if output.exists() else []), *parts):
        content = _read(path)
        for run in content["runs"]:
            key = run_key(run["settings"])
            if key not in merged or is_whole(run) or _progress(run) > _progress(merged[key]):
                merged[key] = {"environment": content.get("environment"), **run}
    runs = list(merged.values())
    with replaced(output) as partial:
        partial.write_text(json.dumps({"runs": runs}, indent=2) + "\n", encoding="utf-8")
    return runs


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        runs = content["runs"] if isinstance(content, dict) else None
        if not isinstance(runs, list) or not all(isinstance(run, dict) for run in runs):
            raise TypeError("no list of runs")
        for run in runs:
            run_key(run["settings"])
    except (OSError, ValueError, KeyError, TypeError, RequestError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else str(error).rstrip(".")
        reason = error.strerror or reason if isinstance(error, OSError) else reason
        raise RequestError(f"{path} holds no runs of state tracking ({reason}); give files of --output.") from error
    if not all(map(_progress, runs)):
        raise RequestError(f"{path} holds a run of which nothing was measured; give files of --output.")
    return {**content, "runs": runs}


def _progress(run: Mapping[str, Any]) -> int:
    """How many of its parts the run has; a later one without an earlier one counts for nothing."""
    there = (all(name in run for name in names) for names in _PARTS)
    return sum(1 for _ in takewhile(bool, there))
