"""The files of the cut checkpoint: weights streamed shard by shard, config, companions, selection."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from compressor.artifacts import Selection, write_json
from compressor.checkpoint.config_file import dump_config
from compressor.checkpoint.headers import TensorEntry, read_tensor
from compressor.errors import RunError
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
        RunError: no space left, a source file cannot be read, or a tensor of one that is not linked is not finite.
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
        _refuse_broken(entry, tensor)
        return tensor if cut is None else cut.apply(tensor)

    shape = entry.shape if cut is None else cut.shape(entry.shape)
    return OutputTensor(entry.name, entry.torch_dtype, shape, load)


def _refuse_broken(entry: TensorEntry, tensor: Tensor) -> None:
    """Calibration sees what enters the recurrences, and nothing of a broken weight behind the last of them."""
    if not tensor.is_floating_point() or not tensor.numel():
        return
    # Both are NaN where one number is; `isfinite` would take copies, and twenty times as long.
    extremes = torch.stack(tensor.aminmax())
    # A rate or a bias may be infinite: a decay of exp(-inf) is none.
    is_vector = max(tensor.shape, default=1) == tensor.numel()
    if bool(extremes.isnan().any()) or (not is_vector and bool(extremes.isinf().any())):
        raise RunError(
            f"{entry.name} in {entry.file} holds numbers that are NaN or infinite where a model's weights are finite; "
            "download the file again, or repair the model."
        )
