"""What a training run learns, against plain formulas and against itself cut up in other ways."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from compressor.recovery.log import read_log
from compressor.recovery.schedule import learning_rate
from compressor.recovery.settings import TrainingSettings
from tests.recovery.pairs import count_hooks
from tests.recovery.runs import (
    TinyRun,
    largest_difference,
    open_run,
    records_of,
    text_batch,
    train_run,
    trained,
    with_steps,
)

Models = Callable[[str], Path]
FAMILIES = ("gated_deltanet", "gated_deltanet_tied", "delta_net", "q35", "qw")


def same_batch(settings: TrainingSettings) -> Any:
    return lambda first: itertools.repeat(text_batch(0, settings), settings.steps - first)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_student_comes_near_its_teacher(name: str, models: Models, tmp_path: Path) -> None:
    run = open_run(models(name))
    before = run.weights()
    settings = with_steps(30)
    records = records_of(run, tmp_path / "work", settings, batches=same_batch(settings))
    assert [record.step for record in records] == list(range(1, 31))
    # Rounding, which differs between processors, grows over thirty steps.
    assert records[-1].kl < 0.5 * records[0].kl
    assert records[-1].loss < 0.65 * records[0].loss
    after = run.weights()
    trained_storage = {parameter.data_ptr() for parameter in run.trainable.values()}
    for tensor_name, tensor in run.student.model.state_dict().items():
        moved = not torch.equal(before[tensor_name], after[tensor_name])
        assert moved == (tensor.data_ptr() in trained_storage), tensor_name
    assert all(parameter.grad is None for parameter in run.student.model.parameters())
    assert not run.student.model.training
    assert count_hooks(run.student.model) == count_hooks(run.teacher.model) == 0


@pytest.mark.parametrize("name", FAMILIES)
def test_losses_and_gradient_are_those_of_the_plain_formula(name: str, models: Models, tmp_path: Path) -> None:
    """From the stock models' own logits, by autograd, in float64."""
    run = open_run(models(name))
    settings = with_steps(1, kl_weight=0.7, cross_entropy_weight=0.3, temperature=2.0, matching_weight=0.2)
    (record,) = records_of(run, tmp_path / "work", settings)
    plain = open_run(models(name))
    loss, kl, cross_entropy, matching = plain_terms(plain, text_batch(0, settings), settings)
    loss.backward()
    norm = math.sqrt(sum(float(p.grad.square().sum()) for p in plain.trainable.values() if p.grad is not None))
    expected = (loss.item(), kl.item(), cross_entropy.item(), matching.item(), norm)
    measured = (record.loss, record.kl, record.cross_entropy, record.matching, record.gradient_norm)
    assert measured == pytest.approx(expected, rel=1e-3)
    assert matching.item() > 0.01


def plain_terms(run: TinyRun, ids: Tensor, settings: TrainingSettings) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    student, student_outputs = logits_and_outputs(run, run.student.model, ids)
    with torch.no_grad():
        teacher, teacher_outputs = logits_and_outputs(run, run.teacher.model, ids)
    cross_entropy = F.cross_entropy(student, ids[:, 1:].flatten())
    scaled = [F.log_softmax(logits / settings.temperature, -1) for logits in (student, teacher)]
    kl = F.kl_div(*scaled, reduction="batchmean", log_target=True) * settings.temperature**2
    errors = [
        ((s - t) ** 2).sum((1, 2)) / (t**2).sum((1, 2)) for s, t in zip(student_outputs, teacher_outputs, strict=True)
    ]  # fmt: skip
    matching = torch.cat(errors).mean()
    total = settings.kl_weight * kl + settings.cross_entropy_weight * cross_entropy
    return total + settings.matching_weight * matching, kl, cross_entropy, matching


def logits_and_outputs(run: TinyRun, model: PreTrainedModel, ids: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Logits of all tokens but the last, and the outputs of the mixers' output projections."""
    outputs: list[Tensor] = []
    modules = [model.get_submodule(run.student.architecture.output_projection(mixer)) for mixer in run.student.mixers]
    hooks = [module.register_forward_hook(lambda *given: outputs.append(given[2].double())) for module in modules]
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1].flatten(0, 1).double()
    for hook in hooks:
        hook.remove()
    return logits, outputs


@pytest.mark.parametrize("name", ["gated_deltanet", "q35"])
@pytest.mark.parametrize("micro_batch_size", [1, 2, 3])
def test_micro_batches_do_not_matter(name: str, micro_batch_size: int, models: Models, tmp_path: Path) -> None:
    """Three of four rows leave one: batches of two sizes."""
    settings = with_steps(4, learning_rate=5e-4, matching_weight=0.2)
    whole, parts = open_run(models(name)), open_run(models(name))
    before = whole.weights()
    whole_records = records_of(whole, tmp_path / "whole", settings)
    parts_records = records_of(parts, tmp_path / "parts", replace(settings, micro_batch_size=micro_batch_size))
    assert largest_difference(whole.weights(), parts.weights()) < 5e-6
    assert largest_difference(before, whole.weights()) > 5e-4
    for one, other in zip(whole_records, parts_records, strict=True):  # AdamW does not see the gradient's scale
        assert other.gradient_norm == pytest.approx(one.gradient_norm, rel=1e-4)
        assert (other.loss, other.kl, other.cross_entropy, other.matching) == pytest.approx(
            (one.loss, one.kl, one.cross_entropy, one.matching), rel=1e-5
        )


