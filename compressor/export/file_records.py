"""The files of an output as they were written: sizes and hashes, kept in compression.json and held against later."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from compressor.checkpoint.fingerprint import Progress, file_sha256
from compressor.errors import RequestError


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file as it was written: its hex SHA-256 and how many bytes it has."""

    sha256: str
    bytes: int


def record_files(folder: Path, names: Sequence[str], progress: Progress | None = None) -> dict[str, FileRecord]:
    """By name in `folder`; a block of a file is in memory at a time. `progress` gets the bytes of each block read.

    Raises:
        RunError: a file cannot be read.
    """
    return {
        name: FileRecord(file_sha256(folder / name, progress), (folder / name).stat().st_size) for name in sorted(names)
    }


def read_records(file: Path, compression: Mapping[str, object]) -> dict[str, FileRecord]:
    """What `compression`, the content of the compression.json `file`, records; empty where an older version wrote it.

    Raises:
        RequestError: the record is broken, or names what is not inside the folder.
    """
    content = compression.get("files", {})
    records = {}
    for name, entry in content.items() if isinstance(content, Mapping) else ((str(content), None),):
        sha256, size = (entry.get("sha256"), entry.get("bytes")) if isinstance(entry, Mapping) else (None, None)
        path = PurePosixPath(name)
        inside = not path.is_absolute() and ".." not in path.parts and path.as_posix() == name and "\0" not in name
        if not isinstance(sha256, str) or type(size) is not int or not inside:
            raise RequestError(
                f'{file} has a broken record of the files that compress wrote ("files", at {name[:80]!r}); restore '
                "the file, or compress again."
            )
        records[name] = FileRecord(sha256, size)
    return records


def differences(folder: Path, records: Mapping[str, FileRecord]) -> Iterator[tuple[str, str]]:
    """Name of each file that is not as recorded, and how it is: the rest of a sentence that begins with the name."""
    for name, record in records.items():
        path = folder / name
        if not path.is_file():
            yield name, "is missing, and compress wrote it"
            continue
        size = path.stat().st_size
        if size != record.bytes:
            yield name, f"has {size:,} bytes, and compress wrote {record.bytes:,}"
            continue
        sha256 = file_sha256(path)
        if sha256 != record.sha256:
            yield name, f"has the SHA-256 {sha256[:12]}..., and compress wrote {record.sha256[:12]}..."
