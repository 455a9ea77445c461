"""Runs of several result files in one, so that runs can be made side by side."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from compressor.errors import RequestError


def stored_runs(path: Path | None) -> list[dict[str, Any]]:
    """The runs of a result file; none where there is no such file."""
    return [] if path is None or not path.exists() else _read(path)["runs"]


def merge(parts: Sequence[Path], output: Path | None) -> list[dict[str, Any]]:
    """Add the runs of `parts` to those of `output`, in place of runs with the same settings; returns all of them.

    Every run keeps the environment that it was made in, which an output of its own has once for all.

    Raises:
        RequestError: no output, or a part that is no result of this command.
    """
    if output is None:
        raise RequestError("--merge needs --output, the file that the runs are added to.")
    merged: dict[str, dict[str, Any]] = {}
    for path in (*([output] if output.exists() else []), *parts):
        content = _read(path)
        for run in content["runs"]:
            merged[json.dumps(run["settings"], sort_keys=True)] = {"environment": content.get("environment"), **run}
    runs = list(merged.values())
    partial = output.with_name(f"{output.name}.partial")
    partial.write_text(json.dumps({"runs": runs}, indent=2) + "\n", encoding="utf-8")
    partial.replace(output)
    return runs


def _read(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        complete = all("settings" in run for run in content["runs"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RequestError(f"{path} holds no runs of state tracking ({error}); give files of --output.") from error
    if not complete:
        raise RequestError(f"{path} holds a run without settings; give files of --output.")
    return content
