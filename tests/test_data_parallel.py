"""Two launched processes agree on values and sums, and end together when one fails."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from compressor.artifacts import CalibrationStatistics
from compressor.data_parallel import alone, join_processes, refuse_shared_gpus
from compressor.errors import RequestError
from compressor.launched import Launch, fully_sharded_version, launch
from compressor.naming import key_of

ROOT = Path(__file__).resolve().parents[1]
ELSEWHERE = "another process of this run failed, whose own message says why; this one was stopped."


@pytest.fixture(scope="module")
def ended() -> dict[str, dict[str, Any]]:
    """How every pair of processes ended."""
    command = [sys.executable, "-m", "tests.data_parallel_process"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {line["mode"]: line for line in map(json.loads, done.stdout.splitlines())}


def test_values_and_sums_of_two_processes(ended: dict[str, dict[str, Any]]) -> None:
    whole = torch.arange(12, dtype=torch.float64).reshape(2, 3, 2).div(3)[1].T
    assert ended["succeed"]["exit"] == [0, 0]
    for index, lines in enumerate(ended["succeed"]["lines"]):
        for line in lines:
            assert line["share"] == [["a", "c", "e"], ["b", "d"]][index]
            assert line["from_main"] == {"made in": 0}
            assert torch.equal(torch.tensor(line["own"], dtype=torch.float64), (index + 1) * whole)
            assert torch.equal(torch.tensor(line["grams"], dtype=torch.float64), whole + 2 * whole)
            assert line["counts"] == [1, 10]
            assert line["tokens"] == 21
            assert line["layers"] == [0, 2]
            assert line["absent"] is None
        assert len(lines) == 2


@pytest.mark.parametrize(
    ("mode", "speaker", "message", "status"),
    [
        ("both fail", 0, "the same in both.", 2),
        ("first fails", 0, "only in the first.", 1),
        ("second fails", 1, "only in the second.", 1),
    ],
)
def test_a_failure_of_one_ends_both_and_is_said_once(
    mode: str, speaker: int, message: str, status: int, ended: dict[str, dict[str, Any]]
) -> None:
    """The launcher's signal may come to the other one, whose exit status `status` is, before it ends by itself."""
    found = ended[mode]
    assert found["seconds"] < 30
    said = [[line["error"] for line in lines or [] if "error" in line] for lines in found["lines"]]
    assert said[speaker] == [message]
    assert found["exit"][speaker] == 2
    assert said[1 - speaker] in ([], [ELSEWHERE] if speaker else [])
    assert found["exit"][1 - speaker] in (status, -signal.SIGTERM)


def test_a_wait_ends_with_the_launchers_signal(ended: dict[str, dict[str, Any]]) -> None:
    """A killed process says nothing; what waits for it is in Python, and so hears the launcher at once."""
    assert ended["second is killed"]["exit"] == [-signal.SIGTERM, -signal.SIGKILL]
    assert ended["second is killed"]["seconds"] < 20


def test_one_process_changes_nothing() -> None:
    processes = alone()
    sums = CalibrationStatistics(
        layers=(0,),
        gram_q=torch.ones(1, 1, 2, 2),
        gram_k=torch.ones(1, 1, 2, 2),
        energy_q=torch.ones(1, 1, 2),
        energy_k=torch.ones(1, 1, 2),
        input_squares_q=torch.ones(1, 4),
        input_squares_k=torch.ones(1, 4),
        tokens=3,
    )
    assert processes.summed(sums) is sums
    assert processes.share([1, 2, 3]) == [1, 2, 3]
    assert processes.from_main(lambda: 7) == 7
    with pytest.raises(ValueError, match="as it was"), processes.failing_together():
        raise ValueError("as it was")


def test_a_field_that_may_be_no_sum_is_refused() -> None:
    @dataclass(frozen=True)
    class Mean:
        mean: float

    with pytest.raises(TypeError, match="^Mean.mean is a float, which is no sum.$"):
        alone().summed(Mean(0.5))


@pytest.mark.parametrize(
    ("device", "gpus", "message"),
    [
        ("cuda:1", 2, "^--device cuda:1 is one GPU and 2 processes were launched here, each .*; leave --device out.$"),
        ("cuda", 1, "^2 processes were launched here and torch sees 1 GPUs, .*; launch at most 1, or give"),
    ],
)
def test_two_processes_on_one_gpu_are_refused(device: str, gpus: int, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        refuse_shared_gpus(torch.device(device), gpus, 2)
    with pytest.raises(RequestError, match=r"runtime\.device"):
        refuse_shared_gpus(torch.device(device), gpus, 2, key_of)
    refuse_shared_gpus(torch.device("cuda"), 2, 2)


def test_what_a_launcher_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert launch() == Launch(0, 1, 1)
    for name, value in {"RANK": "5", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    assert launch() == Launch(5, 8, 4)


@pytest.mark.parametrize(
    ("variables", "version"),
    [
        ({}, None),
        ({"FSDP_VERSION": "1"}, None),
        ({"ACCELERATE_USE_FSDP": "false", "FSDP_VERSION": "1"}, None),
        ({"ACCELERATE_USE_FSDP": "true"}, "1"),
        ({"ACCELERATE_USE_FSDP": "True", "FSDP_VERSION": "2"}, "2"),
    ],
)
def test_what_fsdp_accelerate_was_launched_for(
    variables: dict[str, str], version: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ACCELERATE_USE_FSDP", "FSDP_VERSION"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert fully_sharded_version() == version


def test_fsdp_1_is_refused_on_cpus_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the processes look for each other, which here would wait for one that never comes."""
    launched = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    for name, value in (launched | {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RequestError, match="^accelerate was launched for FSDP 1, and recovery shards with FSDP 2; "):
        join_processes("cpu")
