"""The adapter's files: peft puts them on the checkpoint as it was, and that gives the trained model's logits."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from safetensors import safe_open
from safetensors.torch import load_file

from compressor.errors import RequestError
from compressor.evaluation.language_modelling import next_token_logits
from compressor.recovery.student import WHOLE_FILE, StudentSettings
from compressor.verification.oracle import relative_error
from tests.families import SUPPORTED_VARIANTS, open_tiny, tiny_tokens
from tests.recovery.students import LORA, MIXERS, NARROW_LORA, file_dtypes, student_of, tiny_student, train_at_random
from tests.tiny_models import read_weights, save_tiny, write_weights

# transformers, of what peft asks a model when it loads an adapter.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

ADAPTER_FILES = {"adapter_config.json", "adapter_model.safetensors", WHOLE_FILE}


@pytest.mark.parametrize("settings", [LORA, NARROW_LORA], ids=["lora", "narrow_lora"])
@pytest.mark.parametrize("name", SUPPORTED_VARIANTS)
def test_peft_loads_it(name: str, settings: StudentSettings, tmp_path: Path) -> None:
    tiny, student = tiny_student(name, tmp_path / "model", settings)
    train_at_random(student)
    student.save_adapter(tmp_path / "adapter")
    trained = next_token_logits(tiny.model, tiny_tokens(100))

    files = read_weights(tiny.folder)
    before = next_token_logits(open_tiny(tiny.folder).model, tiny_tokens(100))
    write_weights(tiny.folder, files | load_file(tmp_path / "adapter" / WHOLE_FILE))
    base = open_tiny(tiny.folder).model
    without = next_token_logits(base, tiny_tokens(100))
    adapted = PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
    assert relative_error(trained, before) > 0.05
    assert relative_error(without, trained) > 0.01
    assert torch.equal(next_token_logits(adapted, tiny_tokens(100)), trained)


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("gated_deltanet_hybrid", {"num_hidden_layers": 8, "attn": {"layers": [1, 6], "num_heads": 2}}),
        ("q35", {"num_hidden_layers": 8}),
    ],
)
def test_long_lists_of_modules_stay_exact(name: str, overrides: dict[str, Any], tmp_path: Path) -> None:
    """peft shortens lists of 20 and more to endings; the softmax layers' projections have the same ones."""
    save_tiny(name, tmp_path / "model", overrides=overrides)
    tiny, student = student_of(open_tiny(tmp_path / "model"), NARROW_LORA)
    expected = tiny.architecture.recovery_targets(open_tiny(tmp_path / "model").model, tiny.mixers).projections
    assert len(expected) >= 20
    assert tuple(adapter.path for adapter in student.adapters) == expected
    student.save_adapter(tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["target_modules"] == list(expected)
    adapted = PeftModel.from_pretrained(open_tiny(tmp_path / "model").model, str(tmp_path / "adapter"))
    layers = {path for path, module in adapted.named_modules() if isinstance(module, LoraLayer)}
    assert layers == {f"base_model.model.{path}" for path in expected}


def test_both_files_together_are_all_that_was_trained(tmp_path: Path) -> None:
    """Rounded to the files' dtypes they give the exported tensors."""
    student = tiny_student("qw", tmp_path / "model", LORA, torch.bfloat16)[1]
    train_at_random(student)
    student.save_adapter(tmp_path / "adapter")
    merged = student.merged_tensors(file_dtypes(tmp_path / "model"))
    whole = load_file(tmp_path / "adapter" / WHOLE_FILE)
    adapter = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in (*whole.values(), *adapter.values())} == {torch.float32}
    assert all(torch.equal(merged[name], tensor.to(torch.bfloat16)) for name, tensor in whole.items())
    adapted = {key.removeprefix("base_model.model.").rpartition(".lora_")[0] for key in adapter}
    assert set(merged) - set(whole) == {f"{path}.weight" for path in adapted}
    assert len(adapter) == 2 * len(adapted)


def test_what_stands_in_the_folder(tmp_path: Path) -> None:
    student = tiny_student("gated_deltanet_hybrid", tmp_path / "model", LORA)[1]
    student.save_adapter(tmp_path / "deep" / "adapter")
    folder = tmp_path / "deep" / "adapter"
    plain = tmp_path / "plain"
    plain.write_text("")
    assert {path.name for path in folder.iterdir()} == ADAPTER_FILES
    assert {path.stat().st_mode for path in folder.iterdir()} == {plain.stat().st_mode}
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["peft_type"] == "LORA"
    assert config["task_type"] == "CAUSAL_LM"
    assert (config["r"], config["lora_alpha"], config["lora_dropout"]) == (4, 7, 0.0)
    assert config["target_modules"] == [adapter.path for adapter in student.adapters]
    assert config["base_model_name_or_path"] is None
    assert config["inference_mode"] is True
    assert str(tmp_path) not in (folder / "adapter_config.json").read_text()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}


def test_the_same_student_gives_the_same_bytes(tmp_path: Path) -> None:
    written = []
    for number in range(2):
        student = tiny_student("q35", tmp_path / f"model-{number}", LORA)[1]
        train_at_random(student)
        student.save_adapter(tmp_path / f"adapter-{number}")
        written.append({path.name: path.read_bytes() for path in (tmp_path / f"adapter-{number}").iterdir()})
    assert written[0] == written[1]


def test_an_alpha_with_a_fraction_survives(tmp_path: Path) -> None:
    tiny, student = tiny_student("gated_deltanet", tmp_path / "model", replace(NARROW_LORA, alpha=0.3))
    train_at_random(student)
    student.save_adapter(tmp_path / "adapter")
    trained = next_token_logits(tiny.model, tiny_tokens(70))
    files = read_weights(tiny.folder)
    write_weights(tiny.folder, files | load_file(tmp_path / "adapter" / WHOLE_FILE))
    adapted = PeftModel.from_pretrained(open_tiny(tiny.folder).model, str(tmp_path / "adapter"))
    assert torch.equal(next_token_logits(adapted, tiny_tokens(70)), trained)


def test_whole_mixers_have_no_adapter_to_save(tmp_path: Path) -> None:
    student = tiny_student("gated_deltanet", tmp_path / "model", MIXERS)[1]
    message = "^save_adapter: trainable mixers trains no adapter; use trainable lora, or leave save_adapter out"
    with pytest.raises(RequestError, match=message):
        student.save_adapter(tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()