@pytest.mark.parametrize("name", FAMILIES)
def test_gradient_checkpointing_changes_nothing_but_memory(name: str, models: Models, tmp_path: Path) -> None:
    settings = with_steps(2, matching_weight=0.5)
    plain = trained(models(name), tmp_path / "plain", settings)
    forward_passes = []
    run = open_run(models(name))
    module = run.student.model.get_submodule(run.student.mixers[0].module)
    module.register_forward_hook(lambda *given: forward_passes.append(1))
    train_run(run, tmp_path / "recomputed", replace(settings, gradient_checkpointing=True))
    assert largest_difference(plain, run.weights()) < 1e-6
    assert len(forward_passes) == 4  # each of the two steps computes the layer twice
    run.student.model.train()
    run.student.architecture.decoder(run.student.model)(text_batch(0, settings)).last_hidden_state.sum().backward()
    assert len(forward_passes) == 5


def test_matching_alone_moves_the_outputs_to_the_teachers(models: Models, tmp_path: Path) -> None:
    settings = with_steps(30, kl_weight=0.0, cross_entropy_weight=0.0, matching_weight=1.0)
    records = records_of(open_run(models("delta_net")), tmp_path, settings, batches=same_batch(settings))
    assert records[0].matching > 0.1
    assert records[-1].matching < 0.3 * records[0].matching
    assert all(record.loss == record.matching for record in records)


def test_without_matching_nothing_is_captured(models: Models, tmp_path: Path) -> None:
    (record,) = records_of(open_run(models("delta_net")), tmp_path, with_steps(1))
    assert record.matching == 0


def test_without_a_teacher_the_text_alone_is_learnt(models: Models, tmp_path: Path) -> None:
    settings = with_steps(20, cross_entropy_weight=1.0)
    run = open_run(models("gated_deltanet"))
    records = records_of(run, tmp_path, settings, batches=same_batch(settings), teacher=False)
    assert all(record.kl == 0 and record.loss == record.cross_entropy for record in records)
    assert records[-1].cross_entropy < 0.8 * records[0].cross_entropy


def test_a_record_counts_tokens_time_and_learning_rate(models: Models, tmp_path: Path) -> None:
    settings = with_steps(4, warmup_share=0.5)
    records = records_of(open_run(models("gated_deltanet")), tmp_path, settings)
    assert [record.tokens for record in records] == [128, 256, 384, 512]
    rates = [learning_rate(step, 4, 0.5, settings.learning_rate, settings.final_learning_rate) for step in range(4)]
    assert [record.learning_rate for record in records] == rates
    assert rates[1] == settings.learning_rate > rates[3] == settings.final_learning_rate
    for before, after in itertools.pairwise(records):
        assert after.tokens_per_second == pytest.approx(128 / (after.seconds - before.seconds), rel=1e-6)


def test_the_learning_rate_decides_how_far_a_step_goes(models: Models, tmp_path: Path) -> None:
    """AdamW's first step moves every entry with a gradient by the learning rate."""
    settings = with_steps(1, learning_rate=1e-3, final_learning_rate=0.0, weight_decay=0.0)
    run = open_run(models("delta_net"))
    before = run.weights()
    train_run(run, tmp_path, settings)
    assert largest_difference(before, run.weights()) == pytest.approx(1e-3, rel=1e-3)


def test_weight_decay_spares_vectors(models: Models, tmp_path: Path) -> None:
    name = "gated_deltanet"
    plain = trained(models(name), tmp_path / "plain", with_steps(1, weight_decay=0.0))
    decayed = trained(models(name), tmp_path / "decayed", with_steps(1, weight_decay=0.5))
    trainable = open_run(models(name)).trainable
    changed = {key for key in trainable if not torch.equal(plain[key], decayed[key])}
    assert changed == {key for key, parameter in trainable.items() if parameter.ndim > 1}
    assert changed != set(trainable)


def test_global_random_state_is_left_alone(models: Models, tmp_path: Path) -> None:
    run = open_run(models("q35"))
    state = torch.get_rng_state()
    train_run(run, tmp_path, with_steps(2))
    assert torch.equal(state, torch.get_rng_state())


def test_evaluations(models: Models, tmp_path: Path) -> None:
    """Before the first step, every third, after the last; in evaluation mode and with the weights of the moment."""
    run = open_run(models("gated_deltanet"))
    watched = next(iter(run.trainable.values()))
    seen: list[tuple[int, bool, float]] = []

    def evaluate(step: int) -> dict[str, float]:
        seen.append((step, run.student.model.training, float(watched.detach().sum())))
        return {"kl": 1.0 / (1 + step), "bad": math.inf}

    result = train_run(run, tmp_path, with_steps(7, evaluate_every=3), evaluate=evaluate)
    assert [(step, training) for step, training, _ in seen] == [(step, False) for step in (0, 3, 6, 7)]
    assert len({weight for *_, weight in seen}) == 4
    assert {step: figures["kl"] for step, figures in result.evaluations.items()} == {0: 1, 3: 1 / 4, 6: 1 / 7, 7: 1 / 8}
    lines = [line for line in read_log(result.log) if "evaluation" in line]
    assert [line["step"] for line in lines] == [0, 3, 6, 7]
    assert lines[1]["evaluation"] == {"kl": 0.25, "bad": None}


def test_evaluation_can_be_left_out(models: Models, tmp_path: Path) -> None:
    called: list[int] = []
    train_run(open_run(models("gated_deltanet")), tmp_path, with_steps(2), evaluate=lambda step: {"a": called[step]})
    assert called == []
