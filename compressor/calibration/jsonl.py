"""JSON Lines: one object a line, read a line at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from compressor.calibration.documents import Row, document_of_row
from compressor.errors import RequestError
from compressor.json_text import parse_json


@dataclass(frozen=True, slots=True)
class JsonLinesReader:
    r"""The rows of a `.jsonl` file in UTF-8; byte-order marks, `\r\n` and blank lines are passed over.

    Lines end at `\n` alone, since JSON strings may hold the other line separators of Unicode.

    Raises, while it is iterated:
        RequestError: a line is not UTF-8 or not JSON (the line is named), or the file cannot be read.
    """

    path: Path
    label: str
    column: str

    def rows(self) -> Iterator[Row]:
        try:
            with self.path.open("rb") as file:
                for number, line in enumerate(file, start=1):
                    line = line.removeprefix(b"\xef\xbb\xbf").strip()
                    if line:
                        yield self._row(line, number)
        except OSError as error:
            raise RequestError(f"{self.path} cannot be read: {error.strerror}.") from error

    def _row(self, line: bytes, number: int) -> Row:
        place = f"{self.label} line {number}".lstrip()
        try:
            value = parse_json(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise RequestError(
                f"{self.path}, line {number}, is not UTF-8 ({error.reason}); convert the file."
            ) from error
        except ValueError as error:
            raise RequestError(
                f"{self.path}, line {number}, is not JSON ({error}); each line must hold one JSON object."
            ) from error
        if not isinstance(value, dict):
            return Row(place, None)
        return Row(place, document_of_row(value, self.column), tuple(value))
