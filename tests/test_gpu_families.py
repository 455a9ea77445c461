"""Families whose kernels no other test runs on a GPU: calibrated, cut, held against the masked model and plain torch.

Widths are multiples of 16, before and after the cut.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from compressor.architectures.base import Architecture
from compressor.architectures.registry import architecture_of
from compressor.artifacts import Selection
from compressor.checkpoint.config_file import CONFIG_FILE, read_config
from compressor.cli import main
from compressor.evaluation.language_modelling import next_token_logits
from compressor.loading import load_model
from compressor.verification.oracle import masked_logits
from compressor.verification.run import GENERATION_TOLERANCE
from compressor.verification.stock_load import generation_facts
from tests.families import random_selection, tiny_tokens
from tests.recovery.pairs import tiny_pair
from tests.recovery.test_kernel_width import assert_gradients_of_plain_torch
from tests.reference.test_gpu_agreement import exact_matrix_products, few_tile_shapes  # noqa: F401
from tests.test_pipeline import make_text
from tests.tiny_models import save_tiny, save_tiny_tokenizer

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
_QWEN = {"hidden_size": 128, "linear_key_head_dim": 64, "linear_value_head_dim": 64}
_EXPERTS = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
_MAMBA2 = {"hidden_size": 128, "head_dim": 64, "state_size": 64}
_HYBRID = {"hidden_size": 128, "mamba_d_head": 64, "mamba_d_state": 64}
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "gated_deltaproduct": {"hidden_size": 128, "head_dim": 64},
    "kda": {"hidden_size": 128, "head_dim": 64},
    "m2": _MAMBA2,
    # Its stock class cannot run a bfloat16 checkpoint that keeps residuals in float32, and its plain-torch path, which
    # is taken on a GPU without mamba_ssm, gives heads the wrong one of several groups.
    "m2_fla": _MAMBA2 | {"n_groups": 1, "residual_in_fp32": False},
    "qn": _QWEN,
    "q35_experts": _QWEN | _EXPERTS,
    "oh": _QWEN,
    "bamba": _HYBRID,
    "granite": _HYBRID,
    "nh": {"hidden_size": 128, "mamba_head_dim": 64, "ssm_state_size": 64},
    # With a norm in the mixer it is refused before transformers 5.23.
    "falcon_h1": _HYBRID | {"mamba_d_ssm": 256, "mamba_rms_norm": False},
    # Large random weights multiply rounding errors from layer to layer.
    "zamba2": {"hidden_size": 128, "mamba_d_state": 64, "initializer_range": 0.14},
}
LENGTHS = (40, 300)
"""Of prompts that fla's layers read token by token, and in chunks."""
TOLERANCE = {torch.bfloat16: 0.1, torch.float32: 0.02}
"""Of logits; products of float32 are TF32 in the kernels."""


def without_mamba_ssm(name: str) -> bool:
    """fla's Mamba-2 then runs on a GPU as plain torch, in which a tap sees nothing."""
    return name == "m2_fla" and importlib.util.find_spec("mamba_ssm") is None


def cut_words(name: str, folder: Path, device: str) -> list[str]:
    source = save_tiny_tokenizer(save_tiny(name, folder / "source", torch.bfloat16, overrides=VARIANTS[name]))
    words = [str(source), "--ratio", "0.5", "--norm-epsilon", "keep", "--output-dir", str(folder / "cut")]
    calibration = ["--calibration", str(make_text(folder)), "--calibration-samples", "8", "--sequence-length", "192"]
    return [*words, *calibration, "--device", device]


def load(folder: Path, architecture: Architecture, dtype: torch.dtype, device: str) -> PreTrainedModel:
    """Experts are computed one by one in float32, which not every grouped product takes on a GPU."""
    model = load_model(architecture, folder, read_config(folder / CONFIG_FILE), dtype, torch.device(device))
    if dtype == torch.float32 and any(path.endswith(".experts") for path, _ in model.named_modules()):
        model.set_experts_implementation("eager")
    return model


def token_error(actual: Tensor, expected: Tensor) -> float:
    """Median over tokens of ||a - b|| / ||b||: where rounding sends one to another expert, it is far off alone."""
    actual, expected = actual.double().cpu(), expected.double().cpu()
    return float(((actual - expected).norm(dim=-1) / expected.norm(dim=-1)).median())


@pytest.mark.parametrize("name", VARIANTS)
def test_cut_on_a_gpu(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tapped_on = "cpu" if without_mamba_ssm(name) else DEVICE
    if tapped_on != DEVICE:
        assert main(cut_words(name, tmp_path, DEVICE)) == 2
        assert "needs mamba_ssm to be calibrated" in capsys.readouterr().err
    assert main([*cut_words(name, tmp_path, tapped_on), "--no-refit", "--no-evaluate", "--no-verify"]) == 0
    source, folder = tmp_path / "source", tmp_path / "cut"
    assert json.loads((folder / "compression.json").read_text())["key_dim"] == {"before": 64, "after": 32}
    selection = Selection.from_json(json.loads((folder / "selection.json").read_text()))
    architecture = architecture_of(read_config(source / CONFIG_FILE))
    dtype = torch.float32 if architecture.kernels_take_float32 else torch.bfloat16
    original = load(source, architecture, dtype, tapped_on)
    smaller = load(folder, architecture, dtype, DEVICE)
    other = random_selection(architecture.mixers(original.config, list(original.state_dict())), 32)
    on_cpu = load(folder, architecture, torch.float32, "cpu")
    for length in LENGTHS:
        tokens = tiny_tokens(length)
        expected, wrong = (masked_logits(architecture, original, kept, False, tokens) for kept in (selection, other))
        for model in (smaller, on_cpu):
            assert token_error(next_token_logits(model, tokens), expected) < TOLERANCE[dtype], (length, model.device)
        assert token_error(wrong, expected) > 2 * TOLERANCE[dtype]
    facts = generation_facts(smaller, tiny_tokens(16).to(DEVICE))
    assert facts["generation_error"] < GENERATION_TOLERANCE


def test_kda_is_verified_with_stock_kernels(tmp_path: Path) -> None:
    assert main([*cut_words("kda", tmp_path, DEVICE), "--no-refit", "--no-evaluate"]) == 0
    report = json.loads((tmp_path / "cut" / "compression.json").read_text())
    assert report["verification"]["generated_by"] == "stock kernels"
    assert report["verification"]["oracle_relative_error"] < 1e-3


@pytest.mark.parametrize("width", [32, 64])
def test_gradients_of_kda_are_those_of_plain_torch(width: int, tmp_path: Path) -> None:
    folder = tiny_pair("kda", tmp_path, width, overrides={"hidden_size": 128, "head_dim": 128}).compressed.folder
    assert_gradients_of_plain_torch(folder)
