"""Weights that are no numbers, which no activation of the calibration shows: refused as they are written."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from tests.test_pipeline import SHORT, compress, make_source, make_text
from tests.tiny_models import read_weights, write_weights

# Nothing behind the recurrence of the last layer is calibrated.
OUTPUT, HEAD, NORM, RATE = "layers.1.attn.o_proj.weight", "lm_head.weight", "model.norm.weight", "layers.1.attn.A_log"


def spoil(source: Path, ending: str, value: float, dtype: torch.dtype) -> str:
    """The name of the tensor that has `value` in its last place but one."""
    weights = {name: tensor.to(dtype) for name, tensor in read_weights(source).items()}
    name = next(name for name in weights if name.endswith(ending))
    weights[name].view(-1)[-2] = value
    write_weights(source, weights)
    return name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("ending", "value"), [(OUTPUT, math.nan), (OUTPUT, math.inf), (HEAD, -math.inf), (NORM, math.nan)]
)
def test_a_weight_that_is_not_finite_ends_the_run(
    ending: str, value: float, dtype: torch.dtype, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, text, output = make_source("gated_deltanet", tmp_path / "nan"), make_text(tmp_path), tmp_path / "out"
    name = spoil(source, ending, value, dtype)
    assert compress(source, output, text, *SHORT, "--no-refit") == 1
    error = capsys.readouterr().err
    assert f"{name} in {source / 'model.safetensors'} holds numbers that are NaN or infinite" in error
    assert not output.exists()


def test_a_head_that_never_decays_is_cut_as_any(tmp_path: Path) -> None:
    """exp(-inf) is a rate of 0: checkpoints in bfloat16 have such heads."""
    source, text, output = make_source("gated_deltanet", tmp_path / "rate"), make_text(tmp_path), tmp_path / "out"
    name = spoil(source, RATE, -math.inf, torch.float32)
    assert compress(source, output, text, *SHORT, "--no-refit") == 0
    assert read_weights(output)[name][0] == -math.inf
