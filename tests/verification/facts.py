"""What the child process of `compress verify` finds, without waiting for a process to start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from compressor.verification import oracle


def oracle_facts(
    folder: Path, original: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *options: str
) -> dict[str, Any]:
    """The last line that the child prints of `folder` and its original, over a hundred tokens of any vocabulary."""
    tokens = folder.parent / "tokens.json"
    tokens.write_text(json.dumps([index**2 % 31 for index in range(100)]), encoding="utf-8")
    words = ["oracle", str(folder), "--original", str(original), "--tokens", str(tokens), *options]
    monkeypatch.setattr("sys.argv", words)
    oracle.main()
    facts: dict[str, Any] = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    return facts
