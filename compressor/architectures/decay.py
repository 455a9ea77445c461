"""The decay that a mixer applies to its state at every token, from the projection that gives it.

    log alpha_t = -exp(A) softplus(a_t + b),    one a value head

with A and b parameters of the mixer (Gu and Dao 2023, arXiv:2312.00752; Yang et al. 2024, arXiv:2412.06464, section 3).
Kimi delta attention has one a key channel of each value head, by the same formula or, with a lower bound c, by
c sigmoid(exp(A) (a_t + b)); a head's log alpha is then the mean over its channels.

In Mamba-2 and its hybrids softplus(a_t + b) is the step size of the token (Dao and Gu 2024, arXiv:2405.21060), which
the stock classes hold between two limits in passes over several tokens, and not in single steps behind a cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from compressor.architectures.base import Mixer
from compressor.architectures.family import FLA_MAMBA2

OnLogDecay = Callable[[int, Tensor], None]
"""Gets the layer and log alpha, float32 [B, T, H_v], before the mixer's recurrence runs."""

_GATE_PROJECTIONS: Mapping[str, str] = {
    "bamba": "in_proj",
    "falcon_h1": "in_proj",
    "gated_deltanet": "a_proj",
    "gated_deltaproduct": "a_proj",
    "granitemoehybrid": "in_proj",
    "kda": "f_proj",
    "mamba2": "in_proj",
    FLA_MAMBA2: "in_proj",
    "nemotron_h": "in_proj",
    "olmo_hybrid": "a_proj",
    "qwen3_5": "in_proj_a",
    "qwen3_5_moe": "in_proj_a",
    "qwen3_5_moe_text": "in_proj_a",
    "qwen3_5_text": "in_proj_a",
    "qwen3_next": "in_proj_ba",
    "zamba2": "in_proj",
}
_STEPS_AND_DECAYS = frozenset({"in_proj_ba"})
"""Projections that give, one key head after the other, the steps of its value heads and then their decays."""
_OF_CHANNELS = frozenset({"f_proj"})
"""Projections that give a decay of every key channel, one value head after the other."""
_WITH_STEPS = frozenset({"in_proj"})
"""Projections that give, behind all else, the step sizes of the value heads: those of Mamba-2."""
_ROW_FACTORS: Mapping[str, str] = {"falcon_h1": "mup_vector"}
"""Buffers of the mixer by which a family multiplies what its projection gives, row by row."""


def has_decay(model_type: str) -> bool:
    """Whether the family's states forget by themselves; Gated DeltaProduct's do where its config asks for it."""
    return model_type in _GATE_PROJECTIONS


def decays_channels(model_type: str) -> bool:
    """Whether every key channel has a decay of its own, so that a state cannot be written in other directions."""
    return _GATE_PROJECTIONS.get(model_type) in _OF_CHANNELS


@contextmanager
def decays_seen(model: nn.Module, mixers: Sequence[Mixer], model_type: str, on_log_decay: OnLogDecay) -> Iterator[None]:
    """While active, every forward pass of `model` reports its decays; a mixer without a gate reports none."""
    with ExitStack() as stack:
        if has_decay(model_type):
            for mixer in mixers:
                module = model.get_submodule(mixer.module)
                gate = dict(module.named_children()).get(_GATE_PROJECTIONS[model_type])
                if gate is not None:
                    log_decay = _log_decay_of(model_type, mixer, module)
                    stack.callback(gate.register_forward_hook(_report(mixer.layer, log_decay, on_log_decay)).remove)
        yield


def _report(
    layer: int, log_decay: Callable[[Tensor], Tensor], on_log_decay: OnLogDecay
) -> Callable[[nn.Module, tuple[Any, ...], Tensor], None]:
    def hook(module: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> None:
        on_log_decay(layer, log_decay(output.float()))

    return hook


def _log_decay_of(model_type: str, mixer: Mixer, stock: nn.Module) -> Callable[[Tensor], Tensor]:
    """From what the gate's projection gives, float32 [B, T, rows], to log alpha [B, T, H_v]."""
    gate = _GATE_PROJECTIONS[model_type]
    if gate in _WITH_STEPS:
        return _of_steps(model_type, mixer, stock)
    rate, bias = stock.get_parameter("A_log"), stock.get_parameter("dt_bias")

    def one_a_head(output: Tensor) -> Tensor:
        if gate in _STEPS_AND_DECAYS:
            output = output.unflatten(-1, (mixer.num_k_heads, 2, -1))[..., 1, :].flatten(-2)
        return -rate.float().exp() * F.softplus(output + bias.float())

    def one_a_channel(output: Tensor) -> Tensor:
        raw = (output + bias.float()).unflatten(-1, (mixer.num_v_heads, -1))
        factor, bound = rate.float().exp()[:, None], vars(stock)["lower_bound"]
        decays = -factor * F.softplus(raw) if bound is None else bound * torch.sigmoid(factor * raw)
        return decays.mean(-1)

    return one_a_channel if gate in _OF_CHANNELS else one_a_head


def _of_steps(model_type: str, mixer: Mixer, stock: nn.Module) -> Callable[[Tensor], Tensor]:
    """As `_log_decay_of`, of Mamba-2. A pass over one token is taken for a step behind a cache."""
    rate, bias = stock.get_parameter("A_log"), stock.get_parameter("dt_bias")
    least, most = vars(stock)["dt_limit" if model_type == FLA_MAMBA2 else "time_step_limit"]
    factors = stock.get_buffer(_ROW_FACTORS[model_type]) if model_type in _ROW_FACTORS else None

    def of_steps(output: Tensor) -> Tensor:
        rows = output if factors is None else output * factors.float()
        steps = F.softplus(rows[..., -mixer.num_v_heads :] + bias.float())
        if output.shape[1] > 1:
            steps = steps.clamp(least, most)
        return -rate.float().exp() * steps

    return of_steps
