"""The benchmark of the instrument: what should not matter moves no score by more than its standard error."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.instrument import main


@pytest.mark.slow
def test_settings_that_should_not_matter(
    tmp_path: Path, demo_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text, output = tmp_path / "words.txt", tmp_path / "instrument.json"
    text.write_text("".join(f"The {number} birds sat on line {number % 7} of the fence.\n" for number in range(60)))
    command = f"""{demo_model} --text {text} --tasks niah_single_1 recall --length 384 --samples 6 --batch-sizes 6 4
        --dtype float32 bfloat16 --device cpu --output {output}"""
    monkeypatch.setattr(sys, "argv", ["instrument", *command.split()])
    main()
    rows = json.loads(output.read_text())["runs"]
    settings = [(row["batch_size"], row["dtype"], row["share"]) for row in rows]
    assert settings == [
        (6, "float32", 1.0),
        (4, "float32", 1.0),
        (6, "bfloat16", 1.0),
        *((6, "float32", share) for share in (0.75, 0.5, 0.25, 0.125)),
    ]
    first, _, half, *cuts = rows
    for row in rows[1:3]:
        for name in ("niah_single_1", "recall"):
            assert abs(row[name] - first[name]) <= first[f"{name}_standard_error"]
    assert half["words"] != first["words"]
    assert half["words"] == pytest.approx(first["words"], rel=0.02)
    assert cuts[-1]["words"] > first["words"]
    assert len(capsys.readouterr().out.splitlines()) == len(rows)
