"""Make stock linear-attention models run on a CPU, whatever kernels are importable.

With triton importable and no GPU, fla's kernels die with "0 active drivers", and so do those of
transformers' models, which call fla when they can. After a call of the function for the family at
hand, tensors on a CPU are computed in plain torch; all others go to the kernels as before, so that
both kinds of model can be used in one process. Calling a function again changes nothing.

fla is imported only when it is asked for: it takes seconds.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import warnings

from compressor.errors import RequestError
from compressor.reference import qwen3_5
from compressor.reference.dispatch import switch_global

_DISABLING_VARIABLE = "FLA_DISABLE_BACKEND_DISPATCH"


def import_fla() -> None:
    """Import fla without its warning that it falls back to the CPU: with this backend that is as it should be."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Triton is not supported on current platform", UserWarning)
        importlib.import_module("fla")


def enable_for_fla() -> None:
    """Let fla's GatedDeltaNet, GatedDeltaProduct, DeltaNet and KDA models run on CPU tensors, hybrids included.

    Softmax layers can be built without flash-attn afterwards; on a GPU they then raise RunError.

    Raises:
        RequestError: fla's backend dispatch is switched off by its environment variable.
    """
    if os.environ.get(_DISABLING_VARIABLE) == "1":
        raise RequestError(
            f"{_DISABLING_VARIABLE} is 1, which keeps fla from running on a CPU: unset the variable and start again."
        )
    import_fla()
    registration = importlib.import_module("compressor.reference.fla_registration")
    registration.register_kernels()
    registration.switch_recurrences()
    registration.switch_attention()


def enable_for_transformers(modeling: str) -> None:
    """Let the gated-delta-rule models of one modelling module of transformers run on CPU tensors.

    That they do with fla and causal-conv1d importable or not. `modeling` is the path of a module that has the four
    functions of Qwen3.5's: Qwen3.5 with and without experts, Qwen3-Next and Olmo-Hybrid.
    """
    if importlib.util.find_spec("fla") is not None:
        import_fla()
    module = importlib.import_module(modeling)
    switch_global(module, "torch_chunk_gated_delta_rule", qwen3_5.torch_chunk_gated_delta_rule)
    switch_global(module, "torch_recurrent_gated_delta_rule", qwen3_5.torch_recurrent_gated_delta_rule)
    for name in ("causal_conv1d_fn", "causal_conv1d_update"):
        # transformers wraps its own plain-torch function, and freezes the choice at import.
        switch_global(module, name, inspect.unwrap(vars(module)[name]))
