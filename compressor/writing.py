"""The files of the cut checkpoint: weights streamed shard by shard, config, companions, selection."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from torch import Tensor

from compressor.artifacts import Selection, write_json
from compressor.checkpoint.config_file import dump_config
from compressor.checkpoint.headers import TensorEntry, read_tensor
from compressor.export.companions import copy_companions
from compressor.export.linking import link_file, unchanged_files
from compressor.export.weights import OutputTensor, ReadyFile, write_weights
from compressor.preparation import CutPlan, Source
from compressor.surgery import TensorCut, plan_cuts


def write_checkpoint(
    folder: Path,
    source: Source,
    plan: CutPlan,
    selection: Selection,
    max_shard_bytes: int,
    advance: Callable[[int], None],
    link: bool = False,
) -> None:
    """Write everything that a stock loader reads into `folder`, and selection.json.

    Tensors come from the source's files one at a time and keep their dtype; uncut ones keep their
    bytes. With `link`, files of the source without a cut tensor are hard-linked. `advance` gets the bytes just written.

    Raises:
        RunError: no space left, or a source file cannot be read.
    """
    cuts = plan_cuts(source.architecture, source.mixers, source.shapes, selection)
    index = source.checkpoint.index
    tensors = [_output_tensor(entry, cuts.get(name)) for name, entry in index.entries.items()]
    linked = unchanged_files(index, cuts) if link else ()
    ready = [_ready_file(file, [each for each in tensors if index.entries[each.name].file == file]) for file in linked]
    written = [each for each in tensors if index.entries[each.name].file not in linked]
    write_weights(written, folder, max_shard_bytes, advance, ready)
    (folder / "config.json").write_text(dump_config(dict(plan.cut_config)), encoding="utf-8")
    copy_companions(source.folder, folder)
    write_json(folder / "selection.json", selection.to_json())


def _ready_file(file: Path, tensors: Sequence[OutputTensor]) -> ReadyFile:
    return ReadyFile(tuple(tensors), lambda target: link_file(file, target))


def _output_tensor(entry: TensorEntry, cut: TensorCut | None) -> OutputTensor:
    def load() -> Tensor:
        tensor = read_tensor(entry)
        return tensor if cut is None else cut.apply(tensor)

    shape = entry.shape if cut is None else cut.shape(entry.shape)
    return OutputTensor(entry.name, entry.torch_dtype, shape, load)
