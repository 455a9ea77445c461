"""Which weight files of a folder stock transformers reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from compressor.checkpoint.config_file import read_json_object
from compressor.checkpoint.presence import is_there
from compressor.errors import RequestError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.bin.index.json")


@dataclass(frozen=True)
class WeightLayout:
    """The files that are read, in the order of the stock loader (the last one wins where a name stands twice).

    `weight_map` is the index's: tensor name -> file name; empty without an index. `notes` say what is left out.
    """

    files: tuple[Path, ...]
    weight_map: Mapping[str, str]
    notes: tuple[str, ...]


def weight_layout(folder: Path) -> WeightLayout:
    """What `from_pretrained` would open: `model.safetensors` where it stands, else the files that the index names.

    Raises:
        RequestError: nothing to open, only pickles, absent files, names of files that others than files have, or an
            index that is broken, contradicts `model.safetensors` or leaves the folder.
    """
    weight_map = read_weight_map(folder)
    names = sorted(set(weight_map.values()))
    if is_there(folder / SINGLE_FILE):
        others = [name for name in names if name != SINGLE_FILE]
        if others:
            raise RequestError(
                f"{folder} holds {SINGLE_FILE}, which stock transformers reads, and {INDEX_FILE}, which names other "
                f"files: {listed(others)}; move the stale one of the two away."
            )
        names = [SINGLE_FILE]
    if not names:
        raise RequestError(_reason_without_weights(folder))
    absent = [name for name in names if not is_there(folder / name)]
    if absent:
        raise RequestError(f"{INDEX_FILE} names files that {folder} lacks: {listed(absent)}; download them again.")
    files = tuple(folder / name for name in names)
    return WeightLayout(files, weight_map, tuple(_ignored(folder, files)))


def read_weight_map(folder: Path) -> dict[str, str]:
    """Tensor name -> file name relative to the folder, from the index; empty where there is no index.

    Raises:
        RequestError: the index is broken, or names a file outside the folder or of another format.
    """
    path = folder / INDEX_FILE
    if not is_there(path):
        return {}
    index = read_json_object(path)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise RequestError(f"{path} has no weight_map of tensor names to file names; download it again.")
    if not weight_map:
        raise RequestError(f"the weight_map of {path} is empty; download it again.")
    if not isinstance(index.get("metadata"), dict):
        raise RequestError(f'{path} has no metadata object, which stock transformers reads; add "metadata": {{}}.')
    for name in weight_map.values():
        parts = PurePosixPath(name).parts
        if name.startswith("/") or ".." in parts or "\\" in name:
            raise RequestError(f"{path} names {name!r}, which is outside the folder; keep all weights inside it.")
        if not name.endswith(".safetensors"):
            raise RequestError(f"{path} names {name!r}, which is no safetensors file; convert to safetensors first.")
    return weight_map


def listed(names: Sequence[str]) -> str:
    """The first name and how many more there are."""
    return names[0] if len(names) == 1 else f"{names[0]} (and {len(names) - 1} more)"


def _reason_without_weights(folder: Path) -> str:
    others = _names(folder, ("*.safetensors",))
    pickles = _names(folder, _PICKLES)
    if others:
        return (
            f"{folder} holds {listed(others)}, but neither {SINGLE_FILE} nor {INDEX_FILE}, which are all that stock "
            "transformers reads; rename the file or download the index."
        )
    if pickles:
        return f"{folder} holds only pickled weights: {listed(pickles)}; convert to safetensors first."
    return f"{folder} holds no weights; it needs {SINGLE_FILE}, or {INDEX_FILE} and the files it names."


def _ignored(folder: Path, files: Iterable[Path]) -> list[str]:
    read = {path.name for path in files}
    return [
        f"{name} is ignored and not exported: stock transformers does not read it"
        for name in _names(folder, ("*.safetensors",))
        if name not in read
    ]


def _names(folder: Path, patterns: Iterable[str]) -> list[str]:
    return sorted({path.name for pattern in patterns for path in folder.glob(pattern)})
