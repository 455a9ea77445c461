"""The decay that a mixer applies to its state at every token, from the projection that gives it.

    log alpha_t = -exp(A) softplus(a_t + b),    one a value head

with A and b parameters of the mixer (Gu and Dao 2023, arXiv:2312.00752; Yang et al. 2024, arXiv:2412.06464, section 3).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from compressor.architectures.base import Mixer

OnLogDecay = Callable[[int, Tensor], None]
"""Gets the layer and log alpha, float32 [B, T, H_v], before the mixer's recurrence runs."""

_GATE_PROJECTIONS: Mapping[str, str] = {
    "gated_deltanet": "a_proj",
    "qwen3_5": "in_proj_a",
    "qwen3_5_text": "in_proj_a",
}


def has_decay(model_type: str) -> bool:
    """Whether the family's states forget by themselves."""
    return model_type in _GATE_PROJECTIONS


@contextmanager
def decays_seen(model: nn.Module, mixers: Sequence[Mixer], model_type: str, on_log_decay: OnLogDecay) -> Iterator[None]:
    """While active, every forward pass of `model` reports its decays; a family without decay reports none."""
    with ExitStack() as stack:
        if has_decay(model_type):
            for mixer in mixers:
                gate = model.get_submodule(f"{mixer.module}.{_GATE_PROJECTIONS[model_type]}")
                hook = _report(mixer.layer, model.get_submodule(mixer.module), on_log_decay)
                stack.callback(gate.register_forward_hook(hook).remove)
        yield


def _report(
    layer: int, mixer: nn.Module, on_log_decay: OnLogDecay
) -> Callable[[nn.Module, tuple[Any, ...], Tensor], None]:
    rate, bias = mixer.get_parameter("A_log"), mixer.get_parameter("dt_bias")

    def hook(module: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> None:
        on_log_decay(layer, -rate.float().exp() * F.softplus(output.float() + bias.float()))

    return hook
