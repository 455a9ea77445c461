from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from compressor.checkpoint import fingerprint
from compressor.checkpoint.fingerprint import files_sha256, weights_sha256
from compressor.checkpoint.headers import read_headers
from compressor.errors import RunError
from tests.tiny_models import save_tiny


def test_is_what_sha256sum_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = read_headers(save_tiny("q35", tmp_path, max_shard_size="60KB"))
    assert len(index.files) > 2
    command = "LC_ALL=C; sha256sum *.safetensors | sha256sum"
    shell = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True, check=True)
    monkeypatch.setattr(fingerprint, "BLOCK_BYTES", 1000)
    read: list[int] = []
    assert weights_sha256(index, read.append) == shell.stdout.split()[0]
    assert sum(read) == sum(path.stat().st_size for path in index.files)
    assert max(read) == 1000
    assert files_sha256(reversed(index.files)) == weights_sha256(index)


def test_depends_on_names_bytes_and_nothing_else(tmp_path: Path) -> None:
    first, second, other = (tmp_path / name / "a" for name in ("1", "2", "3"))
    for path, content in ((first, b"x"), (second, b"x"), (other, b"y")):
        path.parent.mkdir()
        path.write_bytes(content)
    assert files_sha256([first]) == files_sha256([second])
    assert files_sha256([first]) != files_sha256([other])
    renamed = second.rename(second.with_name("b"))
    assert files_sha256([first]) != files_sha256([renamed])


def test_a_file_that_vanished(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="gone could not be read while it was hashed"):
        files_sha256([tmp_path / "gone"])
