"""Parquet files: the needed column only, a few rows at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow
import pyarrow.parquet

from compressor.calibration.documents import Row, columns_to_read, document_of_row
from compressor.errors import RequestError

BATCH_ROWS = 64
BUFFER_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ParquetReader:
    """The rows of a `.parquet` file.

    Raises, while it is iterated:
        RequestError: the file is no readable parquet file.
    """

    path: Path
    label: str
    column: str

    def rows(self) -> Iterator[Row]:
        try:
            # With a buffer of its own size, a column chunk is read page by page and not as a whole.
            with pyarrow.parquet.ParquetFile(self.path, buffer_size=BUFFER_BYTES, pre_buffer=False) as file:
                yield from self._rows(file)
        except (pyarrow.ArrowException, OSError) as error:
            reason = " ".join(str(error).split()).rstrip(".")
            raise RequestError(f"{self.path} cannot be read as parquet ({reason}); fetch or write it again.") from error

    def _rows(self, file: pyarrow.parquet.ParquetFile) -> Iterator[Row]:
        fields: tuple[str, ...] = tuple(file.schema_arrow.names)
        columns = columns_to_read(fields, self.column)
        if not columns:
            for number in range(1, file.metadata.num_rows + 1):
                yield Row(self._place(number), None, fields)
            return
        number = 0
        for batch in file.iter_batches(batch_size=BATCH_ROWS, columns=list(columns)):
            for value in batch.column(columns[0]):
                number += 1
                document = document_of_row({columns[0]: value.as_py()}, self.column)
                yield Row(self._place(number), document, fields)

    def _place(self, number: int) -> str:
        return f"{self.label} row {number}".lstrip()
