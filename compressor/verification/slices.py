"""The files of a cut against the files of its original: every tensor is the slice that the selection says."""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path

import torch

from compressor.architectures.base import Architecture
from compressor.artifacts import Selection
from compressor.checkpoint.headers import TensorEntry, read_headers, read_tensor
from compressor.surgery import TensorCut, plan_cuts


def first_difference(
    architecture: Architecture, original: Path, folder: Path, selection: Selection, own: Set[str] = frozenset()
) -> str | None:
    """The first tensor of `folder` that is not, byte for byte, the kept slices of the original's; None if all are.

    Of those in `own` only shape and dtype are compared. One tensor of each is in memory at a time.
    """
    before, after = read_headers(original).entries, read_headers(folder).entries
    shapes = {name: entry.shape for name, entry in before.items()}
    mixers = architecture.mixers(architecture.load_config(original), list(before))
    cuts = plan_cuts(architecture, mixers, shapes, selection)
    for name in sorted(before.keys() | after.keys()):
        if name not in before or name not in after:
            return name
        if name in own and (before[name].dtype, before[name].shape) == (after[name].dtype, after[name].shape):
            continue
        if not _is_slice(before[name], after[name], cuts.get(name)):
            return name
    return None


def _is_slice(before: TensorEntry, after: TensorEntry, cut: TensorCut | None) -> bool:
    expected, actual = read_tensor(before), read_tensor(after)
    if cut is not None:
        expected = cut.apply(expected)
    if expected.shape != actual.shape or expected.dtype != actual.dtype:
        return False
    return torch.equal(expected.contiguous().view(torch.uint8), actual.contiguous().view(torch.uint8))
