"""The files of a cut against the files of its original: every tensor is the slice that the selection says."""

from __future__ import annotations

from collections.abc import Sequence, Set
from pathlib import Path

import torch

from compressor.architectures.base import Architecture, Mixer
from compressor.artifacts import Selection
from compressor.checkpoint.config_file import read_json_object
from compressor.checkpoint.headers import TensorEntry, read_headers, read_tensor
from compressor.errors import RequestError
from compressor.surgery import TensorCut, plan_cuts


def read_selection(folder: Path, mixers: Sequence[Mixer]) -> Selection:
    """The kept channels that selection.json names; `mixers` are those of `folder`.

    Raises:
        RequestError: it does not name, for every mixer, as many ascending channels of every head as the config keeps.
    """
    content = read_json_object(folder / "selection.json")
    try:
        selection = Selection.from_json(content)
        fits = selection.kept.keys() == {mixer.layer for mixer in mixers} and all(
            selection.kept[mixer.layer].shape == (mixer.num_k_heads, mixer.head_k_dim)
            and bool((selection.kept[mixer.layer].diff(dim=1) > 0).all())
            and int(selection.kept[mixer.layer].min()) >= 0
            and int(selection.kept[mixer.layer].max()) < selection.head_k_dim
            for mixer in mixers
        )
    except (AttributeError, KeyError, TypeError, ValueError):
        fits = False
    if not fits:
        raise RequestError(
            f"{folder / 'selection.json'} does not name the kept channels of every layer and head that config.json "
            "has; restore the file, or compress the original again."
        )
    return selection


def first_difference(
    architecture: Architecture, original: Path, folder: Path, selection: Selection, own: Set[str] = frozenset()
) -> str | None:
    """The first tensor of `folder` that is not, byte for byte, the kept slices of the original's; None if all are.

    Of those in `own`, which were refitted or trained, only shape and dtype are compared. One tensor of each is in
    memory at a time.
    """
    before, after = read_headers(original).entries, read_headers(folder).entries
    shapes = {name: entry.shape for name, entry in before.items()}
    mixers = architecture.mixers(architecture.load_config(original), list(before))
    cuts = plan_cuts(architecture, mixers, shapes, selection)
    for name in sorted(before.keys() | after.keys()):
        if name not in before or name not in after:
            return name
        same = _is_alike if name in own else _is_slice
        if not same(before[name], after[name], cuts.get(name)):
            return name
    return None


def _is_alike(before: TensorEntry, after: TensorEntry, cut: TensorCut | None) -> bool:
    shape = tuple(before.shape) if cut is None else cut.shape(before.shape)
    return before.dtype == after.dtype and shape == tuple(after.shape)


def _is_slice(before: TensorEntry, after: TensorEntry, cut: TensorCut | None) -> bool:
    expected, actual = read_tensor(before), read_tensor(after)
    if cut is not None:
        expected = cut.apply(expected)
    if expected.shape != actual.shape or expected.dtype != actual.dtype:
        return False
    return torch.equal(expected.contiguous().view(torch.uint8), actual.contiguous().view(torch.uint8))
