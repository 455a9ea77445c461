"""Stock models in memory: the right class, dtype and device, and nothing freshly initialised."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from logging import ERROR, getLogger
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedModel
from transformers.utils import logging

from compressor.architectures.base import Architecture
from compressor.checkpoint.validation import meta_model
from compressor.errors import RequestError, RunError
from compressor.naming import Naming, option_of

DeviceMap = Mapping[str, str] | str
"""Path of a module -> device, as accelerate takes it, or the name of a way to find that."""
_NORM_GIVES_THE_DTYPE = "fla.models.mamba2.modeling_mamba2"
"""With `residual_in_fp32` its blocks hand on what they compute in the dtype of their norm's weight (fla 0.6)."""
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_device(name: str, naming: Naming = option_of) -> torch.device:
    """`auto` is the first GPU where there is one. Messages call the setting as `naming` does.

    Raises:
        RequestError: a GPU is asked for that this machine does not show.
    """
    count = torch.cuda.device_count()
    if name == "auto":
        return torch.device("cuda" if count else "cpu")
    device = torch.device(name)
    # The index of the name: torch keeps eight bits of it, with a sign.
    index = int(name.partition(":")[2] or 0)
    if device.type == "cuda" and index >= count:
        given, remedy = (naming("runtime.device", value) for value in (name, "cpu"))
        raise RequestError(f"{given}: torch sees {count} GPUs on this machine; use {remedy} or another index.")
    return device


def resolve_dtype(
    name: str, device: torch.device, architecture: Architecture, naming: Naming = option_of
) -> torch.dtype:
    """`auto` is bfloat16 on a GPU and float32 on a CPU.

    Raises:
        RequestError: the family's GPU kernels do not take the dtype.
    """
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if name == "float32" and device.type == "cuda" and not architecture.kernels_take_float32:
        raise RequestError(
            f"{naming('runtime.dtype', name)}: fla's GPU kernels for {architecture.display_name} do not take it; use "
            "bfloat16."
        )
    return _DTYPES[name]


def build_skeleton(architecture: Architecture, folder: Path, raw_config: dict[str, Any]) -> PreTrainedModel:
    """The stock model on the meta device: names and shapes without weights."""
    architecture.import_stock_classes()
    if not torch.cuda.is_available():
        architecture.enable_cpu_backend()
    with _quiet_construction():
        return meta_model(architecture.load_config(folder), architecture.model_class(raw_config))


def load_model(
    architecture: Architecture,
    folder: Path,
    raw_config: dict[str, Any],
    dtype: torch.dtype,
    device: torch.device,
    device_map: DeviceMap | None = None,
    offload_folder: Path | None = None,
) -> PreTrainedModel:
    """The checkpoint through its stock class, in inference mode, on `device` or where `device_map` puts its modules.

    Weights have `dtype`, but for those that the stock class makes in float32 and can run in it, such as decays.
    What of a module that goes to "disk" cannot be read from the checkpoint as it is, is written to `offload_folder`.

    Raises:
        RunError: the stock loader left a tensor out, or would draw one at random.
    """
    architecture.import_stock_classes()
    if device.type == "cpu":
        architecture.enable_cpu_backend()
    with _quiet_construction():
        loaded: Any = architecture.model_class(raw_config).from_pretrained(
            folder,
            dtype=dtype,
            local_files_only=True,
            output_loading_info=True,
            device_map=device_map,
            offload_folder=offload_folder,
        )
    model, info = loaded
    for kind in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        if info[kind]:
            raise RunError(
                f"the stock loader reports {kind.replace('_', ' ')} in {folder}: {sorted(map(str, info[kind]))[:3]}"
            )
    _narrow_norms(architecture, model, dtype)
    placed: PreTrainedModel = (model.to(device) if device_map is None else model).eval()
    return placed


def _narrow_norms(architecture: Architecture, model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Give norms `dtype` where a float32 one, which the stock loader leaves so, would feed a narrower projection."""
    if type(model).__module__ == _NORM_GIVES_THE_DTYPE and model.config.residual_in_fp32:
        for norm in architecture.norms_sharing_epsilon(model).values():
            norm.to(dtype)


_STOCK_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    StopIteration,
    StrictDataclassError,
    TypeError,
    ValueError,
)
"""What configs with impossible values make the stock classes raise."""


@contextmanager
def refused_by_stock_classes(folder: Path | None) -> Iterator[None]:
    """Turn the stock classes' objections to the config in `folder`, None for that of a planned cut, into one sentence.

    Raises:
        RequestError: they cannot read the config or build a model from it.
    """
    try:
        yield
    except _STOCK_ERRORS as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        config, remedy = "the config of the cut", "choose another width"
        if folder is not None:
            config, remedy = str(folder / "config.json"), "use the config.json that belongs to these weights"
        raise RequestError(f"the stock classes make no model from {config} ({reason[:300]}); {remedy}.") from error


def release_memory(device: torch.device) -> None:
    """Give memory of models that are no longer referenced back, for the processes that verification starts."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


@contextmanager
def _quiet_construction() -> Iterator[None]:
    """Without transformers' bar, since stages have their own, and without fla's advice on models and kernels."""
    bar = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    mamba = getLogger("fla.layers.mamba2")
    level = mamba.level
    mamba.setLevel(ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="ShortConvolution is crucial", category=UserWarning)
            yield
    finally:
        mamba.setLevel(level)
        if bar:
            logging.enable_progress_bar()
