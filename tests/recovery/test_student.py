"""What a student trains, and that its tensors in the files give what the trained model gave."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from compressor.errors import RunError
from compressor.evaluation.language_modelling import next_token_logits
from compressor.recovery.student import StudentSettings
from compressor.verification.oracle import relative_error
from tests.families import (
    SUPPORTED_VARIANTS,
    in_float64,
    open_tiny,
    parameter_of_files,
    tiny_checkpoint,
    tiny_tokens,
)
from tests.recovery.students import (
    LORA,
    MIXERS,
    MODES,
    NARROW_LORA,
    file_dtypes,
    loss_of,
    student_of,
    tiny_student,
    train_at_random,
)
from tests.tiny_models import read_weights, save_tiny, write_weights

VARIANTS_OF_EACH_KIND = ("gated_deltanet_tied", "gated_deltanet_hybrid", "gated_deltaproduct", "delta_net_gate")
VARIANTS_OF_EACH_KIND += ("q35", "qw")


def gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def write_merged(folder: Path, merged: dict[str, Tensor]) -> None:
    write_weights(folder, read_weights(folder) | merged)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", SUPPORTED_VARIANTS)
def test_the_files_give_the_trained_models_logits(name: str, mode: str, tmp_path: Path) -> None:
    """In float64, so that the one rounding of the merged weights remains; the norms of Qwen's models round as well."""
    tiny, student = tiny_student(name, tmp_path, MODES[mode])
    tokens = tiny_tokens(100)
    untrained = next_token_logits(tiny.model, tokens)
    train_at_random(student)
    write_merged(tmp_path, student.merged_tensors(file_dtypes(tmp_path)))
    trained = next_token_logits(in_float64(tiny.model), tokens)
    reloaded = next_token_logits(in_float64(open_tiny(tmp_path).model), tokens)
    assert relative_error(trained, untrained) > 0.05
    assert relative_error(reloaded, trained) < (3e-6 if name.startswith("q") else 1e-6)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", SUPPORTED_VARIANTS)
def test_gradients_reach_what_is_trained_and_nothing_else(name: str, mode: str, tmp_path: Path) -> None:
    tiny, student = tiny_student(name, tmp_path, MODES[mode])
    train_at_random(student)
    loss_of(tiny.model).backward()
    trained = student.trainable_parameters()
    assert trained
    for parameter_name, parameter in trained.items():
        assert parameter.dtype == torch.float32
        assert parameter.grad is not None, parameter_name
        assert bool(parameter.grad.isfinite().all()), parameter_name
        assert float(parameter.grad.abs().sum()) > 0, parameter_name
    own = {id(parameter) for parameter in trained.values()}
    others = [parameter for parameter in tiny.model.parameters() if id(parameter) not in own]
    assert len(own) == len(trained) == sum(parameter.requires_grad for parameter in tiny.model.parameters())
    assert all(parameter.grad is None for parameter in others)


@pytest.mark.parametrize("name", VARIANTS_OF_EACH_KIND)
def test_gradients_of_adapters_are_those_of_the_merged_weights(name: str, tmp_path: Path) -> None:
    """dB = s dW A^T and dA = s B^T dW, with dW from the merged model trained whole; all of it in float64."""
    tiny, student = tiny_student(name, tmp_path, NARROW_LORA)
    train_at_random(student)
    write_merged(tmp_path, student.merged_tensors(file_dtypes(tmp_path)))
    merged, whole = student_of(open_tiny(tmp_path), MIXERS)
    for model in (tiny.model, merged.model):
        loss_of(model.double()).backward()
    gradients = {key: gradient(parameter) for key, parameter in whole.trainable_parameters().items()}
    for adapter in student.adapters:
        of_weight = gradients[f"{adapter.path}.weight"]
        assert relative_error(gradient(adapter.b), 3.5 * of_weight @ adapter.a.detach().mT) < 1e-4
        assert relative_error(gradient(adapter.a), 3.5 * adapter.b.detach().mT @ of_weight) < 1e-4
    for key, parameter in student.whole.items():
        assert relative_error(gradient(parameter), gradients[key]) < 1e-4


@pytest.mark.parametrize("name", SUPPORTED_VARIANTS)
def test_a_gradient_step_lowers_the_loss_of_the_files(name: str, tmp_path: Path) -> None:
    tiny, student = tiny_student(name, tmp_path, LORA)
    first = loss_of(tiny.model).item()
    optimizer = torch.optim.AdamW(student.trainable_parameters().values(), lr=1e-2, weight_decay=0.0)
    for _ in range(3):
        optimizer.zero_grad()
        loss_of(tiny.model).backward()
        optimizer.step()
    write_merged(tmp_path, student.merged_tensors(file_dtypes(tmp_path)))
    assert loss_of(open_tiny(tmp_path).model).item() < first - 0.01


