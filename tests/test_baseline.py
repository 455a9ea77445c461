"""A baseline is put the model's tokens, so its tokenizer must be the same one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compressor.baseline import require_same_tokens
from compressor.calibration.tokenizer import load_tokenizer
from compressor.cli import main
from compressor.errors import RequestError
from compressor.preparation import open_model

Change = Callable[[dict[str, Any]], object]


def swap_two_tokens(tokenizer: dict[str, Any]) -> None:
    vocabulary = tokenizer["model"]["vocab"]
    first, second = [token for token in vocabulary if token.isalpha()][-2:]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]


def other_merges(tokenizer: dict[str, Any]) -> None:
    """The same vocabulary, but words are put together in another order."""
    tokenizer["model"]["merges"].reverse()


def lower_case(tokenizer: dict[str, Any]) -> None:
    tokenizer["normalizer"] = {"type": "Lowercase"}


def copy_of(model: Path, folder: Path, change: Change | None = None) -> Path:
    shutil.copytree(model, folder)
    if change is not None:
        path = folder / "tokenizer.json"
        content = json.loads(path.read_text())
        change(content)
        path.chmod(0o644)
        path.write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("change", [swap_two_tokens, other_merges, lower_case])
def test_another_tokenizer_of_the_same_size(change: Change, tmp_path: Path, demo_model: Path) -> None:
    other = copy_of(demo_model, tmp_path / "other", change)
    tokenizer = load_tokenizer(demo_model, trust_remote_code=False)
    with pytest.raises(
        RequestError,
        match="^--baseline other and the model gdn-tiny have tokenizers that encode text differently, .*; evaluate "
        r"each alone and use compress compare\.$",
    ):
        require_same_tokens(open_model(None, None), open_model(str(other), None), tokenizer, False)


def test_the_same_tokenizer_needs_no_note(tmp_path: Path, demo_model: Path) -> None:
    same = copy_of(demo_model, tmp_path / "same", lambda tokenizer: None)
    tokenizer = load_tokenizer(demo_model, trust_remote_code=False)
    assert require_same_tokens(open_model(None, None), open_model(str(same), None), tokenizer, False) is None


def test_a_baseline_without_a_tokenizer_is_read_with_the_models(
    tmp_path: Path, demo_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other, output = copy_of(demo_model, tmp_path / "other"), tmp_path / "result.json"
    for path in other.iterdir():
        if "token" in path.name:
            path.unlink()
    options = ["--tasks", "recall", "--samples", "1", "--windows", "1", "--window-length", "16", "--device", "cpu"]
    assert main(["evaluate", "--baseline", str(other), "--output", str(output), *options]) == 0
    note = "--baseline other has no tokenizer of its own: the model's was used for both"
    assert f"note: {note}" in capsys.readouterr().out
    assert json.loads(output.read_text())["notes"] == [note]
