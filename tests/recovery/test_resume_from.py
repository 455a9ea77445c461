"""Which checkpoint a run goes on from, and which it refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from compressor.errors import RequestError, RunError
from compressor.recovery.checkpoints import checkpoints_in
from compressor.recovery.log import LOG_FILE
from tests.recovery.resumption import SAVING, resumed, saved, stopped
from tests.recovery.runs import SETTINGS, largest_difference, open_run, text_batches, train_run


@pytest.mark.parametrize("damage", ["half of the tensors", "no optimiser", "empty state", "another schema", "a list"])
def test_a_broken_checkpoint_falls_back_to_the_one_before(
    damage: str, dropout_models: Path, uninterrupted: dict[str, Tensor], tmp_path: Path
) -> None:
    stopped(dropout_models, tmp_path)
    newest = tmp_path / "checkpoint-6"
    if damage == "half of the tensors":
        tensors = newest / "trainable.safetensors"
        tensors.write_bytes(tensors.read_bytes()[: tensors.stat().st_size // 2])
    elif damage == "no optimiser":
        (newest / "optimizer.safetensors").unlink()
    else:
        contents = {"empty state": "", "another schema": '{"schema": 99}', "a list": "[]"}
        (newest / "state.json").write_text(contents[damage])
    notes: list[str] = []
    assert largest_difference(resumed(dropout_models, tmp_path, 3, on_note=notes.append), uninterrupted) == 0
    assert notes == [f"{newest} cannot be read and was set aside: going on from checkpoint-3 before it."]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "checkpoint-10", "checkpoint-6.unreadable", "checkpoint-9", LOG_FILE,
    ]  # fmt: skip


def test_no_checkpoint_that_can_be_read(dropout_models: Path, tmp_path: Path) -> None:
    stopped(dropout_models, tmp_path)
    for path in checkpoints_in(tmp_path):
        (path / "state.json").unlink()
    message = f"^{tmp_path}/checkpoint-6 cannot be read, nor can any of the 1 checkpoints before it; restore one, or"
    with pytest.raises(RunError, match=message):
        train_run(open_run(dropout_models), tmp_path, SAVING, resume=True)


@pytest.mark.parametrize(
    ("options", "difference"),
    [
        ({"settings": replace(SAVING, learning_rate=1e-2)}, "learning_rate 0.005 there and 0.01 here"),
        ({"settings": replace(SAVING, steps=12, seed=3)}, "seed 0 there and 3 here, steps 10 there and 12 here"),
        ({"run_key": "other"}, "the models, the text or what was done before the training"),
        ({"teacher": False}, "teacher True there and False here"),
    ],
)
def test_another_run_is_not_gone_on_with(
    options: dict[str, Any], difference: str, dropout_models: Path, tmp_path: Path
) -> None:
    stopped(dropout_models, tmp_path)
    run = open_run(dropout_models)
    before = run.weights()
    message = f"checkpoint-6 belongs to another run, which differs in {difference}; resume with what that run was given"
    with pytest.raises(RequestError, match=message):
        train_run(run, tmp_path, options.pop("settings", SAVING), resume=True, **options)
    assert largest_difference(before, run.weights()) == 0


def test_other_trained_tensors_are_another_run(dropout_models: Path, tmp_path: Path) -> None:
    stopped(dropout_models, tmp_path)
    run = open_run(dropout_models)
    run.trainable.popitem()[1].requires_grad_(False)
    with pytest.raises(
        RequestError, match="checkpoint-6 belongs to another run, which differs in the trained tensors;"
    ):
        train_run(run, tmp_path, SAVING, resume=True)


def test_what_does_not_change_the_result_may_change(dropout_models: Path, tmp_path: Path) -> None:
    stopped(dropout_models, tmp_path)
    settings = replace(SAVING, micro_batch_size=2, checkpoint_every=5, gradient_checkpointing=True)
    resumed(dropout_models, tmp_path, 6, settings=settings)


def test_an_earlier_run_is_not_overwritten(dropout_models: Path, tmp_path: Path) -> None:
    stopped(dropout_models, tmp_path)
    message = (
        f"^{tmp_path}/checkpoint-6 is left of an earlier run; give --resume to go on with it, or remove {tmp_path}"
    )
    with pytest.raises(RequestError, match=message):
        train_run(open_run(dropout_models), tmp_path, SAVING)
    assert saved(tmp_path) == ["checkpoint-6", "checkpoint-3"]


def test_a_finished_run_has_nothing_left_to_do(
    dropout_models: Path, uninterrupted: dict[str, Tensor], tmp_path: Path
) -> None:
    first = train_run(open_run(dropout_models), tmp_path)
    drawn: list[int] = []
    evaluated: list[int] = []

    def evaluate(step: int) -> dict[str, float]:
        evaluated.append(step)
        return {}

    run = open_run(dropout_models)
    again = train_run(
        run, tmp_path, replace(SETTINGS, evaluate_every=4), resume=True, batches=text_batches(SETTINGS, drawn),
        evaluate=evaluate,
    )  # fmt: skip
    assert (again.last, again.resumed_step, drawn, evaluated) == (first.last, 10, [], [10])
    assert largest_difference(run.weights(), uninterrupted) == 0


def test_what_a_killed_run_was_writing_is_removed(dropout_models: Path, tmp_path: Path) -> None:
    left = tmp_path / ".checkpoint-4.partial"
    left.mkdir(parents=True)
    (left / "trainable.safetensors").write_bytes(b"half")
    train_run(open_run(dropout_models), tmp_path, replace(SETTINGS, steps=1))
    assert saved(tmp_path) == ["checkpoint-1"]
    assert not left.exists()
