"""What every benchmark result says of the machine and the code it ran on."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compressor.report import installed_hardware, installed_versions


def environment() -> dict[str, Any]:
    """Hardware, versions and commit, as JSON values."""
    return {**installed_hardware(), "versions": installed_versions(), "commit": _commit()}


def write_result(path: Path | None, result: Mapping[str, Any]) -> None:
    """Write `result` with the environment as JSON; nothing when `path` is None."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({**result, "environment": environment()}, indent=2) + "\n", encoding="utf-8")


def _commit() -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None
