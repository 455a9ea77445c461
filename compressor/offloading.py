"""The checkpoint through its stock class without its weights in memory: they stay in the files until asked for."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate.hooks import remove_hook_from_submodules
from accelerate.utils import OffloadedWeightsLoader
from torch import nn
from transformers import PreTrainedModel

from compressor.calibration.offloaded import OffloadedModel, layer_stack
from compressor.checkpoint.headers import TensorIndex
from compressor.checkpoint.validation import compare_with_skeleton
from compressor.loading import build_skeleton, load_model
from compressor.preparation import Source


def load_offloaded(source: Source, dtype: torch.dtype, device: torch.device, folder: Path) -> OffloadedModel:
    """The stock model with embeddings, decoder layers and head left in the checkpoint's files.

    What the stock loader makes of several tensors of the files, such as experts that it stacks, it writes to
    `folder`, which is emptied first.

    Raises:
        RunError: the stock loader left a tensor out, or would draw one at random.
    """
    shutil.rmtree(folder, ignore_errors=True)
    architecture, raw_config = source.architecture, source.checkpoint.raw_config
    skeleton = build_skeleton(architecture, source.folder, raw_config)
    decoder = architecture.decoder(skeleton)
    left_out = {layer_stack(skeleton, source.mixers), _path_of(skeleton, skeleton.get_input_embeddings())}
    devices: dict[str, str] = {}
    _place(skeleton, "", _path_of(skeleton, decoder), left_out, str(device), devices)
    with _without_warning_of_offloading():
        model = load_model(architecture, source.folder, raw_config, dtype, device, devices, folder)
    # The loader's own hooks read each module's weights anew in every pass, and miss those that stock layers read
    # without calling the module.
    remove_hook_from_submodules(model)
    weights = OffloadedWeightsLoader(index=_weight_places(source.checkpoint.index, skeleton, model, folder))
    return OffloadedModel(model, weights, device)


def _place(
    module: nn.Module, path: str, decoder: str, left_out: set[str], device: str, devices: dict[str, str]
) -> None:
    """Add to `devices` where each module is to be: on the device what is in the decoder and not in `left_out`."""
    if not path or f"{decoder}.".startswith(f"{path}."):
        for name, child in module.named_children():
            _place(child, f"{path}.{name}" if path else name, decoder, left_out, device, devices)
    else:
        devices[path] = device if path.startswith(f"{decoder}.") and path not in left_out else "disk"


def _weight_places(
    index: TensorIndex, skeleton: PreTrainedModel, model: PreTrainedModel, folder: Path
) -> dict[str, dict[str, Any]]:
    """Parameter of the model -> the file, the name in it, and the dtype to read it in.

    Tied embeddings, and blocks that layers share, as in Zamba2, have several names, of which the files hold any one.
    """
    names: Mapping[str, str] = {target: name for name, target in compare_with_skeleton(index, skeleton).items()}
    parameters = list(model.named_parameters(remove_duplicate=False))
    stored: dict[int, tuple[Path, str]] = {}
    for name, value in parameters:
        written = folder / f"{name}.safetensors"
        if written.exists():
            stored[id(value)] = (written, name)
        elif name in names:
            stored.setdefault(id(value), (index.entries[names[name]].file, names[name]))
    places: dict[str, dict[str, Any]] = {}
    for name, value in parameters:
        if id(value) in stored:
            file, weight_name = stored[id(value)]
            dtype = str(value.dtype).removeprefix("torch.")
            places[name] = {"safetensors_file": str(file), "weight_name": weight_name, "dtype": dtype}
    return places


def _path_of(model: nn.Module, wanted: nn.Module) -> str:
    return next(path for path, module in model.named_modules() if module is wanted)


@contextmanager
def _without_warning_of_offloading() -> Iterator[None]:
    """accelerate warns that parameters are on the meta device, which is what was asked for."""
    logger = logging.getLogger("accelerate.big_modeling")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
