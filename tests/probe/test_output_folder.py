"""The folder of a probe: refused before the work, held during it, and left alone when the run ends early."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from compressor.calibration.tokenizer import load_tokenizer
from compressor.cli import main
from compressor.errors import RunError
from compressor.export.advice import NEW_FOLDERS_ONLY
from compressor.export.folder import OutputFolder
from compressor.export.locks import LOCK_NAME
from compressor.preparation import open_model
from compressor.probe_plan import plan_probe
from compressor.probe_section import ProbeSection
from compressor.probe_space import expected_bytes
from tests.probe.test_command import SHORT, refused, source, text_file
from tests.test_interruption import file_size_limit

QUICK = [*SHORT, "--no-truncation"]


def words(tmp_path: Path, output: Path | str) -> list[str]:
    model = source("gated_deltanet", tmp_path / "model")
    return ["probe", str(model), "--output", str(output), *QUICK, "--text", str(text_file(tmp_path))]


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("a" * 300, "has 300 bytes of at most 200; choose a shorter one."),
        ("a" * 300 + "/out", "is too long for its file system; choose a shorter one."),
        ("", '--output "" is empty; name something, or leave it out.'),
        ("model/out", "is inside the source folder"),
    ],
)
def test_places_that_take_no_folder(
    output: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = words(tmp_path, output)
    monkeypatch.chdir(tmp_path)
    refused(given, message, capsys)
    assert "states:" not in capsys.readouterr().out


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="takes a folder in which none can be made")
def test_a_folder_that_cannot_be_made_is_refused_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words(tmp_path, "/proc/out")) == 2
    captured = capsys.readouterr()
    assert "choose an" in captured.err
    assert "states:" not in captured.out


def test_a_second_run_is_refused_before_it_measures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "out"
    given = words(tmp_path, output)
    with OutputFolder(output, overwrite=False).lock():
        assert main(given) == 2
    captured = capsys.readouterr()
    assert f"another run is writing {output} (pid {os.getpid()}); wait for its end" in captured.err
    assert "states:" not in captured.out
    assert main(given) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out", "text.txt"]


def test_a_full_disk_advises_what_a_probe_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = words(tmp_path, tmp_path / "out")
    capsys.readouterr()
    with file_size_limit(20_000):
        assert main(given) == 1
    message = capsys.readouterr().err
    assert "raise it or choose an output folder elsewhere, and run again." in message
    assert not re.search("--resume|--overwrite|--max-shard-size", message)
    assert not (tmp_path / "out").exists()


def test_a_small_disk_is_refused_before_the_work(
    tmp_path: Path,
    small_disk: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(words(tmp_path, small_disk / "out")) == 2
    captured = capsys.readouterr()
    assert f"writing {small_disk / 'out'} needs 6." in captured.err
    assert "states:" not in captured.out


def test_a_place_taken_during_the_run_advises_no_option(tmp_path: Path) -> None:
    output = OutputFolder(tmp_path / "out", overwrite=False, advice=NEW_FOLDERS_ONLY)
    with pytest.raises(RunError) as error, output.staged():  # noqa: PT012
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "other").touch()
    assert str(error.value).endswith("exists and is not empty; choose another.")


@pytest.mark.parametrize("section", [ProbeSection(), ProbeSection(every=8, length=512, ranks=[4, 1], search_rank=1)])
def test_the_space_asked_for_is_that_of_what_is_written(section: ProbeSection, tmp_path: Path) -> None:
    """Never less than what is written, and not more than a small disk has."""
    model, text = source("gated_deltanet", tmp_path / "model"), text_file(tmp_path)
    section = section.model_copy(update={"text": str(text), "documents": 3, "retrieval": False})
    configured, tokenizer = open_model(str(model), None), load_tokenizer(model, False)
    plan = plan_probe(section, configured.config, None, configured.mixers, tokenizer, 0)
    options = ["--every", str(section.every), "--length", str(plan.length), "--documents", "3", "--device", "cpu"]
    options += ["--no-tasks", *(["--search-rank", "1"] if section.search_rank else [])]
    given = ["probe", str(model), "--output", str(tmp_path / "out"), "--text", str(text), *options]
    assert main(given) == 0
    written = sum(path.stat().st_size for path in (tmp_path / "out").rglob("*") if path.is_file())
    assert written <= expected_bytes(plan, [configured.mixers]) < written + 10_000_000


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_ends_it_with_one_sentence(number: signal.Signals, tmp_path: Path) -> None:
    given = words(tmp_path, tmp_path / "out")
    with subprocess.Popen(
        [sys.executable, "-u", "-m", "compressor", *given, "--every", "1"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        # The lock stands from when the run has been planned to its end.
        while not (tmp_path / "out.resume" / LOCK_NAME).exists():
            assert process.poll() is None, process.stderr.read() if process.stderr else ""
            time.sleep(0.02)
        process.send_signal(number)
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 128 + number
    assert f"compress: error: interrupted: {tmp_path / 'out'} was not written; run it again." in errors
    assert "Traceback" not in errors
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "text.txt"]
