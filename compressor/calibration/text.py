"""Documents from a calibration source: the bundled text, local files, or a data set of the Hub."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from compressor.calibration.documents import MESSAGES_COLUMN, Document, Row, RowReader
from compressor.calibration.hub_dataset import HubDatasetReader
from compressor.calibration.jsonl import JsonLinesReader
from compressor.calibration.parquet import ParquetReader
from compressor.calibration.text_file import MarkedTextReader, TextFileReader
from compressor.demo import calibration_text_path, held_out_text_path
from compressor.errors import RequestError
from compressor.file_kinds import absence, kind_of

DEMO = "demo"
DEMO_HELD_OUT = "demo:held-out"
DEMO_MARKER = "<|endoftext|>"

EXTENSIONS = (".txt", ".jsonl", ".parquet")
_EXTENSIONS_TEXT = ".txt, .jsonl and .parquet"

ROWS_WITHOUT_COLUMN = 10_000
"""A source is refused when this many rows at its beginning have no such column at all."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True, slots=True)
class TextSource:
    """Where calibration text comes from.

    `name` is "demo" (the bundled text), a `.txt`, `.jsonl` or `.parquet` file, a folder of them, or
    the id of a Hub data set. `column`, and for the Hub `config` and `split`, say what to read of it.
    `held_out` text is measured on: messages speak of the text, and of no column that could be named.
    """

    name: str
    column: str = "text"
    config: str | None = None
    split: str = "train"
    held_out: bool = False
    use: str = "calibration"
    """What text that is not held out is for."""

    def called(self, kind: str) -> str:
        """What messages call it."""
        return "text" if self.held_out else f"{self.use} {kind}"

    @property
    def column_remedy(self) -> str:
        return (
            f"rename the field that holds text to '{self.column}'"
            if self.held_out
            else "name the column that holds text"
        )


def held_out_source(source: TextSource) -> TextSource | None:
    """The text that belongs to `source` for evaluation; None where held-out text is what calibration leaves."""
    return TextSource(DEMO_HELD_OUT) if source.name == DEMO else None


@dataclass(slots=True)
class _RowCount:
    rows: int = 0
    unusable_rows: int = 0
    first_unusable_row: str = ""
    files: int = 0
    empty_files: int = 0
    first_empty_file: str = ""
    fields: dict[str, None] = field(default_factory=dict)

    def add(self, row: Row) -> None:
        if row.whole_file:
            self.files += 1
            if row.document is None:
                self.empty_files += 1
                self.first_empty_file = self.first_empty_file or row.place
            return
        self.rows += 1
        if row.document is None:
            self.unusable_rows += 1
            self.first_unusable_row = self.first_unusable_row or row.place
            self.fields.update(dict.fromkeys(row.fields))


class DocumentStream:
    """The documents of a source, read lazily and in order; every iteration starts at the beginning."""

    def __init__(self, source: TextSource, readers: Sequence[RowReader]) -> None:
        self.source = source
        self._readers = tuple(readers)
        self._count = _RowCount()

    def __iter__(self) -> Iterator[Document]:
        for row in self._rows():
            if row.document is not None:
                yield row.document

    def problems(self) -> tuple[str, ...]:
        """What to tell the user about the rows read in the last iteration, one line each."""
        count, lines = self._count, []
        if count.unusable_rows:
            verb = "has" if count.unusable_rows == 1 else "have"
            lines.append(
                f"{count.unusable_rows:,} of {_counted(count.rows, 'row')} {verb} no text in '{self.source.column}' "
                f"(first: {count.first_unusable_row})"
            )
        if count.empty_files:
            verb = "is" if count.empty_files == 1 else "are"
            lines.append(
                f"{count.empty_files:,} of {_counted(count.files, 'text file')} {verb} empty "
                f"(first: {count.first_empty_file})"
            )
        return tuple(lines)

    def check(self) -> None:
        """Read up to the first usable row.

        Raises:
            RequestError: there is none, or what stands before it cannot be read.
        """
        columns = {self.source.column, MESSAGES_COLUMN}
        for row in self._rows():
            if row.document is not None:
                return
            if self._count.rows >= ROWS_WITHOUT_COLUMN and columns.isdisjoint(self._count.fields):
                break
        raise RequestError(self._nothing_usable(self._count))

    def _rows(self) -> Iterator[Row]:
        self._count = count = _RowCount()
        for reader in self._readers:
            for row in reader.rows():
                count.add(row)
                yield row

    def _nothing_usable(self, count: _RowCount) -> str:
        source, column = f"{self.source.called('source')} {self.source.name}", self.source.column
        if not count.rows:
            return f"the {source} is empty; use one that holds text."
        if column in count.fields:
            return (
                f"the {source} has no text in '{column}' in any of its {_counted(count.rows, 'row')}; "
                f"{self.source.column_remedy}."
            )
        if not count.fields:
            return f"the {source} has no row that is a JSON object with a field '{column}'."
        return (
            f"the {source} has no field '{column}'; fields found: {', '.join(count.fields)}; "
            f"{self.source.column_remedy}."
        )


