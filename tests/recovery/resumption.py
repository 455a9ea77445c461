"""Runs that stop somewhere, and what they leave."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from compressor.errors import RunError
from compressor.recovery.checkpoints import checkpoints_in
from compressor.recovery.log import LOG_FILE, read_log
from compressor.recovery.settings import TrainingSettings
from tests.recovery.runs import SETTINGS, open_run, text_batches, train_run

SAVING = replace(SETTINGS, checkpoint_every=3)


def steps_of(work: Path) -> list[int]:
    return [line["step"] for line in read_log(work / LOG_FILE) if "loss" in line]


def saved(work: Path) -> list[str]:
    return [path.name for path in checkpoints_in(work)]


def stopped(models: Path, work: Path) -> None:
    """A run of `SAVING` whose data end after 7 steps."""

    def seven(first: int) -> Iterator[Tensor]:
        return itertools.islice(text_batches(SAVING)(first), 7)

    with pytest.raises(RunError, match="^the training data ended after 7 of 10 steps"):
        train_run(open_run(models), work, SAVING, batches=seven)
    assert saved(work) == ["checkpoint-6", "checkpoint-3"]


def resumed(
    models: Path, work: Path, after: int, settings: TrainingSettings = SAVING, **options: Any
) -> dict[str, Tensor]:
    """The weights of a run that goes on after step `after`, and whose log has every step once."""
    run = open_run(models)
    result = train_run(run, work, settings, resume=True, **options)
    assert (result.resumed_step, result.last.step) == (after, 10)
    assert steps_of(work) == list(range(1, 11))
    assert result.last.tokens == 1280
    return run.weights()
