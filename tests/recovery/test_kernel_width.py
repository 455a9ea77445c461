"""Recurrences run at more channels than the model has, on zeros: outputs and gradients stay what they were."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor

from compressor.architectures.masking import PaddedChannels
from compressor.recovery.kernel_width import TRUSTED_WIDTH, at_trusted_width
from tests.families import SUPPORTED_VARIANTS, TinyCheckpoint, open_tiny, tiny_checkpoint, tiny_tokens
from tests.recovery.pairs import tiny_pair
from tests.recovery.students import loss_of
from tests.tiny_models import save_tiny


def loss_and_gradients(tiny: TinyCheckpoint) -> dict[str, Tensor]:
    tiny.model.zero_grad()
    loss = loss_of(tiny.model)
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in tiny.model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **gradients}


@pytest.mark.parametrize("name", SUPPORTED_VARIANTS)
def test_padding_changes_nothing(name: str, tmp_path: Path) -> None:
    tiny = tiny_checkpoint(name, tmp_path)
    expected = loss_and_gradients(tiny)
    width = tiny.mixers[0].head_k_dim
    scale = tiny.architecture.output_scale(width + 9, width)
    seen = []

    class Seeing(PaddedChannels):
        def on_query(self, layer: int, query: Tensor) -> Tensor:
            padded = super().on_query(layer, query)
            seen.append(padded.shape[-1])
            return padded

    with tiny.architecture.tapped(tiny.model, tiny.mixers, Seeing(width, width + 9, scale)):
        actual = loss_and_gradients(tiny)
    assert set(seen) == {width + 9}
    for key, value in expected.items():
        assert float((actual[key] - value).norm()) <= 1e-3 * float(value.norm()) + 1e-6, key


@pytest.mark.parametrize(
    ("device", "width", "padded"), [("cpu", 16, False), ("cuda", 16, True), ("cuda", TRUSTED_WIDTH, False)]
)
def test_only_narrow_recurrences_on_a_gpu_are_padded(device: str, width: int, padded: bool, tmp_path: Path) -> None:
    save_tiny("gated_deltanet", tmp_path, torch.float32, overrides={"head_dim": width})
    tiny = open_tiny(tmp_path)
    context = at_trusted_width(tiny.architecture, tiny.model, tiny.mixers, torch.device(device))
    assert isinstance(context, nullcontext) is not padded


@pytest.mark.gpu
@pytest.mark.parametrize("width", [16, 32, 48, 64, 96, 128])
@pytest.mark.parametrize("name", ["gated_deltanet", "gated_deltaproduct", "delta_net", "q35"])
def test_gradients_on_a_gpu_are_those_of_plain_torch(name: str, width: int, tmp_path: Path) -> None:
    """At every width that a cut may leave; kernels tuned into a wrong variant have given others."""
    overrides = {
        "gated_deltanet": {"hidden_size": 128, "head_dim": 128},
        "gated_deltaproduct": {"hidden_size": 128, "head_dim": 128},
        "delta_net": {"hidden_size": 128, "expand_k": 2.0, "expand_v": 2.0, "num_heads": 2},
        "q35": {"hidden_size": 128, "linear_key_head_dim": 128, "linear_value_head_dim": 128},
    }[name]
    folder = tiny_pair(name, tmp_path, width, overrides=overrides).compressed.folder
    assert_gradients_of_plain_torch(folder)


def assert_gradients_of_plain_torch(folder: Path) -> None:
    """Those of the GPU, within three times what products in bfloat16 do to plain torch; a wrong kernel's are 1 off."""
    cpu = torch.device("cpu")
    expected, rounded = (loss_of_long_text(open_tiny(folder), cpu, narrow) for narrow in (False, True))
    actual = loss_of_long_text(open_tiny(folder), torch.device("cuda"), True)
    for key, value in expected.items():
        if float(value.norm()) > 1e-6:
            error, rounding = (float((each[key] - value).norm() / value.norm()) for each in (actual, rounded))
            assert error < 0.1 + 3 * rounding, (key, error, rounding)


def loss_of_long_text(tiny: TinyCheckpoint, device: torch.device, narrow: bool) -> dict[str, Tensor]:
    """Loss and gradients over several chunks, on the CPU; `narrow`: with products in bfloat16."""
    model = tiny.model.to(device)
    ids = torch.stack([tiny_tokens(400, seed=seed) for seed in range(4)]).to(device)
    with (
        torch.autocast(device.type, dtype=torch.bfloat16, enabled=narrow),
        at_trusted_width(tiny.architecture, model, tiny.mixers, device),
    ):
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    gradients = {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach().cpu(), **gradients}
