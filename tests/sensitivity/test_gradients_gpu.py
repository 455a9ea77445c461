"""The backward pass through the stock kernels of a GPU, against plain torch on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from compressor.calibration.tokens import batches
from compressor.loading import load_model
from compressor.sensitivity.gradients import gradient_scores, loss_gradients
from tests.families import open_tiny, tiny_tokens
from tests.tiny_models import save_tiny

pytestmark = pytest.mark.gpu

VARIANTS = {
    "gated_deltanet": {"hidden_size": 128, "head_dim": 64},
    "gated_deltaproduct": {"hidden_size": 128, "head_dim": 64},
    "delta_net": {"hidden_size": 128},
    "q35": {"hidden_size": 128, "linear_key_head_dim": 64, "linear_value_head_dim": 64},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_scores_on_a_gpu(name: str, tmp_path: Path) -> None:
    """bfloat16 weights on both; activations and gradients are bfloat16 on the GPU and float32 on the CPU."""
    save_tiny(name, tmp_path, torch.bfloat16, overrides=VARIANTS[name])
    tiny = open_tiny(tmp_path)
    token_batches = list(batches([tiny_tokens(length, seed=length) for length in (256, 256, 60)], 2))
    on_gpu = load_model(tiny.architecture, tmp_path, dict(tiny.raw_config), torch.bfloat16, torch.device("cuda:0"))
    found: list[Tensor] = []
    for model in (tiny.model, on_gpu):
        gradients = loss_gradients(tiny.architecture, model, tiny.mixers, token_batches, lambda tokens: None)
        found.append(gradient_scores(tiny.architecture, model, tiny.mixers, gradients))
    expected, actual = found
    assert float((actual - expected).norm() / expected.norm()) < 0.1
    assert not any(parameter.grad is not None for parameter in on_gpu.parameters())
