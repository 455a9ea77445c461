"""States as the stock caches hold them, against the delta rule written out in float64."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from compressor.architectures.recurrent_state import state_layout
from compressor.errors import RequestError
from compressor.probe.segments import Boundary, read_in_segments
from tests.families import SUPPORTED_VARIANTS, WITHOUT_SCALE, TinyCheckpoint, tiny_checkpoint, tiny_tokens

MODULES = {
    "delta_net": ("fla.layers.delta_net", "chunk_delta_rule", "fused_recurrent_delta_rule"),
    "gated_deltanet": (
        "fla.layers.gated_deltanet",
        "chunk_gated_delta_rule",
        "fused_recurrent_gated_delta_rule",
    ),
    "gated_deltaproduct": (
        "fla.layers.gated_deltaproduct",
        "chunk_gated_delta_product",
        "fused_recurrent_gated_delta_rule",
    ),
    "kda": ("fla.layers.kda", "chunk_kda", "fused_recurrent_kda"),
    "qwen3_5": (
        "transformers.models.qwen3_5.modeling_qwen3_5",
        "torch_chunk_gated_delta_rule",
        "torch_recurrent_gated_delta_rule",
    ),
}
for _family, _model_types in {
    "qwen3_5": ("qwen3_5_text",),
    "qwen3_5_moe": ("qwen3_5_moe", "qwen3_5_moe_text"),
    "qwen3_next": ("qwen3_next",),
    "olmo_hybrid": ("olmo_hybrid",),
}.items():
    for _model_type in _model_types:
        MODULES[_model_type] = (f"transformers.models.{_family}.modeling_{_family}", *MODULES["qwen3_5"][1:])


def log_decay(arguments: dict[str, Any]) -> Tensor | None:
    """Of one call, float64: [B, T, H_v], or of KDA one a channel, [B, T, H_v, d_k]; None without decay."""
    gate = arguments.get("g")
    if gate is None or not arguments.get("use_gate_in_kernel"):
        return None if gate is None else gate.double()
    rate = arguments["A_log"].detach().double().exp()
    raw = gate.double() + arguments["dt_bias"].detach().double().view(gate.shape[2:])
    rate = rate.unflatten(0, (-1, *(1,) * (gate.ndim - 3)))
    return -rate * F.softplus(raw)


def written_out(arguments: dict[str, Any], state: Tensor | None) -> Tensor:
    """S_t = S_{t-1} alpha (I - beta k k^T) + beta v k^T, value-first [B, H_v, d_v, d_k], token by token in float64."""
    key = arguments.get("k", arguments.get("key")).double()
    value = arguments.get("v", arguments.get("value")).double()
    step, gate = arguments["beta"].double(), log_decay(arguments)
    if arguments.get("use_beta_sigmoid_in_kernel"):
        step = step.sigmoid() * (2 if arguments.get("allow_neg_eigval") else 1)
    if arguments.get("use_qk_l2norm_in_kernel"):
        key = key / (key.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    heads = value.shape[2]
    key = key.repeat_interleave(heads // key.shape[2], dim=2)
    alpha = torch.ones_like(step)[..., None]
    if gate is not None:
        # DeltaProduct's chunked form has one decay for the several keys of a token, before the first of them.
        decay = gate.exp() if gate.ndim == 4 else gate.exp()[..., None]
        alpha = alpha.repeat(1, 1, 1, decay.shape[-1])
        alpha[:, :: key.shape[1] // gate.shape[1]] = decay
    if state is None:
        state = key.new_zeros(len(key), heads, value.shape[-1], key.shape[-1])
    identity = torch.eye(key.shape[-1], dtype=torch.float64)
    for t in range(key.shape[1]):
        k, v = key[:, t, :, :, None], value[:, t, :, :, None]
        b, a = step[:, t, :, None, None], alpha[:, t, :, None, :]
        state = (a * state) @ (identity - b * k @ k.mT) + b * v @ k.mT
    return state


def record_calls(tiny: TinyCheckpoint, patch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The arguments of every recurrence from now on, in the order of the calls."""
    calls: list[dict[str, Any]] = []
    module_name, *names = MODULES[tiny.raw_config["model_type"]]
    module = importlib.import_module(module_name)

    def recorder(original: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(*args: Any, **kwargs: Any) -> Any:
            calls.append(dict(zip(("query", "key", "value"), args, strict=False)) | kwargs)
            return original(*args, **kwargs)

        return recorded

    for name in names:
        patch.setattr(module, name, recorder(vars(module)[name]))
    return calls


@pytest.mark.parametrize("segment", [90, 40])
@pytest.mark.parametrize("name", [name for name in SUPPORTED_VARIANTS if name not in WITHOUT_SCALE])
def test_states_are_those_of_the_recurrence(
    name: str, segment: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After one segment through the chunked kernels, and after segments so short that layers run token by token."""
    tiny = tiny_checkpoint(name, tmp_path)
    layout = state_layout(tiny.raw_config["model_type"])
    calls = record_calls(tiny, monkeypatch)
    expected: list[Tensor | None] = [None] * len(tiny.mixers)
    boundaries = 0

    def compare(boundary: Boundary) -> None:
        nonlocal boundaries
        boundaries += 1
        for number, mixer in enumerate(tiny.mixers):
            state = layout.read(boundary.cache, mixer)
            expected[number] = written_out(calls[number], expected[number])
            assert tuple(state.shape) == (2, mixer.num_v_heads, mixer.head_v_dim, mixer.head_k_dim)
            torch.testing.assert_close(state.double(), expected[number], rtol=1e-4, atol=1e-5)
        calls.clear()

    read_in_segments(tiny.model, [tiny_tokens(2 * segment, seed) for seed in range(2)], segment, 4, compare)
    assert boundaries == 2


@pytest.mark.parametrize(
    "name", ["gated_deltanet_wide_values", "delta_net", "q35", "qw", "m2", "gated_deltaproduct_hybrid"]
)
def test_segments_read_what_one_pass_reads(name: str, tmp_path: Path) -> None:
    tiny = tiny_checkpoint(name, tmp_path)
    sequences = [tiny_tokens(length, length) for length in (200, 65, 64, 2, 129)]
    found = read_in_segments(tiny.model, sequences, 64, 4, lambda boundary: None)
    for sequence, figures in zip(sequences, found, strict=True):
        with torch.inference_mode():
            logits = tiny.model(input_ids=sequence[None], use_cache=False).logits[0, :-1].double()
        loss = F.cross_entropy(logits, sequence[1:], reduction="none")
        torch.testing.assert_close(figures.losses.double(), loss, rtol=1e-4, atol=1e-4)
        assert torch.equal(figures.correct, logits.argmax(-1) == sequence[1:])


@pytest.mark.parametrize("name", ["gated_deltanet_grouped", "gated_deltaproduct", "delta_net", "q35", "qn"])
def test_a_state_that_is_written_is_gone_on_from(name: str, tmp_path: Path) -> None:
    """Every state zeroed after 64 tokens, and conv and softmax caches left: the second half is read as if new."""
    tiny = tiny_checkpoint(name, tmp_path)
    layout = state_layout(tiny.raw_config["model_type"])
    seen: list[Tensor] = []

    def zero(boundary: Boundary) -> None:
        for mixer in tiny.mixers:
            state = layout.read(boundary.cache, mixer)
            seen.append(state.clone())
            layout.write(boundary.cache, mixer, torch.zeros_like(state))

    whole = read_in_segments(tiny.model, [tiny_tokens(192)], 64, 1, lambda boundary: None)[0]
    cut = read_in_segments(tiny.model, [tiny_tokens(192)], 64, 1, zero)[0]
    assert torch.equal(whole.losses[:64], cut.losses[:64])
    assert not torch.allclose(whole.losses[64:], cut.losses[64:], atol=1e-3)
    first, second = seen[0], seen[len(tiny.mixers)]
    assert not torch.allclose(first, second)
    layer = tiny.mixers[0]
    assert first.shape[1:] == (layer.num_v_heads, layer.head_v_dim, layer.head_k_dim)


def test_an_unknown_family_is_refused() -> None:
    with pytest.raises(RequestError, match="states of a rwkv7 model cannot be read .*known: bamba, delta_net"):
        state_layout("rwkv7")
