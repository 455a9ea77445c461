"""What compression.json records of the files of a folder that `compress recover` wrote."""

from __future__ import annotations

from pathlib import Path

from compressor.cli import main
from tests.test_pipeline import compress, hashes, make_source, make_text
from tests.test_recover import TRAIN, report_of


def test_what_was_only_copied_keeps_its_record(tmp_path: Path) -> None:
    source, cut, output = make_source("gated_deltanet", tmp_path / "source"), tmp_path / "cut", tmp_path / "out"
    (source / "LICENSE").write_text("terms")
    assert compress(source, cut, make_text(tmp_path), "--no-verify", "--no-evaluate") == 0
    old = report_of(cut)["files"]
    (cut / "LICENSE").write_text("other terms")
    (cut / "notes.txt").write_text("private")
    words = ["recover", str(cut), "--output-dir", str(output), "--no-verify", "--no-evaluate", "--device", "cpu"]
    assert main([*words, *TRAIN]) == 0
    files, found = report_of(output)["files"], hashes(output)
    assert found.keys() - files.keys() == {"README.md", "compression.json", "notes.txt"}
    assert files["LICENSE"] == old["LICENSE"]
    assert {name for name in files if files[name]["sha256"] != found[name]} == {"LICENSE"}
    assert files["model.safetensors"] != old["model.safetensors"]
