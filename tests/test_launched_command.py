"""The command in several launched processes: what is not shared is done once, and mistakes are said once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from compressor import launched
from compressor.cli import main
from compressor.launched import Launch, act_alone, launch
from tests.test_pipeline import compress, make_source, make_text

ROOT = Path(__file__).resolve().parents[1]
LAUNCH = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "compressor")


def launched_command(*words: str) -> subprocess.CompletedProcess[str]:
    # The launcher warns where it sets this one itself.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *LAUNCH, *words], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


def be(index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two processes, as far as the launcher's variables say it."""
    own = {"RANK": str(index), "LOCAL_RANK": str(index), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    for name, value in {**own, "MASTER_PORT": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(name, value)


def test_a_verb_that_is_not_shared_is_done_once(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("selection: {ratio: 0.5}\n", encoding="utf-8")
    done = launched_command("validate", str(recipe))
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{recipe} is valid\n"


@pytest.mark.slow
def test_processes_that_the_first_one_starts_wait_for_no_other(tmp_path: Path) -> None:
    source, out = make_source("gated_deltanet", tmp_path / "source"), tmp_path / "out"
    assert compress(source, out, make_text(tmp_path), "--no-evaluate", "--no-verify") == 0
    done = launched_command("verify", str(out), "--device", "cpu")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("loads with stock") == 1


@pytest.mark.parametrize(
    "words",
    [["inspect"], ["verify", "x"], ["evaluate"], ["compare"], ["probe"], ["push"], ["validate"], ["recover", "-h"]],
)
def test_another_process_than_the_first_ends_in_silence(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    be(1, monkeypatch)
    assert main(words) == 0
    assert capsys.readouterr() == ("", "")


def test_the_first_process_forgets_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    be(0, monkeypatch)
    assert launch() == Launch(0, 2, 2)
    act_alone()
    assert launch() == Launch()
    assert not [name for name in os.environ if name.startswith("TORCHELASTIC") or name == "MASTER_PORT"]


@pytest.mark.parametrize(
    ("words", "mistake"),
    [
        (["--bogus"], "unrecognized arguments: --bogus"),
        (["recover"], "the following arguments are required: DIR"),
        (["--ratio", "1.5"], "--ratio: Input should be less than 1 (got 1.5)"),
    ],
)
def test_a_mistake_is_said_once(words: list[str], mistake: str) -> None:
    done = launched_command(*words)
    assert done.returncode != 0
    assert done.stderr.count(mistake) == 1, done.stderr


def test_a_mistake_that_the_first_process_did_not_make_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recipe that one of two machines lacks, say."""
    be(1, monkeypatch)
    monkeypatch.setattr(launched, "SECONDS_FOR_THE_FIRST", 0.1)
    assert main(["--recipe", "nowhere.yaml"]) == 2
    assert "nowhere.yaml" in capsys.readouterr().err