@pytest.mark.parametrize("name", VARIANTS_OF_EACH_KIND)
@pytest.mark.parametrize("loaded", [torch.float32, torch.bfloat16])
def test_bfloat16_files_get_one_rounding(name: str, loaded: torch.dtype, tmp_path: Path) -> None:
    tiny = tiny_checkpoint(name, tmp_path, torch.bfloat16)
    tiny.model.to(loaded)
    student = student_of(tiny, LORA)[1]
    train_at_random(student)
    merged = student.merged_tensors(file_dtypes(tmp_path))
    files = read_weights(tmp_path)
    assert {tensor.dtype for tensor in merged.values()} == {torch.bfloat16}
    assert len(merged) == len(student.adapters) + len(student.whole)
    for adapter in student.adapters:
        tensor = f"{adapter.path}.weight"
        update = (7.0 / 4) * (adapter.b.detach() @ adapter.a.detach())
        assert torch.equal(merged[tensor], (files[tensor].float() + update).to(torch.bfloat16))
        assert not torch.equal(merged[tensor], files[tensor] + update.to(torch.bfloat16))
    for parameter_name, parameter in student.whole.items():
        assert torch.equal(merged[parameter_name], parameter.detach().to(torch.bfloat16))


def test_every_tensor_keeps_the_dtype_of_its_file(tmp_path: Path) -> None:
    save_tiny("q35", tmp_path, torch.bfloat16)
    files = read_weights(tmp_path)
    kept = {name for name in files if name.endswith(("A_log", "linear_attn.norm.weight"))}
    write_weights(tmp_path, files | {name: files[name].float() for name in kept})
    student = student_of(open_tiny(tmp_path), LORA)[1]
    train_at_random(student)
    merged = student.merged_tensors(file_dtypes(tmp_path))
    assert len(kept) == 6
    assert {name for name, tensor in merged.items() if tensor.dtype == torch.float32} == kept
    assert {tensor.dtype for tensor in merged.values()} == {torch.float32, torch.bfloat16}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", SUPPORTED_VARIANTS)
def test_only_the_recurrent_layers_come_back(name: str, mode: str, tmp_path: Path) -> None:
    """Embeddings, tied or not, softmax layers, MLPs and the vision tower stay as they are."""
    tiny, student = tiny_student(name, tmp_path, MODES[mode])
    train_at_random(student)
    files = read_weights(tmp_path)
    merged = student.merged_tensors(file_dtypes(tmp_path))
    blocks = tuple(f"{mixer.module.rpartition('.')[0]}." for mixer in tiny.mixers)
    other = ("mlp", "post_attention", "feedforward", *(["_conv1d"] if name == "oh_parts" else []))
    trained = {key for key in files if key.startswith(blocks) and not any(part in key for part in other)}
    if mode != "lora":
        assert set(merged) == trained
    assert set(merged) <= trained
    for tensor_name, tensor in merged.items():
        assert tensor.device.type == "cpu"
        assert tensor.shape == files[tensor_name].shape
        assert not torch.equal(tensor, files[tensor_name])
    for tensor_name in files.keys() - merged.keys():
        assert torch.equal(parameter_of_files(tiny.model, tensor_name), files[tensor_name])


def test_merged_tensors_do_not_follow_further_training(tmp_path: Path) -> None:
    student = tiny_student("gated_deltanet", tmp_path, MIXERS)[1]
    merged = student.merged_tensors(file_dtypes(tmp_path))
    before = {name: tensor.clone() for name, tensor in merged.items()}
    train_at_random(student)
    assert all(torch.equal(tensor, before[name]) for name, tensor in merged.items())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", SUPPORTED_VARIANTS)
def test_an_untrained_student_computes_what_the_model_did(name: str, mode: str, tmp_path: Path) -> None:
    tiny = tiny_checkpoint(name, tmp_path)
    before = next_token_logits(tiny.model, tiny_tokens(100))
    student = student_of(tiny, MODES[mode])[1]
    assert student.model is tiny.model
    assert torch.equal(next_token_logits(student.model, tiny_tokens(100)), before)
    files = read_weights(tmp_path)
    for tensor_name, tensor in student.merged_tensors(file_dtypes(tmp_path)).items():
        assert torch.equal(tensor, files[tensor_name])


def test_names_of_trained_parameters(tmp_path: Path) -> None:
    student = tiny_student("gated_deltanet", tmp_path, replace(LORA, targets=("q_proj", "o_proj")))[1]
    expected = [
        f"model.layers.{layer}.attn.{module}.lora_{side}.weight"
        for layer in (0, 1)
        for module in ("q_proj", "o_proj")
        for side in "AB"
    ]
    attention = ("A_log", "dt_bias", *(f"{letter}_conv1d.weight" for letter in "qkv"), "o_norm.weight")
    for layer in (0, 1):
        expected += [f"model.layers.{layer}.attn.{name}" for name in attention]
        expected += [f"model.layers.{layer}.attn_norm.weight"]
    names = list(student.trainable_parameters())
    assert names == expected
    train_at_random(student)
    assert list(student.trainable_parameters()) == names


