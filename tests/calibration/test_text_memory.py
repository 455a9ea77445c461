"""Reading a calibration source takes memory for a piece of it, not for the whole."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc
from collections.abc import Iterable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from compressor.calibration.documents import Document, TextDocument
from compressor.calibration.text import TextSource, open_documents

ROOT = Path(__file__).resolve().parents[2]
WORD = "woérd "


def source(path: Path) -> TextSource:
    return TextSource(str(path))


def chunks(documents: Iterable[Document]) -> Iterator[str]:
    for document in documents:
        assert isinstance(document, TextDocument)
        yield from document.chunks


@pytest.mark.parametrize("suffix", [".txt", ".jsonl"])
def test_memory_does_not_grow_with_a_file_of_20_mb(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"long{suffix}"
    if suffix == ".txt":
        path.write_bytes(WORD.encode() * 3_000_000)  # one line
    else:
        path.write_bytes(b'{"text":"%b"}\n' % (WORD.encode() * 50) * 60_000)
    assert path.stat().st_size > 20_000_000
    tracemalloc.start()
    characters = sum(len(chunk) for chunk in chunks(open_documents(source(path))))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert characters == 18_000_000
    assert peak < 2_000_000


def test_memory_does_not_grow_with_a_row_group_of_24_mb(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    table = pa.table({"text": [f"{row:06}" + WORD * 200 for row in range(20_000)]})
    pq.write_table(table, path, compression="none", use_dictionary=False)
    assert pq.read_metadata(path).row_group(0).total_byte_size > 24_000_000
    # Arrow's statistics are of the whole process and never fall, hence a process of its own.
    code = (
        "import pyarrow, sys; from compressor.calibration.text import *; "
        "stream = open_documents(TextSource(sys.argv[1])); "
        "print(sum(len(chunk) for document in stream for chunk in document.chunks)); "
        "print(pyarrow.default_memory_pool().max_memory())"
    )
    child = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True, cwd=ROOT
    )
    characters, peak = map(int, child.stdout.split())
    assert characters == 24_120_000
    assert 0 < peak < 8_000_000
