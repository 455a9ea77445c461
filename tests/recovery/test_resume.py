"""Runs that are stopped, killed or hindered, and go on to the very weights of a run that was not."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from compressor.errors import RunError
from compressor.export.interrupts import termination_raises
from compressor.recovery.log import LOG_FILE, StepRecord, read_log
from tests.recovery.resumption import SAVING, resumed, saved, steps_of
from tests.recovery.runs import (
    SETTINGS,
    largest_difference,
    open_run,
    text_batches,
    train_run,
    trained,
)
from tests.test_interruption import file_size_limit

ROOT = Path(__file__).resolve().parents[2]


def test_dropout_draws(dropout_models: Path, uninterrupted: dict[str, Tensor], tmp_path: Path) -> None:
    """Without which the tests below would say nothing about random generators."""
    assert largest_difference(trained(dropout_models, tmp_path / "same"), uninterrupted) == 0
    assert (
        largest_difference(trained(dropout_models, tmp_path / "other", replace(SETTINGS, seed=1)), uninterrupted) > 1e-4
    )


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_process_that_is_killed(
    number: signal.Signals, dropout_models: Path, uninterrupted: dict[str, Tensor], tmp_path: Path
) -> None:
    module = ["-m", "tests.recovery.training_process"]
    command = [sys.executable, *module, str(dropout_models), str(tmp_path), "checkpoint_every=3"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        while process.stdout.readline() != "step 7\n":
            assert process.poll() is None, process.stderr.read()
        process.send_signal(number)
        error = process.communicate(timeout=60)[1]
        assert process.returncode != 0
    if number == signal.SIGKILL:
        after = 6
        assert saved(tmp_path) == ["checkpoint-6", "checkpoint-3"]
    else:
        assert error.rstrip().endswith("KeyboardInterrupt")
        after = steps_of(tmp_path)[-1]
        assert after >= 7
        assert saved(tmp_path)[0] == f"checkpoint-{after}"
    assert not (tmp_path / "weights.safetensors").exists()
    assert largest_difference(resumed(dropout_models, tmp_path, after), uninterrupted) == 0


ONE_THREAD = {"OMP_NUM_THREADS": "1"}


class Stop:
    """Raises a signal at one moment of step 5."""

    def __init__(self, number: int, moment: str) -> None:
        self._number = number
        self._moment = moment
        self._calls = 0

    def _at(self, moment: str, step: int) -> None:
        if (moment, step) == (self._moment, 5):
            signal.raise_signal(self._number)

    def batches(self, first: int) -> Iterator[Tensor]:
        for step, batch in enumerate(text_batches(SETTINGS)(first), start=first + 1):
            self._at("batch", step)
            yield batch

    def on_step(self, record: StepRecord) -> None:
        self._at("report", record.step)

    def evaluate(self, step: int) -> dict[str, float]:
        self._at("evaluation", step)
        return {"kl": 1.0}

    def before_update(self, *given: Any) -> None:
        self._calls += 1
        self._at("update", self._calls)


@pytest.mark.parametrize(
    ("number", "moment", "after"),
    [
        (signal.SIGINT, "batch", 4),
        (signal.SIGTERM, "batch", 4),
        (signal.SIGINT, "update", 5),
        (signal.SIGTERM, "update", 5),
        (signal.SIGINT, "report", 5),
        (signal.SIGINT, "evaluation", 5),
    ],
)
def test_an_interrupt_saves_the_last_finished_step(
    number: int, moment: str, after: int, dropout_models: Path, uninterrupted: dict[str, Tensor], tmp_path: Path
) -> None:
    """In the middle of the optimiser's update, that step is finished first."""
    stop = Stop(number, moment)
    settings = replace(SETTINGS, evaluate_every=5)
    hook = register_optimizer_step_pre_hook(stop.before_update)
    run = open_run(dropout_models)
    with termination_raises(), pytest.raises((KeyboardInterrupt, SystemExit)):
        train_run(run, tmp_path, settings, batches=stop.batches, on_step=stop.on_step, evaluate=stop.evaluate)
    hook.remove()
    assert saved(tmp_path) == [f"checkpoint-{after}"]
    assert not run.student.model.training
    final = resumed(dropout_models, tmp_path, after, settings=settings, evaluate=lambda step: {"kl": 2.0})
    assert largest_difference(final, uninterrupted) == 0
    evaluated = [line["step"] for line in read_log(tmp_path / LOG_FILE) if "evaluation" in line]
    assert evaluated == [0, 5, 10]


def test_an_interrupt_before_the_first_step_leaves_nothing(dropout_models: Path, tmp_path: Path) -> None:
    def none(first: int) -> Iterator[Tensor]:
        signal.raise_signal(signal.SIGINT)
        return text_batches(SETTINGS)(first)

    with pytest.raises(KeyboardInterrupt):
        train_run(open_run(dropout_models), tmp_path, batches=none)
    assert saved(tmp_path) == []
    assert train_run(open_run(dropout_models), tmp_path, replace(SETTINGS, steps=1), resume=True).resumed_step == 0


def test_a_full_disk_keeps_the_last_good_checkpoint(
    dropout_models: Path, uninterrupted: dict[str, Tensor], tmp_path: Path
) -> None:
    with ExitStack() as limits:

        def fill(record: StepRecord) -> None:
            if record.step == 4:
                limits.enter_context(file_size_limit(20_000))

        message = "checkpoint-6 could not be written .*os error 27.* and checkpoint-3 is kept; make room .* --resume.$"
        with pytest.raises(RunError, match=message):
            train_run(open_run(dropout_models), tmp_path, SAVING, on_step=fill)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-3", LOG_FILE]
    assert largest_difference(resumed(dropout_models, tmp_path, 3), uninterrupted) == 0


def test_a_full_disk_at_the_log_keeps_the_last_good_checkpoint(
    dropout_models: Path, uninterrupted: dict[str, Tensor], tmp_path: Path
) -> None:
    with ExitStack() as limits:

        def fill(record: StepRecord) -> None:
            if record.step == 4:
                limits.enter_context(file_size_limit((tmp_path / LOG_FILE).stat().st_size + 10))

        with pytest.raises(
            RunError, match="training.jsonl cannot be written .File too large.; the checkpoints beside it"
        ):
            train_run(open_run(dropout_models), tmp_path, SAVING, on_step=fill)
    assert saved(tmp_path) == ["checkpoint-3"]
    assert largest_difference(resumed(dropout_models, tmp_path, 3), uninterrupted) == 0
