"""JSON of users that is nested too deeply, wherever it is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from compressor.calibration.tokenizer import load_tokenizer
from compressor.cli import main
from compressor.errors import RequestError
from compressor.export.placement import check_placement
from compressor.json_text import parse_json
from compressor.recovery.log import read_log
from compressor.reporting import read_compression

DEEP = "[" * 100_000


def test_it_is_no_json() -> None:
    assert parse_json('{"a": [1]}') == parse_json(b'{"a": [1]}') == {"a": [1]}
    for text in (DEEP, DEEP.encode(), "{", b"\xff"):
        with pytest.raises(ValueError, match="depth|Expecting|decode"):
            parse_json(text)


def test_of_a_compressed_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "compression.json").write_text(DEEP)
    assert read_compression(tmp_path) is None
    assert main(["push", str(tmp_path), "someone/half", "--dry-run"]) == 2
    assert f"{tmp_path} has no readable compression.json; give a folder that compress wrote" in capsys.readouterr().err


def test_of_other_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(DEEP)
    with pytest.raises(RequestError, match="--overwrite replaces model folders only"):
        check_placement(tmp_path, tmp_path, True, None)
    (tmp_path / "tokenizer.json").write_text(DEEP)
    with pytest.raises(RequestError, match="tokenizer.json is not JSON"):
        load_tokenizer(tmp_path, trust_remote_code=False)
    (tmp_path / "log").write_text(DEEP + '\n{"step": 1}\n')
    assert read_log(tmp_path / "log") == [{"step": 1}]
