"""Sweeps that do not come to their end: finished cuts are kept, and `--resume` makes the others alone."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compressor import sweeping
from compressor.cli import main
from compressor.errors import RunError
from compressor.making import Made, describe_checkpoint
from compressor.progress import StageReporter
from compressor.report import Report
from compressor.sweep_results import Sweep, draw_sweep
from tests.test_interruption import InterruptingOutput
from tests.test_pipeline import hashes, make_source, make_text
from tests.test_sweep import read, sweep

NAMES = ["drrqr-12", "drrqr-8", "energy-12", "energy-8"]
OPTIONS = ["--ratios", "0.25,0.5", "--methods", "drrqr,energy", "--no-refit", "--no-verify"]


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """Of a sweep to `sweep` in `tmp_path`."""
    source = make_source("gated_deltanet", tmp_path / "source")
    return sweep(source, tmp_path / "sweep", make_text(tmp_path), *OPTIONS)


def whole(words: list[str], output: Path) -> Path:
    """The result without an interruption, beside `output`, whose path stands in reports."""
    assert main(words) == 0
    return output.rename(output.with_name("whole"))


def untimed(content: Any) -> Any:
    """JSON without what a clock has told."""
    if isinstance(content, dict):
        return {name: untimed(value) for name, value in content.items() if name not in ("seconds", "timings_s")}
    return [untimed(value) for value in content] if isinstance(content, list) else content


def check_same(output: Path, expected: Path, checkpoints: bool = True) -> None:
    """Byte for byte, timings apart."""
    folders = NAMES if checkpoints else []
    assert {path.name for path in output.iterdir()} == {*folders, "sweep.json", "sweep.png"}
    assert (output / "sweep.png").read_bytes() == (expected / "sweep.png").read_bytes()
    files = ["sweep.json", *(f"{name}/compression.json" for name in folders)]
    assert [untimed(read(output / file)) for file in files] == [untimed(read(expected / file)) for file in files]
    for name in folders:
        of_both = [hashes(folder / name) for folder in (output, expected)]
        assert len(of_both[0].pop("compression.json")) == len(of_both[1].pop("compression.json"))
        assert of_both[0] == of_both[1]
        assert all(path.stat().st_nlink == 1 for path in (output / name).iterdir())
    assert not [path.name for path in output.parent.iterdir() if path.name.startswith((".", "sweep.resume"))]


def kept(output: Path) -> set[str]:
    return {path.name for path in (output.with_name("sweep.resume") / "cuts").iterdir()}


@pytest.mark.parametrize(
    ("number", "status", "options"),
    [(signal.SIGTERM, 143, []), pytest.param(signal.SIGINT, 130, ["--table-only"], marks=pytest.mark.slow)],
)
def test_a_signal_in_the_third_cut(
    number: int,
    status: int,
    options: list[str],
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output, words = tmp_path / "sweep", [*words, *options]
    expected = whole(words, output)
    shown = InterruptingOutput("energy-12: cut 3 of 4", number)
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", shown)
        assert main(words) == status
    folders = set() if options else {"drrqr-12", "drrqr-8"}
    assert kept(output) == {"drrqr-12.json", "drrqr-8.json"} | folders
    assert "note: 2 of 4 cuts are finished and kept in" in shown.getvalue()
    assert "give --resume to go on with what is done so far" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"source", "text.txt", "whole", "sweep.resume"}
    assert main([*words, "--ratios", "0.75"]) == main(words) == 2
    assert "drrqr-12.json is a finished cut of an earlier sweep; give --resume" in capsys.readouterr().err
    assert main([*words, "--resume", "--seed", "5"]) == 2
    shown_again = capsys.readouterr()
    assert "drrqr-12.json is of another sweep (its model, data or settings differ)" in shown_again.err
    assert "calibrating" not in shown_again.out
    assert main([*words, "--resume", "--methods", "energy"]) == 2
    assert "is a finished cut which this sweep does not make; give its ratio and method too" in capsys.readouterr().err
    assert kept(output) == {"drrqr-12.json", "drrqr-8.json"} | folders
    assert main([*words, "--resume"]) == 0
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if ": cut " in line] == [
        "drrqr-12: cut 1 of 4, finished before",
        "drrqr-8: cut 2 of 4, finished before",
        "energy-12: cut 3 of 4",
        "energy-8: cut 4 of 4",
    ]
    assert out.count("writing:") == 2
    assert "resuming after 1 of 1 calibration batches" in out
    check_same(output, expected, checkpoints=not options)


def failing_at(call: int, describe: Callable[[Made, StageReporter, bool], Report]) -> Callable[..., Report]:
    """`describe`, whose call of that number fails, when its checkpoint is written and measured."""
    calls: list[Path] = []

    def fail(made: Made, reporter: StageReporter, verify: bool = True) -> Report:
        calls.append(made.folders.checkpoint)
        if len(calls) == call:
            raise RunError("no space left on device.")
        return describe(made, reporter, verify)

    return fail


def test_what_is_not_wholly_there_is_made_again(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "sweep"
    expected = whole(words, output)
    with monkeypatch.context() as patched:
        patched.setattr(sweeping, "describe_checkpoint", failing_at(4, describe_checkpoint))
        assert main(words) == 1
    assert "3 of 4 cuts are finished and kept" in capsys.readouterr().out
    cuts = output.with_name("sweep.resume") / "cuts"
    record = cuts / "drrqr-12.json"
    record.write_bytes(record.read_bytes()[:-100])
    (cuts / "drrqr-8.json").unlink()
    (cuts / "drrqr-8" / "model.safetensors").write_bytes(b"half")
    shutil.rmtree(cuts / "energy-12")
    assert main([*words, "--resume"]) == 0
    assert "finished before" not in capsys.readouterr().out
    check_same(output, expected)


def test_a_sweep_that_cannot_take_its_place_keeps_every_cut(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a file system without hard links, too."""
    output = tmp_path / "sweep"
    expected = whole(words, output)

    def take_place(result: Sweep, path: Path) -> None:
        draw_sweep(result, path)
        output.write_text("another's", encoding="utf-8")

    with monkeypatch.context() as patched:
        patched.setattr(sweeping, "draw_sweep", take_place)
        assert main(words) == 1
    shown = capsys.readouterr()
    assert "the output's place changed during the run" in shown.err
    assert "4 of 4 cuts are finished and kept" in shown.out
    assert kept(output) == {*NAMES, *(f"{name}.json" for name in NAMES)}
    output.unlink()
    text = tmp_path / "text.txt"
    content = text.read_text(encoding="utf-8")
    text.write_text(content.replace("the", "a"), encoding="utf-8")
    assert main([*words, "--resume"]) == 2
    assert "drrqr-12.json is of another sweep (its model, data or settings differ)" in capsys.readouterr().err
    text.write_text(content, encoding="utf-8")

    def refuse(*arguments: object, **options: object) -> None:
        raise OSError(errno.EPERM, "no hard links here")

    monkeypatch.setattr(os, "link", refuse)
    assert main([*words, "--resume"]) == 0
    assert capsys.readouterr().out.count("finished before") == 4
    check_same(output, expected)
