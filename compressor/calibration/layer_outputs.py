"""What decoder layers give, on disk between one layer and the next: one file a batch."""

from __future__ import annotations

import io
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import Tensor

from compressor.errors import RunError

_EMBEDDINGS = "embeddings"


@dataclass(frozen=True, slots=True)
class LayerOutputs:
    """A folder of the outputs of the decoder layers, and of the embeddings, of every batch.

    An output is what the stock layer returns: a tensor [B, T, hidden size], or a tuple or list with tensors and None.
    It is read through the page cache, so that it takes no memory which the system could not take back.
    """

    folder: Path

    def save_embeddings(self, batch: int, embeddings: Tensor) -> None:
        """float [B, T, hidden size]: what the stock decoder begins with."""
        self._save(_EMBEDDINGS, batch, embeddings)

    def embeddings(self, batch: int) -> Tensor:
        """On the CPU. Raises RunError as `output`."""
        loaded: Tensor = self._load(_EMBEDDINGS, batch)
        return loaded

    def save_output(self, layer: int, batch: int, output: Any) -> None:
        """Keep what `layer` gave for `batch`.

        Raises:
            RunError: it holds something else than tensors and None.
        """
        _refuse_other_values(layer, output)
        self._save(_name(layer), batch, output)

    def output(self, layer: int, batch: int, device: torch.device) -> Any:
        """What `layer` gave for `batch`, on `device`.

        Raises:
            RunError: the file is gone or broken.
        """
        return send_to_device(self._load(_name(layer), batch), device)

    def has(self, layer: int, batches: int) -> bool:
        """Whether the outputs of `layer` and the embeddings of so many batches are there."""
        names = (_name(layer), _EMBEDDINGS)
        return all(self._path(name, batch).is_file() for name in names for batch in range(batches))

    def remove(self, layer: int) -> None:
        """What is not there is not missed."""
        shutil.rmtree(self.folder / _name(layer), ignore_errors=True)

    def clear(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def _save(self, name: str, batch: int, value: Any) -> None:
        path = self._path(name, batch)
        path.parent.mkdir(parents=True, exist_ok=True)
        content = io.BytesIO()
        torch.save(send_to_device(value, "cpu"), content)
        # Into a file, torch makes of a full disk a RuntimeError that does not say so.
        path.write_bytes(content.getbuffer())

    def _load(self, name: str, batch: int) -> Any:
        path = self._path(name, batch)
        try:
            return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        except (OSError, RuntimeError) as error:
            raise RunError(f"{path} cannot be read ({error}); run again without --resume.") from error

    def _path(self, name: str, batch: int) -> Path:
        return self.folder / name / f"{batch:06d}.pt"


def _name(layer: int) -> str:
    return f"layer-{layer:05d}"


def _refuse_other_values(layer: int, output: Any) -> None:
    if isinstance(output, tuple | list):
        for value in output:
            _refuse_other_values(layer, value)
    elif isinstance(output, Mapping) or not (output is None or isinstance(output, Tensor)):
        raise RunError(
            f"layer {layer} returns a {type(output).__name__}, which cannot be kept between layers; calibrate without "
            "--low-memory."
        )
