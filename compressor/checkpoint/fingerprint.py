"""One hash for the weights of a checkpoint."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path

from compressor.checkpoint.headers import TensorIndex
from compressor.errors import RunError

BLOCK_BYTES = 16 * 1024 * 1024


def weights_sha256(index: TensorIndex, progress: Callable[[int], None] | None = None) -> str:
    """`files_sha256` of the files that hold the tensors of `index`."""
    return files_sha256(index.files, progress)


def files_sha256(paths: Iterable[Path], progress: Callable[[int], None] | None = None) -> str:
    """Hex SHA-256 over the names and hashes of the files: of what `sha256sum` prints for them, in order of name.

    In the folder, `sha256sum *.safetensors | sha256sum` gives the same (in the C locale, without files
    that are not among `paths`). `progress` is called with the number of bytes of each block read.

    Raises:
        RunError: a file cannot be read.
    """
    total = hashlib.sha256()
    for path in sorted(paths, key=lambda path: path.name):
        total.update(f"{_file_sha256(path, progress)}  {path.name}\n".encode())
    return total.hexdigest()


def _file_sha256(path: Path, progress: Callable[[int], None] | None) -> str:
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