def open_documents(source: TextSource) -> DocumentStream:
    """Find `source` and read it up to its first usable row; no model is needed for that.

    Documents come in order: the rows of a file, the files of a folder sorted by path, subfolders
    included, hidden ones not. A `.txt` file is one document.

    Raises:
        RequestError: no such file, folder or data set, a file of another kind, a folder without a
            usable file, no usable row, or a broken line before the first usable row.
    """
    stream = DocumentStream(source, _readers(source))
    stream.check()
    return stream


def _readers(source: TextSource) -> list[RowReader]:
    if source.name == DEMO:
        return [MarkedTextReader(calibration_text_path(), DEMO_MARKER)]
    if source.name == DEMO_HELD_OUT:
        return [MarkedTextReader(held_out_text_path(), DEMO_MARKER)]
    # os.path answers for any string; pathlib raises for a name that is too long or a user that is unknown.
    path = Path(os.path.expanduser(source.name))  # noqa: PTH111
    if os.path.isdir(path):  # noqa: PTH112
        return _folder_readers(path, source)
    if os.path.isfile(path):  # noqa: PTH113
        if path.suffix.lower() not in EXTENSIONS:
            raise RequestError(
                f'the {source.called("file")} {path} ends in "{path.suffix}"; {_EXTENSIONS_TEXT} files are read: '
                "convert it."
            )
        return [_file_reader(path, "", source)]
    if _HUB_ID.fullmatch(source.name) and path.suffix.lower() not in EXTENSIONS:
        return [HubDatasetReader(source.name, source.config, source.split, source.column)]
    kind = kind_of(path)
    problem = absence(path) if kind is None else f"is {kind}, neither a file nor a folder"
    raise RequestError(
        f'the {source.called("source")} "{source.name}" {problem}; give a {_EXTENSIONS_TEXT.replace("and", "or")} '
        'file, a folder of them, the id of a Hub data set (org/name), or "demo".'
    )


def _folder_readers(folder: Path, source: TextSource) -> list[RowReader]:
    files = sorted(_files_below(folder), key=lambda path: path.relative_to(folder).parts)
    readers = [_file_reader(path, path.relative_to(folder).as_posix(), source) for path in files]
    if not readers:
        raise RequestError(
            f"the {source.called('folder')} {folder} holds no {_EXTENSIONS_TEXT.replace('and', 'or')} file; add one."
        )
    return readers


def _files_below(folder: Path) -> Iterator[Path]:
    seen: set[str] = set()
    for parent, subfolders, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(parent)
        if real in seen:  # a link back to a folder above
            subfolders.clear()
            continue
        seen.add(real)
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        for name in names:
            path = Path(parent, name)
            if not name.startswith(".") and path.suffix.lower() in EXTENSIONS and path.is_file():
                yield path


def _file_reader(path: Path, label: str, source: TextSource) -> RowReader:
    suffix = path.suffix.lower()
    if suffix == ".txt":
        return TextFileReader(path, label or path.name)
    if suffix == ".jsonl":
        return JsonLinesReader(path, label, source.column)
    return ParquetReader(path, label, source.column)


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
