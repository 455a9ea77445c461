"""What `compress verify` measures in its second process, here in this one: cuts of families that repeat a layout."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from compressor.verification import oracle
from tests.families import tiny_tokens
from tests.test_pipeline import compress, make_source, make_text
from tests.tiny_models import read_weights, write_weights

FAMILIES = ["gated_deltaproduct_hybrid", "delta_net_sum_norm", "qn_experts", "qw_experts", "oh_parts"]


def facts(
    folder: Path, original: Path, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> dict[str, Any]:
    """The line that the process prints."""
    tokens = place / "tokens.json"
    tokens.write_text(json.dumps(tiny_tokens(100).tolist()), encoding="utf-8")
    refit = json.loads((folder / "compression.json").read_text(encoding="utf-8"))["recovery"]["refit"]
    words = [str(folder), "--original", str(original), "--tokens", str(tokens), *["--refitted"] * refit["kept"]]
    monkeypatch.setattr(sys, "argv", ["oracle", *words])
    capsys.readouterr()
    oracle.main()
    line: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return line


@pytest.mark.parametrize("name", FAMILIES)
def test_a_cut_is_the_masked_original_and_one_changed_value_is_seen(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, output = make_source(name, tmp_path / "source"), tmp_path / "out"
    assert compress(source, output, make_text(tmp_path), "--no-verify") == 0
    found = facts(output, source, tmp_path, monkeypatch, capsys)
    assert found["first_difference"] is None
    assert found["relative_error"] < 1e-4
    assert found["generation_error"] < 1e-3
    tensors = read_weights(output)
    changed = next(key for key in tensors if key.endswith(("A_log", "k_proj.weight")))
    tensors[changed].view(-1)[0] += 0.01
    write_weights(output, tensors)
    assert changed in facts(output, source, tmp_path, monkeypatch, capsys)["first_difference"]
