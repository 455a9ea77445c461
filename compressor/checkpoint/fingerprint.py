"""One hash for the weights of a checkpoint."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from compressor.checkpoint.headers import TensorIndex
from compressor.errors import RunError

BLOCK_BYTES = 16 * 1024 * 1024
Progress = Callable[[int], None]


def weights_sha256(index: TensorIndex, progress: Progress | None = None) -> str:
    """`files_sha256` of the files that hold the tensors of `index`."""
    return files_sha256(index.files, progress)


def files_sha256(paths: Iterable[Path], progress: Progress | None = None) -> str:
    """Hex SHA-256 over the names and hashes of the files: of what `sha256sum` prints for them, in order of name.

    In the folder, `sha256sum *.safetensors | sha256sum` gives the same (in the C locale, without files
    that are not among `paths`). `progress` is called with the number of bytes of each block read.

    Raises:
        RunError: a file cannot be read.
    """
    return joint_sha256({path.name: file_sha256(path, progress) for path in paths})


def joint_sha256(hashes: Mapping[str, str]) -> str:
    """The same of files whose hex SHA-256 are known, by name."""
    lines = (f"{hashes[name]}  {name}\n" for name in sorted(hashes))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def file_sha256(path: Path, progress: Progress | None = None) -> str:
    """Hex SHA-256 of one file, a block of it in memory at a time; `progress` as in `files_sha256`.

    Raises:
        RunError: the file cannot be read.
    """
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while block := file.read(BLOCK_BYTES):
                digest.update(block)
                if progress is not None:
                    progress(len(block))
    except OSError as error:
        raise RunError(f"{path} could not be read while it was hashed ({error.strerror}); check the disk.") from error
    return digest.hexdigest()
