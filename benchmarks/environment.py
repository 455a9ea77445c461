"""What every benchmark result says of the machine and the code it ran on."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.output_files import beside, replaced
from compressor.report import installed_hardware, installed_versions


def environment() -> dict[str, Any]:
    """Hardware, versions and commit, as JSON values."""
    return {**installed_hardware(), "versions": installed_versions(), "commit": _commit()}


def write_result(path: Path | None, result: Mapping[str, Any]) -> None:
    """Replace the file by `result` with the environment as JSON, in one step; nothing when `path` is None.

    Raises:
        RequestError: it cannot be written; what was there before is as it was.
    """
    if path is not None:
        text = _with_environment(result)
        with replaced(path) as partial:
            partial.write_text(text, encoding="utf-8")


def check_output(path: Path | None) -> None:
    """Have it known before the work that a result can be written; what is there stays.

    Raises:
        RequestError: as `write_result`.
    """
    if path is not None:
        text = _with_environment({})
        with beside(path) as partial:
            partial.write_text(text, encoding="utf-8")


def _with_environment(result: Mapping[str, Any]) -> str:
    return json.dumps({**result, "environment": environment()}, indent=2) + "\n"


def _commit() -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None
