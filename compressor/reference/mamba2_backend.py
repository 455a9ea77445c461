"""Make Mamba-2 models run on a CPU, as transformers and as fla lay them out, whatever kernels are importable."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from compressor.errors import RunError
from compressor.reference import fla_mamba2
from compressor.reference.backend import enable_for_fla
from compressor.reference.dispatch import DeviceSwitch, switch_global

_TRANSFORMERS_FUNCTIONS = (
    "causal_conv1d_fn",
    "causal_conv1d_update",
    "mamba2_split_conv1d_scan_combined",
    "mamba2_selective_state_update",
    "mamba2_chunk_scan",
)
FLA_LAYER_MODULE = "fla.layers.mamba2"
_FLA_FUNCTIONS = ("mamba_chunk_scan_combined", "selective_state_update")


def enable_for_mamba2(modeling: str) -> None:
    """Let transformers' Mamba-2 models run on CPU tensors with its own plain torch, mamba_ssm importable or not.

    `modeling` is the path of the module of their stock classes: that of Mamba-2, or of a hybrid with softmax layers,
    of which each has functions of its own.
    """
    module = importlib.import_module(modeling)
    for name in _TRANSFORMERS_FUNCTIONS:
        # transformers wraps its own plain-torch function, and freezes the choice at import.
        switch_global(module, name, inspect.unwrap(vars(module)[name]))


def enable_for_fla_mamba2() -> None:
    """Let fla's Mamba-2 models run on CPU tensors, along the path that they take on a GPU.

    Raises:
        RequestError: fla's backend dispatch is switched off by its environment variable.
    """
    enable_for_fla()
    layers = importlib.import_module(FLA_LAYER_MODULE)
    for name in _FLA_FUNCTIONS:
        if vars(layers)[name] is None:
            setattr(layers, name, _missing_mamba_ssm)
        switch_global(layers, name, vars(fla_mamba2)[name])
    switch_global(importlib.import_module("fla.modules.norm.layernorm_gated"), "rmsnorm_fn", fla_mamba2.rmsnorm_fn)
    stock = vars(layers.Mamba2)["torch_forward"]
    if not isinstance(stock, MethodSwitch):
        layers.Mamba2.torch_forward = MethodSwitch(fla_mamba2.torch_forward, stock)


@dataclass(frozen=True)
class MethodSwitch(DeviceSwitch):
    """A `DeviceSwitch` that stands in a class in place of a method."""

    def __get__(self, instance: object, owner: type) -> Callable[..., Any]:
        return partial(self, instance)


def _missing_mamba_ssm(*_: Any, **__: Any) -> Any:
    raise RunError(
        "fla's Mamba-2 was called with tensors on a GPU, which needs mamba_ssm, and mamba_ssm is not installed: "
        "install it with `pip install mamba-ssm --no-build-isolation`, or run on the CPU."
    )
