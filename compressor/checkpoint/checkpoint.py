"""A folder opened: config and headers read, and everything checked that needs no model class."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compressor.checkpoint.config_file import CONFIG_FILE, read_config
from compressor.checkpoint.headers import TensorIndex, read_headers
from compressor.checkpoint.source import ADAPTER_FILE, ModelFolder
from compressor.checkpoint.validation import refuse_broken_tie, refuse_quantized, refuse_quantized_config
from compressor.errors import RequestError


@dataclass(frozen=True)
class Checkpoint:
    """A folder whose files are in order; `notes` are to be told to the user."""

    folder: ModelFolder
    raw_config: dict[str, Any]
    model_type: str
    index: TensorIndex
    notes: tuple[str, ...]


def open_checkpoint(folder: ModelFolder) -> Checkpoint:
    """Read config.json and the weight headers of a complete folder; no tensor is loaded.

    Names and shapes are held against the model by `validation.compare_with_skeleton`.

    Raises:
        RequestError: a file is missing or broken, or the checkpoint is quantised, adapted or lacks its head.
    """
    raw_config = open_config(folder)
    index = read_headers(folder.path)
    refuse_quantized(raw_config, index)
    refuse_broken_tie(raw_config, index)
    return Checkpoint(folder, raw_config, raw_config["model_type"], index, index.notes)


def open_config(folder: ModelFolder) -> dict[str, Any]:
    """The raw config, and the checks that need no weights: for a Hub model before they are fetched.

    Raises:
        RequestError: no usable config.json, a quantised checkpoint, an adapter, or weights under another name.
    """
    raw_config = read_config(folder.path / CONFIG_FILE)
    refuse_quantized_config(raw_config)
    _refuse_adapter(folder.path)
    _refuse_weights_elsewhere(raw_config)
    return raw_config


def _refuse_adapter(path: Path) -> None:
    if (path / ADAPTER_FILE).exists():
        raise RequestError(
            f"{path} holds a LoRA adapter ({ADAPTER_FILE}) that stock transformers would apply; "
            "merge it first or move it away."
        )


def _refuse_weights_elsewhere(raw_config: dict[str, Any]) -> None:
    named = raw_config.get("transformers_weights")
    if named is not None:
        raise RequestError(
            f"config.json names its weight file in transformers_weights ({named!r}); "
            "rename the file to model.safetensors and delete the field."
        )
