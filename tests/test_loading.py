"""Models in the dtype that was asked for: every family runs in it, and fla's Mamba-2 as its stock class does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from compressor.architectures.registry import architecture_of
from compressor.checkpoint.config_file import CONFIG_FILE, read_config
from compressor.cli import main
from compressor.evaluation.language_modelling import next_token_logits
from compressor.loading import load_model
from compressor.verification.stock_load import generation_facts
from tests.calibration.test_layerwise import assert_same, in_memory, layerwise, opened
from tests.families import tiny_tokens
from tests.test_pipeline import make_source, make_text
from tests.tiny_models import VARIANTS, read_weights, save_tiny, stock_model_class

CPU = torch.device("cpu")
FLA_MAMBA2 = tuple(name for name in VARIANTS if name.startswith("m2_fla"))


def load(folder: Path, dtype: torch.dtype, device_map: dict[str, str] | None = None) -> PreTrainedModel:
    raw_config = read_config(folder / CONFIG_FILE)
    return load_model(architecture_of(raw_config), folder, raw_config, dtype, CPU, device_map)


def stock(name: str, folder: Path, dtype: torch.dtype) -> Any:
    return stock_model_class(name).from_pretrained(folder, dtype=dtype, local_files_only=True).eval()


def logits_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("name", VARIANTS)
def test_every_family_runs_in_bfloat16(name: str, tmp_path: Path) -> None:
    folder = save_tiny(name, tmp_path)
    narrow, exact = (next_token_logits(load(folder, dtype), tiny_tokens()) for dtype in (torch.bfloat16, torch.float32))
    assert 0 < logits_error(narrow, exact) < 0.5


@pytest.mark.parametrize("name", FLA_MAMBA2)
def test_mamba2_of_fla_computes_what_its_stock_class_does_once_that_is_one_dtype(name: str, tmp_path: Path) -> None:
    """As its loader leaves it, it does not run."""
    folder, tokens = save_tiny(name, tmp_path, torch.bfloat16), tiny_tokens()
    model, original = load(folder, torch.bfloat16), stock(name, folder, torch.bfloat16)
    with pytest.raises(RuntimeError, match="to have the same dtype"):
        next_token_logits(original, tokens)
    assert torch.equal(next_token_logits(model, tokens), next_token_logits(original.to(torch.bfloat16), tokens))
    assert generation_facts(model, tokens[:20])["generation_error"] < 0.05


def test_only_norms_before_projections_are_narrowed(tmp_path: Path) -> None:
    """Decays, which the stock class computes in float32, keep what float32 files hold."""
    folder = save_tiny("m2_fla", tmp_path)
    files, original = read_weights(folder), stock("m2_fla", folder, torch.bfloat16).state_dict()
    changed = set()
    for name, tensor in load(folder, torch.bfloat16).state_dict().items():
        if tensor.dtype != original[name].dtype:
            changed.add(name)
            assert torch.equal(tensor, original[name].to(torch.bfloat16))
        else:
            assert torch.equal(tensor, original[name])
        assert not name.endswith("A_log") or torch.equal(tensor, files[name])
    assert changed == {"backbone.layers.0.norm.weight", "backbone.layers.1.norm.weight", "backbone.norm_f.weight"}


def test_models_that_run_as_they_are_loaded_are_left_so(tmp_path: Path) -> None:
    narrow = save_tiny("m2_fla", tmp_path / "narrow", overrides={"residual_in_fp32": False})
    wide = save_tiny("m2_fla", tmp_path / "wide")
    for folder, dtype in ((narrow, torch.bfloat16), (wide, torch.float32)):
        model, original = load(folder, dtype), stock("m2_fla", folder, dtype)
        for name, tensor in model.state_dict().items():
            assert (tensor.dtype, name) == (original.state_dict()[name].dtype, name)
        assert torch.equal(next_token_logits(model, tiny_tokens()), next_token_logits(original, tiny_tokens()))


def test_norms_are_narrowed_wherever_they_lie(tmp_path: Path) -> None:
    """By a device map, and in files from which layers are read one at a time."""
    source = opened("m2_fla", tmp_path / "source")
    plain, mapped = (load(source.folder, torch.bfloat16, devices) for devices in (None, {"": "cpu"}))
    assert torch.equal(next_token_logits(plain, tiny_tokens()), next_token_logits(mapped, tiny_tokens()))
    assert_same(layerwise(source, tmp_path, torch.bfloat16)[0], in_memory(source, torch.bfloat16))


def test_a_run_in_bfloat16(tmp_path: Path) -> None:
    """As on a GPU, where it is the default: calibration and refit of fla's Mamba-2."""
    source, text, output = make_source("m2_fla", tmp_path / "m", torch.bfloat16), make_text(tmp_path), tmp_path / "out"
    words = [str(source), "--target-dim", "8", "--calibration", str(text), "--calibration-samples", "8"]
    words += ["--sequence-length", "128", "--retrieval-share", "0", "--device", "cpu", "--dtype", "bfloat16"]
    assert main([*words, "--no-evaluate", "--no-verify", "--output-dir", str(output)]) == 0
    assert {tensor.dtype for tensor in read_weights(output).values()} == {torch.bfloat16}
    assert torch.isfinite(next_token_logits(load(output, torch.bfloat16), tiny_tokens())).all()