@pytest.mark.parametrize("name", ["gated_deltanet_hybrid", "delta_net", "qw"])
def test_names_and_first_values_depend_on_the_seed_alone(name: str, tmp_path: Path) -> None:
    drawn = []
    for number, seed in enumerate((3, 3, 4)):
        torch.manual_seed(number)
        drawn.append(tiny_student(name, tmp_path / str(number), replace(LORA, seed=seed))[1].trainable_parameters())
    assert list(drawn[0]) == list(drawn[1]) == list(drawn[2])
    downs = [key for key in drawn[0] if key.endswith("lora_A.weight")]
    assert all(torch.equal(drawn[0][key], drawn[1][key]) for key in drawn[0])
    assert not any(torch.equal(drawn[0][key], drawn[2][key]) for key in downs)
    for key in downs:
        bound = drawn[0][key].shape[1] ** -0.5
        assert 0.8 * bound < float(drawn[0][key].detach().abs().max()) <= bound
        assert float(drawn[0][key.replace("lora_A", "lora_B")].detach().abs().max()) == 0
    assert not torch.equal(drawn[0][downs[0]][:, :16], drawn[0][downs[1]][:, :16])


@pytest.mark.parametrize("settings", MODES.values(), ids=MODES)
def test_the_global_generators_are_untouched(settings: StudentSettings, tmp_path: Path) -> None:
    tiny = tiny_checkpoint("q35", tmp_path)
    before = (torch.get_rng_state(), random.getstate())
    student_of(tiny, settings)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


def test_named_targets_leave_the_other_projections_alone(tmp_path: Path) -> None:
    tiny, student = tiny_student("gated_deltanet_hybrid", tmp_path, replace(LORA, targets=("v_proj", "q_proj")))
    assert student.summary().lora_modules == {0: ("q_proj", "v_proj"), 2: ("q_proj", "v_proj")}
    assert {adapter.path for adapter in student.adapters} == {
        f"{mixer.module}.{name}" for mixer in tiny.mixers for name in ("q_proj", "v_proj")
    }
    merged = student.merged_tensors(file_dtypes(tmp_path))
    assert {name for name in merged if "proj" in name} == {f"{adapter.path}.weight" for adapter in student.adapters}


def test_summary_counts_elements_and_adapters_of_every_layer(tmp_path: Path) -> None:
    """Two layers: adapters of rank 4 on 5 projections of 32 by 32, two projections of 2 by 32 whole."""
    summary = tiny_student("gated_deltanet", tmp_path / "lora", LORA)[1].summary()
    modules = ("q_proj", "k_proj", "v_proj", "g_proj", "o_proj")
    whole = 2 * (2 * 2 * 32 + 2 + 2 + 3 * 32 * 4 + 16 + 32)
    assert summary.lora_modules == {0: modules, 1: modules}
    assert summary.whole_parameters == whole
    assert summary.trainable_parameters == whole + 2 * 5 * 4 * (32 + 32)
    mixers = tiny_student("gated_deltanet", tmp_path / "mixers", MIXERS)[1].summary()
    assert mixers.lora_modules == {}
    assert mixers.whole_parameters == mixers.trainable_parameters == whole + 2 * 5 * 32 * 32


def test_a_tensor_that_the_files_lack_is_named(tmp_path: Path) -> None:
    student = tiny_student("gated_deltanet", tmp_path, LORA)[1]
    dtypes = file_dtypes(tmp_path)
    del dtypes["model.layers.1.attn.q_proj.weight"]
    message = (
        "^model.layers.1.attn.q_proj.weight was trained and the checkpoint has no tensor "
        "model.layers.1.attn.q_proj.weight to take it.$"
    )
    with pytest.raises(RunError, match=message):
        student.merged_tensors(dtypes)


def test_attention_over_residuals_trains_its_norm_too(tmp_path: Path) -> None:
    """There the stock block hands the norm's weight to a kernel instead of calling the norm."""
    save_tiny("gated_deltanet", tmp_path, overrides={"attnres_block_size": 2})
    tiny, student = student_of(open_tiny(tmp_path), LORA)
    train_at_random(student)
    loss_of(tiny.model).backward()
    trained = student.trainable_parameters()
    assert any(key.endswith("layers.1.attn_norm.weight") for key in trained)
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in trained.values())


@pytest.mark.parametrize("name", ["gated_deltanet", "delta_net", "q35"])
@pytest.mark.parametrize("settings", [LORA, MIXERS], ids=["lora", "mixers"])
def test_a_bfloat16_model_runs_under_autocast(name: str, settings: StudentSettings, tmp_path: Path) -> None:
    tiny = tiny_checkpoint(name, tmp_path, torch.bfloat16)
    tiny.model.to(torch.bfloat16)
    student = student_of(tiny, settings)[1]
    train_at_random(student)
    with torch.autocast("cpu", torch.bfloat16):
        loss_of(tiny.model).backward()
    for parameter in student.trainable_parameters().values():
        assert parameter.dtype == torch.float32
        assert parameter.grad is not None
        assert bool(parameter.grad.isfinite().all())
    frozen = [parameter for parameter in tiny.model.parameters() if not parameter.requires_grad]
    assert {parameter.dtype for parameter in frozen} == {torch.bfloat16}
