"""Two processes, as accelerate launches them, train as one does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from safetensors.torch import load_file

from compressor.errors import RequestError
from compressor.recovery.checkpoints import checkpoints_in
from compressor.recovery.log import read_log
from compressor.recovery.parallel import own_rows, refuse_other_engines
from compressor.recovery.sharding import refuse_other_sharding
from tests.recovery.runs import SETTINGS, largest_difference, open_run, records_of, train_run

ROOT = Path(__file__).resolve().parents[2]
STEPS = 4
LAUNCH = (
    *("-m", "accelerate.commands.launch", "--num_processes", "2", "--num_machines", "1"),
    *("--mixed_precision", "no", "--dynamo_backend", "no", "--num_cpu_threads_per_process", "1"),
    *("--main_process_port", "0"),
)
ENGINES = {"ddp": ("--multi_gpu",), "fsdp": ("--use_fsdp", "--fsdp_version", "2")}
PROCESS = ("--module", "tests.recovery.training_process")


def launch(engine: str, models: Path, work: Path, *options: str) -> None:
    command = [sys.executable, *LAUNCH, *ENGINES[engine], *PROCESS, str(models), str(work), "micro_batch_size=1"]
    command += options
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "name", "matching"),
    [("ddp", "gated_deltanet", 0.0), ("fsdp", "gated_deltanet", 0.3), ("fsdp", "q35", 0.0)],
)
def test_two_processes_give_the_weights_of_one(
    engine: str, name: str, matching: float, models: Callable[[str], Path], tmp_path: Path
) -> None:
    """Also when they go on from a checkpoint; each has two micro-batches, of which the last averages the gradients.

    They evaluate before the first step and then recompute activations; the gradients are limited in every step.
    """
    settings = replace(SETTINGS, steps=STEPS, learning_rate=1e-3, gradient_norm=0.01, matching_weight=matching)
    folder, work = models(name), tmp_path / "two"
    changes = (f"steps={STEPS}", "learning_rate=0.001", "checkpoint_every=2", "gradient_checkpointing=true")
    changes += ("gradient_norm=0.01", f"matching_weight={matching}", "evaluate_every=2")
    launch(engine, folder, work, *changes)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["two", "two.process-0", "two.process-1"]
    one = open_run(folder)
    records = records_of(one, tmp_path / "one", settings)
    assert largest_difference(one.trained(), load_file(work / "weights.safetensors")) < 1e-5
    lines = [line for line in read_log(work / "training.jsonl") if "loss" in line]
    assert len(lines) == STEPS
    for line, record in zip(lines, records, strict=True):
        measured = (line["loss"], line["kl"], line["cross_entropy"], line["matching"])
        assert measured == pytest.approx((record.loss, record.kl, record.cross_entropy, record.matching), rel=1e-4)
        # AdamW's first steps turn what is rounding of a small gradient into more.
        assert line["gradient_norm"] == pytest.approx(record.gradient_norm, rel=2e-3)
    for path in (work / "checkpoint-4").iterdir():
        path.unlink()
    launch(engine, folder, work, *changes, "--resume")
    assert largest_difference(one.trained(), load_file(work / "weights.safetensors")) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_an_interrupt_of_one_process_stops_both_after_the_same_step(
    engine: str, models: Callable[[str], Path], tmp_path: Path
) -> None:
    folder, work = models("gated_deltanet"), tmp_path / "work"
    command = [sys.executable, *LAUNCH, *ENGINES[engine], *PROCESS, str(folder), str(work), "learning_rate=0.001"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as launched:
        assert launched.stdout is not None
        for line in launched.stdout:
            if line == "step 3\n":
                os.kill(int(Path(f"{work}.process-1").read_text()), signal.SIGINT)
        error = launched.communicate(timeout=100)[1]
    assert launched.returncode != 0
    assert "KeyboardInterrupt" in error
    last = read_log(work / "training.jsonl")[-1]["step"]
    assert 3 < last < 10
    assert [path.name for path in checkpoints_in(work)] == [f"checkpoint-{last}"]
    settings = replace(SETTINGS, learning_rate=1e-3)
    gone_on, one = open_run(folder), open_run(folder)
    assert train_run(gone_on, work, settings, resume=True).resumed_step == last
    train_run(one, tmp_path / "one", settings)
    assert largest_difference(one.weights(), gone_on.weights()) < 1e-5


class Launched(Accelerator):
    """As accelerate would describe another launch."""

    num_processes = 3
    process_index = 1


def test_each_process_has_its_rows() -> None:
    batch = torch.arange(24).reshape(6, 4)
    assert torch.equal(own_rows(batch, Launched(cpu=True)), batch[2:4])


def test_a_launch_for_another_engine_is_refused() -> None:
    class Split(Accelerator):
        distributed_type = DistributedType.DEEPSPEED

    with pytest.raises(RequestError, match="^accelerate was launched for DEEPSPEED, and recovery trains with one"):
        refuse_other_engines(Split(cpu=True))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fsdp_version": 1}, "launched for FSDP 1, and recovery shards with FSDP 2; launch it with --use_fsdp"),
        ({"fsdp_version": 2, "activation_checkpointing": True}, "give it gradient_checkpointing instead"),
        ({"fsdp_version": 2, "cpu_offload": True}, "with --fsdp_offload_params, and recovery keeps what it trains on"),
    ],
)
def test_what_fsdp_can_do_and_recovery_does_not_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        refuse_other_sharding(FullyShardedDataParallelPlugin(**changes))
