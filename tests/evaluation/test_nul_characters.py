"""A text of NUL characters is no text: what a damaged file gets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from compressor.cli import main

LINE = "It is a line of words, and not a long one.\n"


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("nul.txt", "\x00" * 4000, "is empty; use one that holds text."),
        ("lines.txt", ("\x00" * 30 + "\n") * 100, "is empty; use one that holds text."),
        ("row.jsonl", json.dumps({"text": "\x00" * 4000}), "has no text in 'text'"),
        ("begins.txt", "\x00" * 4000 + LINE, "has only NUL characters and white space in the 128 characters"),
    ],
)
def test_a_text_of_nothing_else_is_refused(
    name: str, content: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_text(content)
    command = ["evaluate", "--device", "cpu", "--tasks", "recall", "--samples", "1", "--text", str(tmp_path / name)]
    assert main([*command, "--windows", "2", "--window-length", "64", "--output", str(tmp_path / "result.json")]) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert str(tmp_path / name) in captured.err
    assert captured.err.count("\n") == 1
    assert not (tmp_path / "result.json").exists()


def test_a_line_of_them_is_named(tmp_path: Path) -> None:
    path = tmp_path / "damaged.txt"
    path.write_text(10 * LINE + "\x00" * 50 + "\n" + 10 * LINE)
    command = ["evaluate", "--device", "cpu", "--tasks", "recall", "--samples", "1", "--text", str(path)]
    assert main([*command, "--windows", "1", "--window-length", "512", "--output", str(tmp_path / "result.json")]) == 0
    notes = json.loads((tmp_path / "result.json").read_text())["notes"]
    assert [note for note in notes if "50 of 911 characters that are read are NUL" in note]
