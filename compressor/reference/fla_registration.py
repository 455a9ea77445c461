"""Where the reference enters fla. Imports fla: reach it through `compressor.reference.backend`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fla.layers.attn
import fla.layers.delta_net
import fla.layers.gated_deltanet
import fla.layers.gated_deltaproduct
import fla.layers.kda
from fla.backends import BaseBackend, register
from fla.modules.activations import ops as activations
from fla.modules.causal_conv1d import ops as convolution
from fla.modules.norm import fused_norm_gate, layernorm
from fla.modules.rotary import ops as rotary
from fla.ops import kda
from torch import Tensor

from compressor.errors import RunError
from compressor.reference import fla_modules, fla_recurrences
from compressor.reference.attention import attention
from compressor.reference.dispatch import DeviceSwitch, on_cpu, switch_global


class ReferenceBackend(BaseBackend):  # type: ignore[misc]
    """Takes the dispatched entry points of fla before any kernel does, if all tensors are on the CPU."""

    backend_type = "plain_torch_cpu"
    priority = -1

    # Entry points that fla dispatches by the name of an operation are looked up here.
    chunk_gated_delta_rule = staticmethod(fla_recurrences.chunk_gated_delta_rule)
    fused_attnres = staticmethod(fla_modules.fused_attnres)


_KERNELS = {
    layernorm: ("layer_norm_fwd", "layer_norm_bwd"),
    fused_norm_gate: ("layer_norm_gated_fwd", "layer_norm_gated_bwd"),
    convolution: (
        "causal_conv1d_fwd",
        "causal_conv1d_bwd",
        "causal_conv1d_update",
        "causal_conv1d_update_states",
    ),
    activations: ("swiglu_fwd", "swiglu_fwdbwd", "swiglu_linear", "powglu_fwd", "powglu_fwdbwd", "powglu_linear"),
    rotary: ("rotary_embedding_fwdbwd",),
}

_UNDISPATCHED_RECURRENCES = {
    fla.layers.gated_deltanet: ("fused_recurrent_gated_delta_rule",),
    fla.layers.gated_deltaproduct: ("chunk_gated_delta_product", "fused_recurrent_gated_delta_rule"),
    fla.layers.delta_net: ("chunk_delta_rule", "fused_recurrent_delta_rule"),
    fla.layers.kda: ("fused_recurrent_kda",),
}


def register_kernels() -> None:
    """Register the reference for the entry points that fla dispatches."""
    for operation in ("gated_delta_rule", "attnres"):
        register(operation, verifier=on_cpu)(ReferenceBackend)
    for module, names in _KERNELS.items():
        for name in names:
            register(vars(module)[name], backend=ReferenceBackend, verifier=on_cpu)(vars(fla_modules)[name])
    register(kda.chunk_kda, backend=ReferenceBackend, verifier=on_cpu)(fla_recurrences.chunk_kda)


def switch_recurrences() -> None:
    """Replace the recurrences that fla does not dispatch, where its layers look them up."""
    for module, names in _UNDISPATCHED_RECURRENCES.items():
        for name in names:
            switch_global(module, name, vars(fla_recurrences)[name])


def switch_attention() -> None:
    """Give fla's softmax layer attention on CPU tensors; without flash-attn it would refuse to be built."""
    module = vars(fla.layers.attn)
    references: dict[str, Callable[..., Tensor]] = {
        "flash_attn_func": attention,
        "flash_attn_varlen_func": fla_modules.flash_attn_varlen_func,
    }
    for name, reference in references.items():
        current = module.get(name)
        if not isinstance(current, DeviceSwitch):
            kernel = _missing_flash_attention if current is None else current
            module[name] = DeviceSwitch(reference, kernel)


def _missing_flash_attention(q: Tensor, *_: Any, **__: Any) -> Tensor:
    raise RunError(
        f"a softmax layer was called with tensors on {q.device}, which needs flash-attn, and flash-attn is not "
        "installed: install it with `pip install flash-attn --no-build-isolation`, or run on the CPU."
    )
