"""Plain text files: one document a file, read a chunk at a time."""

from __future__ import annotations

import codecs
import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from compressor.calibration.documents import Row, TextDocument, clean_text, has_text
from compressor.errors import RequestError

CHUNK_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class TextFileChunks:
    r"""The text of a UTF-8 file, chunk by chunk, without byte-order mark and with `\n` for every line end.

    Raises, while it is iterated:
        RequestError: the file is not UTF-8 (the line is named), or cannot be read.
    """

    path: Path

    def __iter__(self) -> Iterator[str]:
        # Unlike a decoder of chunks, this one holds back a "\r" until it knows whether "\n" follows.
        decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8")(), translate=True)
        lines_before = 0
        try:
            with self.path.open("rb") as file:
                while data := file.read(CHUNK_BYTES):
                    yield decoder.decode(data).replace("\ufeff", "")
                    lines_before += data.count(b"\n")
                yield decoder.decode(b"", final=True)
        except UnicodeDecodeError as error:
            line = lines_before + error.object[: error.start].count(b"\n") + 1
            raise RequestError(f"{self.path}, line {line}, is not UTF-8 ({error.reason}); convert the file.") from error
        except OSError as error:
            raise RequestError(f"{self.path} cannot be read: {error.strerror}.") from error


@dataclass(frozen=True, slots=True)
class TextFileReader:
    """A `.txt` file as one row; it has no document where the file is empty, all white space or all NUL."""

    path: Path
    label: str

    def rows(self) -> Iterator[Row]:
        chunks = TextFileChunks(self.path)
        usable = any(has_text(chunk) for chunk in chunks)
        yield Row(self.label, TextDocument(chunks) if usable else None, whole_file=True)


@dataclass(frozen=True, slots=True)
class MarkedTextReader:
    """A short text file whose documents are each followed by `marker`, as in the bundled texts."""

    path: Path
    marker: str

    def rows(self) -> Iterator[Row]:
        parts = self.path.read_text(encoding="utf-8").split(self.marker)
        for number, part in enumerate(parts, start=1):
            text = clean_text(part).strip("\n")
            if text:
                yield Row(f"document {number}", TextDocument((text,)), whole_file=True)
