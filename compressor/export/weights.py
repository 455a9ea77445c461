"""The weight files: tensors in shards, one shard in memory at a time."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from compressor.errors import RunError
from compressor.export.disk import translate_write_errors
from compressor.export.files import new_file_mode, sync_file, sync_folder

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# Loaders of transformers refuse a file without it.
FILE_METADATA = {"format": "pt"}


@dataclass(frozen=True)
class OutputTensor:
    """A tensor of the output: what it will be, and how to get it. `load` is called once, when its shard is written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    load: Callable[[], Tensor]

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.dtype.itemsize


@dataclass(frozen=True)
class ReadyFile:
    """A safetensors file that exists: its tensors, whose `load` is not called, and how to put it at a path."""

    tensors: tuple[OutputTensor, ...]
    place: Callable[[Path], None]


@dataclass(frozen=True)
class WeightFiles:
    """What `write_weights` wrote: file names, and the sums over all tensors. `index` is None for a single file."""

    files: tuple[str, ...]
    index: str | None
    total_size: int
    total_parameters: int


def plan_shards(tensors: Sequence[OutputTensor], max_shard_bytes: int) -> tuple[tuple[OutputTensor, ...], ...]:
    """Cut `tensors`, in their order, into shards of at most `max_shard_bytes`; a larger tensor gets a shard alone."""
    shards: list[list[OutputTensor]] = []
    filled = 0
    for tensor in tensors:
        if not shards or filled + tensor.num_bytes > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += tensor.num_bytes
    return tuple(tuple(shard) for shard in shards)


def write_weights(
    tensors: Sequence[OutputTensor],
    folder: Path,
    max_shard_bytes: int,
    advance: Callable[[int], None] | None,
    ready: Sequence[ReadyFile] = (),
) -> WeightFiles:
    """Write `tensors` into `folder` as safetensors, with an index when there are several files.

    At most one shard of tensors is in memory. `advance` gets the bytes of each tensor as it is loaded. Files that are
    `ready` come first.

    Raises:
        RunError: no tensors, a name twice, a tensor that is not what was promised, no space left.
    """
    everything = [*(tensor for file in ready for tensor in file.tensors), *tensors]
    _refuse_bad_names(everything)
    shards = (*(file.tensors for file in ready), *plan_shards(tensors, max_shard_bytes))
    names = _file_names(len(shards))
    total_size = sum(tensor.num_bytes for tensor in everything)
    total_parameters = sum(tensor.num_elements for tensor in everything)
    with translate_write_errors(folder, total_size):
        for name, file in zip(names, ready, strict=False):
            file.place(folder / name)
            if advance is not None:
                advance(sum(tensor.num_bytes for tensor in file.tensors))
        for name, shard in list(zip(names, shards, strict=True))[len(ready) :]:
            _write_shard(shard, folder / name, advance)
        if len(shards) > 1:
            weight_map = {t.name: name for name, shard in zip(names, shards, strict=True) for t in shard}
            metadata = {"total_parameters": total_parameters, "total_size": total_size}
            _write_index(folder / INDEX_FILE, {"metadata": metadata, "weight_map": weight_map})
        sync_folder(folder)
    return WeightFiles(names, INDEX_FILE if len(shards) > 1 else None, total_size, total_parameters)


def _file_names(count: int) -> tuple[str, ...]:
    if count == 1:
        return (SINGLE_FILE,)
    return tuple(f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1))


def _write_shard(shard: Sequence[OutputTensor], path: Path, advance: Callable[[int], None] | None) -> None:
    tensors: dict[str, Tensor] = {}
    storages: set[int] = set()
    for promise in shard:
        tensor = _packed(_loaded(promise), storages)
        storages.add(tensor.untyped_storage().data_ptr())
        tensors[promise.name] = tensor
        if advance is not None:
            advance(promise.num_bytes)
    save_file(tensors, path, metadata=FILE_METADATA)
    path.chmod(new_file_mode(path.parent))
    sync_file(path)


def _loaded(promise: OutputTensor) -> Tensor:
    tensor = promise.load()
    if tensor.dtype != promise.dtype or tuple(tensor.shape) != promise.shape:
        raise RunError(
            f"tensor {promise.name} is {tensor.dtype} of shape {tuple(tensor.shape)} where {promise.dtype} of shape "
            f"{promise.shape} was planned; the checkpoint changed during the run: run again from the start."
        )
    return tensor


def _packed(tensor: Tensor, storages: set[int]) -> Tensor:
    """On the CPU, contiguous, alone in its memory: safetensors refuses sharing, and a view keeps all of it alive."""
    tensor = tensor.detach().to("cpu").contiguous()
    storage = tensor.untyped_storage()
    if storage.nbytes() > tensor.nbytes or storage.data_ptr() in storages:
        return tensor.clone()
    return tensor


def _write_index(path: Path, index: dict[str, object]) -> None:
    path.write_text(json.dumps(index, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    sync_file(path)


def _refuse_bad_names(tensors: Sequence[OutputTensor]) -> None:
    if not tensors:
        raise RunError("there is no tensor to write; a checkpoint needs at least 1: check the source folder.")
    seen: set[str] = set()
    for tensor in tensors:
        if tensor.name in seen:
            raise RunError(
                f"tensor {tensor.name} was planned twice where each name is written once; report this as a bug."
            )
        seen.add(tensor.name)
