"""Runs that stop by themselves: no number, nothing learnt, nothing to learn from, or a request that cannot be met."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compressor.errors import RequestError, RunError
from compressor.naming import Naming, key_of, option_of
from compressor.recovery.faults import explained_memory, refuse_unusable
from compressor.recovery.log import StepRecord, read_log
from tests.recovery.runs import (
    SETTINGS,
    largest_difference,
    open_run,
    records_of,
    text_batches,
    train_run,
    with_steps,
)

Models = Callable[[str], Path]


def test_a_teacher_with_nan_stops_the_run_at_once(models: Models, tmp_path: Path) -> None:
    run = open_run(models("gated_deltanet"))
    before = run.weights()
    with torch.no_grad():
        next(run.teacher.model.parameters())[5] = float("nan")
    message = (
        "^step 1: the loss is nan .KL nan, cross-entropy [0-9.]+, .* must be finite; no checkpoint was written yet: "
        "check student and teacher for NaN, or choose less extreme values of kl_weight, cross_entropy_weight, "
        "matching_weight and temperature.$"
    )
    with pytest.raises(RunError, match=message):
        train_run(run, tmp_path, with_steps(3))
    assert largest_difference(before, run.weights()) == 0
    assert read_log(tmp_path / "training.jsonl") == []


def test_nan_in_the_middle_names_the_step_and_the_checkpoint(models: Models, tmp_path: Path) -> None:
    run = open_run(models("gated_deltanet"))
    weights: list[dict[str, Tensor]] = []

    def poison(record: StepRecord) -> None:
        weights.append(run.weights())
        if record.step == 5:
            with torch.no_grad():
                next(run.teacher.model.parameters()).fill_(float("inf"))

    with pytest.raises(RunError, match="^step 6: the loss is nan .* checkpoint-4 is kept: .* a learning_rate below"):
        train_run(run, tmp_path, with_steps(8, checkpoint_every=2), on_step=poison)
    assert largest_difference(weights[-1], run.weights()) == 0


def test_a_gradient_that_is_not_finite_stops_the_run(models: Models, tmp_path: Path) -> None:
    run = open_run(models("gated_deltanet"))
    before = run.weights()
    next(iter(run.trainable.values())).register_hook(lambda gradient: gradient / 0)
    with pytest.raises(RunError, match="^step 1: the gradient's norm is (inf|nan) at a loss of [0-9.]+ and") as stop:
        train_run(run, tmp_path)
    assert largest_difference(before, run.weights()) == 0
    assert str(stop.value).endswith(
        "check the student for NaN, or choose less extreme values of alpha, kl_weight, cross_entropy_weight, "
        "matching_weight and temperature."
    )


@pytest.mark.parametrize(("steps", "stopped"), [(10, 3), (2, 2)])
def test_dead_gradients_stop_the_run(steps: int, stopped: int, models: Models, tmp_path: Path) -> None:
    """Behind an output projection of zeros, and without its own gradient, no weight of a mixer gets one."""
    run = open_run(models("delta_net"))
    for mixer in run.student.mixers:
        path = f"{run.student.architecture.output_projection(mixer)}.weight"
        run.trainable.pop(path).requires_grad_(False).zero_()
    message = f"^step {stopped}: the gradient of all 16 trained tensors was exactly 0 in each of the {stopped} steps"
    with pytest.raises(RunError, match=message):
        train_run(run, tmp_path, with_steps(steps, weight_decay=0.0))


def scaled_by(scales: Sequence[float]) -> Callable[[Tensor], Tensor]:
    """A hook that multiplies the gradient of each step by the next number."""
    left = iter(scales)
    return lambda gradient: gradient * next(left)


def test_a_gradient_that_comes_and_goes_is_no_reason_to_stop(models: Models, tmp_path: Path) -> None:
    run = open_run(models("delta_net"))
    scales = [0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0]
    for parameter in run.trainable.values():
        parameter.register_hook(scaled_by(scales))
    norms = [record.gradient_norm for record in records_of(run, tmp_path, with_steps(7))]
    assert [norm > 0 for norm in norms] == [scale > 0 for scale in scales]


def test_data_that_ends_early(models: Models, tmp_path: Path) -> None:
    def two(first: int) -> Iterator[Tensor]:
        return itertools.islice(text_batches(SETTINGS)(first), 2)

    with pytest.raises(RunError, match="^the training data ended after 2 of 10 steps; give more text or lower"):
        train_run(open_run(models("delta_net")), tmp_path, batches=two)


@pytest.mark.parametrize(
    ("changes", "teacher", "message"),
    [
        ({"cross_entropy_weight": 0.0}, False, "cross_entropy_weight is 0 and there is no teacher"),
        ({"matching_weight": 0.5}, False, "matching_weight is 0.5 and there is no teacher to match"),
        ({"tracker": "wandb"}, True, "the tracker wandb is not among those that accelerate could start .none.; pip"),
    ],
)
def test_what_does_not_fit_together_is_refused(
    changes: dict[str, Any], teacher: bool, message: str, models: Models, tmp_path: Path
) -> None:
    with pytest.raises(RequestError, match=f"^{message}"):
        train_run(open_run(models("delta_net")), tmp_path, replace(SETTINGS, **changes), teacher=teacher)


def test_what_is_trained_must_be_what_requires_a_gradient(models: Models, tmp_path: Path) -> None:
    run = open_run(models("delta_net"))
    run.student.model.get_input_embeddings().requires_grad_()
    with pytest.raises(ValueError, match="^18 tensors are to be trained and 19 of the decoder require a gradient"):
        train_run(run, tmp_path)
    narrow = open_run(models("delta_net"))
    narrow.student.model.to(torch.bfloat16)
    with pytest.raises(ValueError, match="is trained in torch.bfloat16, in which small updates are lost.$"):
        train_run(narrow, tmp_path)


def test_a_batch_of_another_shape_is_refused(models: Models, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^a batch is \(4, 32\), not \(4, 33\) as in the settings.$"):
        train_run(
            open_run(models("delta_net")),
            tmp_path,
            replace(SETTINGS, sequence_length=33),
            batches=text_batches(SETTINGS),
        )


def test_a_head_with_a_bias_is_refused(models: Models, tmp_path: Path) -> None:
    run = open_run(models("delta_net"))
    run.student.model.set_output_embeddings(torch.nn.Linear(32, 64))
    with pytest.raises(RequestError, match="^the language-model head of DeltaNetForCausalLM is Linear.*without bias"):
        train_run(run, tmp_path)


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({}, "a pass over 4 sequences of 32 tokens .* give micro_batch_size 2 or gradient_checkpointing,"),
        ({"micro_batch_size": 1}, "a pass over 1 sequences .* give gradient_checkpointing,"),
        ({"micro_batch_size": 1, "gradient_checkpointing": True}, "lower sequence_length,"),
    ],
)
def test_too_little_memory_names_what_needs_less(
    changes: dict[str, Any], remedy: str, models: Models, tmp_path: Path
) -> None:
    run = open_run(models("gated_deltanet"))

    def fail(*given: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    run.student.model.get_submodule(run.student.mixers[0].module).register_forward_hook(fail)
    with pytest.raises(RunError, match=f"^step 1: .*{remedy}"):
        train_run(run, tmp_path / "work", with_steps(2, **changes))


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        (key_of, r"give recovery\.micro_batch_size: 2 or recovery\.gradient_checkpointing: true,"),
        (option_of, "give --micro-batch-size 2 or --gradient-checkpointing,"),
    ],
)
def test_what_needs_less_memory_is_called_as_it_was_given(name: Naming, remedy: str) -> None:
    with (
        pytest.raises(RunError, match=remedy),
        explained_memory(1, 4, 32, recomputed=False, kept="no checkpoint", name=name),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory.")


@pytest.mark.parametrize("norm", [float("inf"), float("nan")])
def test_a_learning_rate_is_blamed_once_it_was_used(norm: float) -> None:
    record = StepRecord(
        step=2, loss=1.0, kl=1.0, cross_entropy=0.0, matching=0.0, learning_rate=0.25, gradient_norm=norm, tokens=1,
        seconds=1.0, tokens_per_second=1.0,
    )  # fmt: skip
    with pytest.raises(RunError, match="checkpoint-1 is kept: start again with a --learning-rate below 0.25.$"):
        refuse_unusable(record, "checkpoint-1 is kept", option_of)
