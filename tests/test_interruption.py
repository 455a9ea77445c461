"""Runs that are stopped or fail midway leave nothing half-written and can go on."""

from __future__ import annotations

import io
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from compressor import calibrating
from compressor.cli import main
from compressor.interruption import InterruptedRunError, explained_interrupts
from tests.test_pipeline import FAST, compress, hashes, make_source, make_text

STAGES = ["calibrating", "refitting", "evaluating"]
SIGNALS = [(signal.SIGTERM, 143), (signal.SIGINT, 130)]


@contextmanager
def file_size_limit(count: int) -> Iterator[None]:
    """Writing past `count` bytes of a file fails with EFBIG, as a full quota does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (count, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)


def failed_run(source: Path, output: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that calibrates, then cannot write its weights."""
    with file_size_limit(40_000):
        assert compress(source, output, text, "--no-verify") == 1
    assert "--resume" in capsys.readouterr().err
    assert not output.exists()
    assert (output.with_name("out.resume") / "calibration.safetensors").exists()
    assert [path for path in output.parent.iterdir() if path.name.startswith(".")] == []


def test_disk_that_fills_up_keeps_the_calibration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, text = make_source("gated_deltanet", tmp_path / "source"), make_text(tmp_path)
    output, whole = tmp_path / "out", tmp_path / "whole"
    failed_run(source, output, text, capsys)
    assert compress(source, output, text, "--no-verify", "--resume") == 0
    assert "resuming after 1 of 1 calibration batches" in capsys.readouterr().out
    assert compress(source, whole, text, "--no-verify") == 0
    first, second = hashes(output), hashes(whole)
    assert all(first[name] == second[name] for name in ("model.safetensors", "selection.json", "config.json"))
    assert not output.with_name("out.resume").exists()


