"""Calibration sources on the disk: what is read, what is refused, and in which words."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from compressor.calibration import text as text_module
from compressor.calibration.documents import ChatDocument, Document, TextDocument
from compressor.calibration.text import TextSource, held_out_source, open_documents
from compressor.demo import calibration_text_path
from compressor.errors import RequestError

ROOT = Path(__file__).resolve().parents[2]
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
MIXED_ROWS = '{"text":"one"}\n{"text":null}\n{"id":3}\n{"text":"four","extra":{"a":1}}\n{"text":""}\n{"text":7}\n   \n'


def text_of(document: Document) -> str:
    assert isinstance(document, TextDocument)
    return "".join(document.chunks)


def texts(documents: Iterable[Document]) -> list[str]:
    return [text_of(document) for document in documents]


def source(path: Path, column: str = "text") -> TextSource:
    return TextSource(str(path), column=column)


def refusal(path: Path, column: str = "text") -> str:
    with pytest.raises(RequestError) as caught:
        texts(open_documents(source(path, column)))
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_rows_without_text_are_counted_and_named(tmp_path: Path) -> None:
    path = tmp_path / "mix.jsonl"
    path.write_text(MIXED_ROWS)
    stream = open_documents(source(path))
    assert texts(stream) == ["one", "four"]
    assert stream.problems() == ("4 of 6 rows have no text in 'text' (first: line 2)",)
    assert texts(stream) == ["one", "four"], "a second reading starts again"
    assert stream.problems() == ("4 of 6 rows have no text in 'text' (first: line 2)",)


def test_one_row_without_text_is_spelled_in_the_singular(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text":"one"}\n{"text":"  "}\n')
    stream = open_documents(source(tmp_path))
    assert texts(stream) == ["one"]
    assert stream.problems() == ("1 of 2 rows has no text in 'text' (first: a.jsonl line 2)",)


def test_a_source_without_the_column_is_refused_with_the_fields_found(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"content":"one","id":1}\n' * 128)
    assert refusal(path) == (
        f"the calibration source {path} has no field 'text'; fields found: content, id; "
        "name the column that holds text."
    )
    assert texts(open_documents(source(path, "content")))[:2] == ["one", "one"]


def test_a_long_source_without_the_column_is_refused_from_its_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_module, "ROWS_WITHOUT_COLUMN", 5)
    path = tmp_path / "rows.jsonl"
    path.write_text('{"content":"one"}\n' * 5 + "this line is not reached\n")
    assert "no field 'text'; fields found: content" in refusal(path)
    path.write_text('{"text":null}\n' * 20 + '{"text":"one"}\n')
    assert texts(open_documents(source(path))) == ["one"]


def test_a_column_that_never_holds_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text":null}\n{"text":[1]}\n')
    assert f"{path} has no text in 'text' in any of its 2 rows" in refusal(path)


def test_lines_that_are_no_objects_are_rows_without_text(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('[{"text":"one"}]\n"two"\n')
    assert "has no row that is a JSON object with a field 'text'" in refusal(path)


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("mark", [b"", BYTE_ORDER_MARK])
@pytest.mark.parametrize("suffix", [".jsonl", ".txt"])
def test_byte_order_mark_and_line_ends_do_not_matter(tmp_path: Path, suffix: str, mark: bytes, end: bytes) -> None:
    path = tmp_path / f"text{suffix}"
    lines = [b'{"text":"one\\r\\ntwo"}', b'{"text":"\\ufeffthree"}'] if suffix == ".jsonl" else [b"one", b"two"]
    path.write_bytes(mark + end.join(lines) + end)
    expected = ["one\ntwo", "three"] if suffix == ".jsonl" else ["one\ntwo\n"]
    assert texts(open_documents(source(path))) == expected


def test_marks_and_line_ends_across_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(BYTE_ORDER_MARK + "Zoë\r\n\r\rnaïve € 𝄞\r\n".encode())
    for size in range(1, 9):
        monkeypatch.setattr("compressor.calibration.text_file.CHUNK_BYTES", size)
        assert texts(open_documents(source(path))) == ["Zoë\n\n\nnaïve € 𝄞\n"]


def test_marks_at_the_joints_of_concatenated_jsonl_files(tmp_path: Path) -> None:
    path = tmp_path / "text.jsonl"
    path.write_bytes((BYTE_ORDER_MARK + b'{"text":"one"}\n') * 2)
    assert texts(open_documents(source(path))) == ["one", "one"]


def test_other_line_separators_of_unicode_stay_inside_a_row(tmp_path: Path) -> None:
    path = tmp_path / "text.jsonl"
    path.write_text('{"text":"one\u2028two\x85three"}\n', encoding="utf-8")
    assert texts(open_documents(source(path))) == ["one\u2028two\x85three"]


def test_a_lone_surrogate_becomes_a_character_that_tokenizers_take(tmp_path: Path) -> None:
    path = tmp_path / "text.jsonl"
    path.write_text('{"text":"a\\ud800b \\ud834\\udd1e"}\n')
    assert texts(open_documents(source(path))) == ["a?b 𝄞"]


@pytest.mark.parametrize("suffix", [".jsonl", ".txt"])
def test_invalid_utf8_is_refused_with_file_and_line(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"text{suffix}"
    path.write_bytes(b'{"text":"one"}\n' * 8000 + b'{"text":"\xe9t\xe9"}\n')
    message = refusal(path)
    assert message.startswith(f"{path}, line 8001, is not UTF-8 (")
    assert message.endswith("; convert the file.")


def test_a_character_cut_off_at_the_end_is_invalid_utf8(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes("one\ntwo €".encode()[:-1])
    assert f"{path}, line 2, is not UTF-8" in refusal(path)


@pytest.mark.parametrize("line", ['{"text":"on', '{"text":"one"} {"text":"two"}', "[" * 100_000, '{"id":' + "9" * 5000])
def test_a_broken_line_is_refused_with_its_number(tmp_path: Path, line: str) -> None:
    path = tmp_path / "text.jsonl"
    path.write_text('{"text":"one"}\n\n' + line + "\n")
    assert refusal(path).startswith(f"{path}, line 3, is not JSON (")


def test_parquet(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    table = {"text": ["one", None, "", "two\r\n", "three"], "id": [1, 2, 3, 4, 5]}
    pq.write_table(pa.table(table), path, row_group_size=2)
    stream = open_documents(source(path))
    assert texts(stream) == ["one", "two\n", "three"]
    assert stream.problems() == ("2 of 5 rows have no text in 'text' (first: row 2)",)
    assert "no text in 'id' in any of its 5 rows" in refusal(path, "id")
    assert "no field 'body'; fields found: text, id" in refusal(path, "body")


def test_a_broken_parquet_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    assert refusal(path).startswith(f"{path} cannot be read as parquet (")
    pq.write_table(pa.table({"text": [str(number) * 50 for number in range(4000)]}), path)
    whole = path.read_bytes()
    path.write_bytes(whole[:4] + bytes(len(whole) // 2) + whole[len(whole) // 2 + 4 :])
    assert refusal(path).startswith(f"{path} cannot be read as parquet (")


CHAT = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("column", ["text", "messages"])
def test_conversations(tmp_path: Path, suffix: str, column: str) -> None:
    path = tmp_path / f"chat{suffix}"
    rows = [{"messages": CHAT, "id": 1}, {"messages": [], "id": 2}]
    if suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    stream = open_documents(source(path, column))
    assert list(stream) == [ChatDocument(tuple(CHAT))]
    first = "line 2" if suffix == ".jsonl" else "row 2"
    assert stream.problems() == (f"1 of 2 rows has no text in '{column}' (first: {first})",)


@pytest.mark.parametrize(
    "messages", ["one", [1], [{"role": "user"}], [{"content": "one"}], [{"role": "user", "content": None}]]
)
def test_what_is_no_conversation_is_a_row_without_text(tmp_path: Path, messages: object) -> None:
    path = tmp_path / "chat.jsonl"
    path.write_text(json.dumps({"messages": messages}) + "\n")
    assert "fields found: messages" in refusal(path)


def test_a_folder_is_read_in_sorted_order_with_its_subfolders(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / ".hidden").mkdir()
    pq.write_table(pa.table({"text": ["from parquet"]}), tmp_path / "b" / "a.parquet")
    (tmp_path / "a.jsonl").write_text('{"text":"from jsonl"}\n')
    (tmp_path / "c.TXT").write_text("from txt\n")
    (tmp_path / "empty.txt").write_text(" \n")
    for ignored in ("README.md", ".hidden/x.txt", ".y.txt"):
        (tmp_path / ignored).write_text("not read")
    (tmp_path / "b" / "back").symlink_to(tmp_path)
    stream = open_documents(source(tmp_path))
    assert texts(stream) == ["from jsonl", "from parquet", "from txt\n"]
    assert stream.problems() == ("1 of 2 text files is empty (first: empty.txt)",)


def test_linked_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "blob").write_text("one")
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "text.txt").symlink_to("../blob")
    (tmp_path / "linked").symlink_to("snapshot")
    assert texts(open_documents(source(tmp_path / "linked"))) == ["one"]


def test_missing_and_wrong_paths_are_refused(tmp_path: Path) -> None:
    missing = tmp_path / "missing.txt"
    assert refusal(missing) == (
        f'the calibration source "{missing}" does not exist; give a .txt, .jsonl or .parquet file, '
        'a folder of them, the id of a Hub data set (org/name), or "demo".'
    )
    assert "does not exist" in refusal(Path("folder/missing.jsonl"))
    (tmp_path / "text.csv").write_text("one")
    assert refusal(tmp_path / "text.csv") == (
        f'the calibration file {tmp_path / "text.csv"} ends in ".csv"; .txt, .jsonl and .parquet files are read: '
        "convert it."
    )
    assert refusal(tmp_path) == (f"the calibration folder {tmp_path} holds no .txt, .jsonl or .parquet file; add one.")


@pytest.mark.parametrize("name", ["empty.txt", "empty.jsonl", "empty.parquet"])
def test_an_empty_source_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(b"\n \n")
    if name.endswith("parquet"):
        pq.write_table(pa.table({"text": pa.array([], pa.string())}), path)
    assert refusal(path) == f"the calibration source {path} is empty; use one that holds text."


def test_a_text_of_nul_characters_is_no_text(tmp_path: Path) -> None:
    """A file whose end was never written is as long as it should be, and all zeros."""
    (tmp_path / "unwritten.txt").write_bytes(bytes(200_000))
    assert refusal(tmp_path / "unwritten.txt").endswith("is empty; use one that holds text.")
    (tmp_path / "rows.jsonl").write_text('{"text":"one"}\n{"text":"\\u0000\\u0000 "}\n{"text":"a\\u0000b"}\n')
    stream = open_documents(source(tmp_path / "rows.jsonl"))
    assert texts(stream) == ["one", "a\x00b"]
    assert stream.problems() == ("1 of 3 rows has no text in 'text' (first: line 2)",)


@pytest.mark.parametrize("name", ["text.txt", "text.jsonl", "text.parquet"])
def test_a_file_that_can_no_longer_be_read_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text('{"text":"one"}\n')
    if name.endswith("parquet"):
        pq.write_table(pa.table({"text": ["one"]}), path)
    stream = open_documents(source(path))
    path.unlink()
    with pytest.raises(RequestError, match=f"^{path} cannot be read"):
        texts(stream)


def test_demo_is_the_bundled_text_split_into_documents() -> None:
    documents = texts(open_documents(TextSource("demo")))
    assert len(documents) == calibration_text_path().read_text(encoding="utf-8").count("<|endoftext|>")
    assert documents[0].startswith("NORTHANGER ABBEY")
    assert not any("<|endoftext|>" in document for document in documents)
    held_out = held_out_source(TextSource("demo"))
    assert held_out is not None
    assert {*texts(open_documents(held_out))}.isdisjoint(documents)
    assert held_out_source(TextSource("books.txt")) is None
