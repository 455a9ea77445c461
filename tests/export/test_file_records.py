from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from compressor.checkpoint import fingerprint
from compressor.errors import RequestError
from compressor.export.file_records import FileRecord, differences, read_records, record_files
from compressor.export.model_files import files_inside, is_standard, own_files


def fill(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(name)
    return folder


def test_a_record_is_size_and_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "BLOCK_BYTES", 2)
    fill(tmp_path, "b.txt", "additional_chat_templates/a.jinja")
    read: list[int] = []
    records = record_files(tmp_path, files_inside(tmp_path), read.append)
    assert list(records) == ["additional_chat_templates/a.jinja", "b.txt"]
    assert records["b.txt"] == FileRecord(hashlib.sha256(b"b.txt").hexdigest(), 5)
    assert (max(read), sum(read)) == (2, 5 + 33)
    assert list(differences(tmp_path, records)) == []
    (tmp_path / "b.txt").write_text("c.txt")
    (tmp_path / "additional_chat_templates" / "a.jinja").unlink()
    assert dict(differences(tmp_path, records)) == {
        "additional_chat_templates/a.jinja": "is missing, and compress wrote it",
        "b.txt": f"has the SHA-256 {hashlib.sha256(b'c.txt').hexdigest()[:12]}..., and compress wrote "
        f"{hashlib.sha256(b'b.txt').hexdigest()[:12]}...",
    }
    (tmp_path / "b.txt").write_text("longer")
    assert dict(differences(tmp_path, records))["b.txt"] == "has 6 bytes, and compress wrote 5"


def test_a_record_is_read_back() -> None:
    place, entry = Path("compression.json"), {"sha256": "ab", "bytes": 3}
    assert read_records(place, {}) == read_records(place, {"files": {}}) == {}
    assert read_records(place, {"files": {"a/b": entry}}) == {"a/b": FileRecord("ab", 3)}


@pytest.mark.parametrize(
    "files",
    [
        None,
        ["config.json"],
        {"config.json": "ab"},
        {"config.json": {"sha256": "ab"}},
        {"config.json": {"sha256": "ab", "bytes": True}},
        *({name: {"sha256": "ab", "bytes": 3}} for name in ("/etc/passwd", "../a", "a/../../b", "./a", "a\0")),
    ],
)
def test_a_broken_record_is_refused(files: object) -> None:
    with pytest.raises(RequestError, match="^compression.json has a broken record of the files that compress wrote"):
        read_records(Path("compression.json"), {"files": files})


def test_names_of_a_models_files(tmp_path: Path) -> None:
    standard = [
        "config.json", "tokenizer.json", "qwen.tiktoken", "LICENSE", "License.txt", "NOTICE.md", "modeling_own.py",
        "additional_chat_templates/tool_use.jinja", "training.png", "recipe.yaml", "README.md", "compression.json",
    ]  # fmt: skip
    others = [
        "id_rsa", "key.pem", "secrets.json", "credentials.yaml", "token", "notes.txt", "LICENSE.key", "setup.py",
        "additional_chat_templates/passwd", "additional_chat_templates/LICENSE", "model.pt", "sweep.json",
    ]  # fmt: skip
    fill(tmp_path, *standard, *others, ".hidden", "model.safetensors")
    assert [name for name in [*standard, *others] if is_standard(name)] == standard
    assert own_files(tmp_path, ()) == tuple(sorted([*standard, "model.safetensors"]))
    assert own_files(tmp_path, ["notes.txt"]) == tuple(sorted([*standard, "model.safetensors", "notes.txt"]))