@pytest.mark.parametrize("damage", ["half", "empty", "other model", "other seed"])
def test_statistics_that_do_not_belong_are_not_used(
    damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, text, output = make_source("gated_deltanet", tmp_path / "source"), make_text(tmp_path), tmp_path / "out"
    failed_run(source, output, text, capsys)
    file = output.with_name("out.resume") / "calibration.safetensors"
    extra: list[str] = []
    if damage == "half":
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    elif damage == "empty":
        file.write_bytes(b"")
    elif damage == "other model":
        shutil.rmtree(source)
        make_source("gated_deltanet", source)
        from tests.tiny_models import read_weights, write_weights

        tensors = read_weights(source)
        write_weights(source, {name: tensor * 1.01 for name, tensor in tensors.items()})
    else:
        extra = ["--seed", "9", "--calibration-samples", "3"]
    assert compress(source, output, text, "--no-verify", "--resume", *extra) == 0
    out = capsys.readouterr().out
    expected = "cannot be read" if damage in ("half", "empty") else "belongs to another model, seed or calibration"
    assert out.count(expected) == 1
    assert str(file) in out
    whole = tmp_path / "whole"
    assert compress(source, whole, text, "--no-verify", *extra) == 0
    assert hashes(output)["model.safetensors"] == hashes(whole)["model.safetensors"]


def test_ctrl_c_while_calibrating(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, text, output = make_source("delta_net", tmp_path / "source"), make_text(tmp_path), tmp_path / "out"
    monkeypatch.setattr(calibrating, "SECONDS_BETWEEN_SAVES", 0.0)
    file = output.with_name("out.resume") / "calibration.safetensors"

    def interrupt() -> None:
        while not file.exists():
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGINT)

    options = ["--no-verify", "--batch-size", "1", "--calibration-samples", "48"]
    threading.Thread(target=interrupt).start()
    assert compress(source, output, text, *options) == 130
    assert "give --resume to go on" in capsys.readouterr().err
    assert not output.exists()
    assert compress(source, output, text, *options, "--resume") == 0
    done = re.search(r"resuming after (\d+) of 48 calibration batches", capsys.readouterr().out)
    assert done is not None
    assert 1 <= int(done[1]) < 48
    whole = tmp_path / "whole"
    assert compress(source, whole, text, *options) == 0
    assert hashes(output)["model.safetensors"] == hashes(whole)["model.safetensors"]


class InterruptingOutput(io.StringIO):
    """Standard output of a run: the line that names `stage` brings a signal."""

    def __init__(self, stage: str, number: int) -> None:
        super().__init__()
        self._stage = stage
        self._number = number
        self.sent = 0

    def write(self, text: str) -> int:
        count = super().write(text)
        if text.startswith(self._stage):
            self.sent += 1
            os.kill(os.getpid(), self._number)
        return count


@pytest.mark.parametrize(("number", "status"), SIGNALS)
@pytest.mark.parametrize("stage", STAGES)
def test_signals_at_any_stage(
    stage: str,
    number: int,
    status: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source, text, place = make_source("gated_deltanet", tmp_path / "source"), make_text(tmp_path), tmp_path / "place"
    place.mkdir()
    shown = InterruptingOutput(stage, number)
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", shown)
        assert compress(source, place / "out", text, "--no-verify") == status
    assert shown.sent == 1
    error = capsys.readouterr().err
    assert "interrupted" in error
    assert "--resume" in error
    left = [path.name for path in place.iterdir()]
    assert left == ["out.resume"] or (stage == "calibrating" and not left)


@pytest.mark.parametrize(
    ("stage", "number", "status"),
    [
        ("calibrating", *SIGNALS[1]),
        *(
            pytest.param(stage, *signalled, marks=pytest.mark.slow)
            for stage in STAGES
            for signalled in SIGNALS
            if (stage, signalled) != ("calibrating", SIGNALS[1])
        ),
    ],
)
def test_a_process_keeps_others_out_until_a_signal_stops_it(
    stage: str, number: int, status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a process of its own, on the bundled model; a second run at the same place is refused meanwhile."""
    output = tmp_path / "out"
    command = [sys.executable, "-u", "-m", "compressor", "--ratio", "0.5", "--output-dir", str(output), "--no-verify"]
    command += ["--calibration-samples", "6", "--retrieval-share", "0", "--sequence-length", "1024"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        while not process.stdout.readline().startswith(stage):
            assert process.poll() is None, process.stderr.read()
        assert main(["--ratio", "0.5", "--output-dir", str(output), "--device", "cpu"]) == 2
        assert f"another run is writing {output} (pid {process.pid})" in capsys.readouterr().err
        time.sleep(0.3)
        process.send_signal(number)
        assert process.wait(timeout=60) == status
        error = process.stderr.read()
    assert "interrupted" in error
    assert "--resume" in error
    assert "Traceback" not in error
    assert sorted(path.name for path in tmp_path.iterdir()) in ([], ["out.resume"])


@pytest.mark.parametrize("saved", [True, False])
def test_a_lost_process_is_told_and_what_any_process_saved_counts(
    saved: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [tmp_path / f"calibration-{index}-of-2" for index in (1, 2)]
    if saved:
        files[1].write_text("", encoding="utf-8")
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InterruptedRunError) as caught, explained_interrupts(tmp_path / "out", files):
        os.kill(os.getpid(), signal.SIGTERM)
    assert caught.value.exit_code == 143
    assert "it was stopped itself, or lost another process" in str(caught.value)
    assert ("give --resume" in str(caught.value)) == saved
    assert ("nothing was saved yet" in str(caught.value)) == (not saved)
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(InterruptedRunError, match=r"out was not written; "), explained_interrupts(tmp_path / "out", []):
        os.kill(os.getpid(), signal.SIGTERM)


def test_a_reader_that_goes_away_is_no_interruption(tmp_path: Path) -> None:
    source, text = make_source("gated_deltanet", tmp_path / "source"), make_text(tmp_path)
    words = [str(source), "--ratio", "0.5", "--output-dir", str(tmp_path / "out"), "--calibration", str(text), *FAST]
    command = f"{sys.executable} -u -m compressor {shlex.join(words)} --no-verify"
    script = f"set -o pipefail; {command} | head -n 1"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "interrupted" not in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()
