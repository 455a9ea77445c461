"""Figures in an experiment tracker of accelerate's, here one that keeps them in memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker, get_available_trackers

from compressor.errors import RequestError, RunError
from compressor.recovery.log import StepRecord
from compressor.recovery.tracking import refuse_missing_tracker, written_figures
from tests.recovery.runs import open_run, train_run, with_steps


class MemoryTracker(GeneralTracker):
    name = "memory"
    requires_logging_directory = False

    def __init__(self) -> None:
        super().__init__()
        self.config: dict[str, Any] = {}
        self.logged: list[tuple[int | None, dict[str, Any]]] = []
        self.finished = 0

    @property
    def tracker(self) -> MemoryTracker:
        return self

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.config = values

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.logged.append((step, values))

    def finish(self) -> None:
        self.finished += 1


def test_a_tracker_sees_every_step_and_evaluation(models: Callable[[str], Path], tmp_path: Path) -> None:
    tracker = MemoryTracker()
    accelerator = Accelerator(cpu=True, log_with=[tracker])
    records: list[StepRecord] = []
    settings = with_steps(2, evaluate_every=2, tracker="memory")
    train_run(
        open_run(models("delta_net")),
        tmp_path,
        settings,
        accelerator=accelerator,
        on_step=records.append,
        evaluate=lambda step: {"kl": 0.5 + step},
    )
    assert tracker.config["learning_rate"] == settings.learning_rate
    assert [step for step, _ in tracker.logged] == [0, 1, 2, 2]
    assert tracker.logged[0][1] == {"evaluation/kl": 0.5}
    assert tracker.logged[1][1]["train/loss"] == records[0].loss
    assert tracker.logged[3][1] == {"evaluation/kl": 2.5}
    assert (tracker.finished, accelerator.trackers) == (1, [])


def test_a_run_that_fails_finishes_its_tracker(models: Callable[[str], Path], tmp_path: Path) -> None:
    tracker = MemoryTracker()
    accelerator = Accelerator(cpu=True, log_with=[tracker])
    with pytest.raises(RunError, match="^the training data ended after 0 of 2 steps"):
        train_run(
            open_run(models("delta_net")),
            tmp_path,
            with_steps(2, tracker="memory"),
            accelerator=accelerator,
            batches=lambda first: iter([]),
        )
    assert tracker.finished == 1


def test_without_the_setting_no_tracker_begins(models: Callable[[str], Path], tmp_path: Path) -> None:
    tracker = MemoryTracker()
    accelerator = Accelerator(cpu=True, log_with=[tracker])
    train_run(open_run(models("delta_net")), tmp_path, with_steps(1), accelerator=accelerator)
    assert (tracker.logged, tracker.finished) == ([], 0)


def test_a_tracker_that_is_not_installed_is_refused_by_name() -> None:
    installed = {tracker.value for tracker in get_available_trackers()}
    (missing, *_) = sorted({"wandb", "trackio", "comet_ml", "mlflow", "aim"} - installed)
    with pytest.raises(RequestError, match=f"^the tracker {missing} is not installed, .* pip install {missing}, or"):
        refuse_missing_tracker(missing)
    refuse_missing_tracker(None)
    for tracker in installed:
        refuse_missing_tracker(tracker)


def test_what_a_tracker_wrote_is_found(tmp_path: Path) -> None:
    """A run's work folder goes with its end."""
    work = tmp_path / "work"
    assert written_figures(work) is None
    (work / "recovery").mkdir(parents=True)
    assert written_figures(work) == work / "recovery"
