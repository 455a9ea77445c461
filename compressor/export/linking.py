"""Weight files that need no change, as hard links: a second name of the same bytes on the disk."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path

from safetensors import safe_open

from compressor.checkpoint.headers import TensorIndex
from compressor.errors import RequestError, RunError
from compressor.export.disk import nearest_existing
from compressor.export.weights import FILE_METADATA


def unchanged_files(index: TensorIndex, changed: Collection[str]) -> tuple[Path, ...]:
    """The files that can stand in an output as they are, when the tensors `changed` differ there.

    Not among them: a file with a tensor that is taken from another file, and one without the metadata that loaders
    ask for.
    """
    names: dict[Path, set[str]] = {file: set() for file in index.files}
    for entry in index.entries.values():
        names[entry.file].add(entry.name)
    return tuple(file for file, held in names.items() if held.isdisjoint(changed) and _holds_exactly(file, held))


def refuse_unlinkable(files: Sequence[Path], output: Path) -> None:
    """Make a link to each of `files` where the folder `output` will be, and remove it.

    Raises:
        RequestError: the file system of `output` is another one, or allows no link to a file.
    """
    folder = nearest_existing(output.parent)
    for file in files:
        probe = folder / f".link-probe-{os.getpid()}"
        try:
            _link(file, probe)
        except OSError as error:
            raise RequestError(_reason(file, output, error)) from error
        finally:
            probe.unlink(missing_ok=True)


def link_file(file: Path, target: Path) -> None:
    """Make `target` another name of `file`, links resolved.

    Raises:
        RunError: the file system allows no such link.
    """
    try:
        _link(file, target)
    except OSError as error:
        raise RunError(_reason(file, target.parent, error)) from error


def _link(file: Path, target: Path) -> None:
    # A link to a symbolic link, as those of the Hub's cache, would be one that leads nowhere.
    os.link(os.path.realpath(file), target)


def _reason(file: Path, folder: Path, error: OSError) -> str:
    return (
        f"--link: {file} cannot be hard-linked into {folder} ({error.strerror}); choose an output folder on the file "
        "system of the source, whose files you own, or leave --link out to copy."
    )


def _holds_exactly(file: Path, names: Collection[str]) -> bool:
    with safe_open(file, framework="pt") as opened:
        metadata = opened.metadata() or {}
        return set(opened.keys()) == set(names) and FILE_METADATA.items() <= metadata.items()
