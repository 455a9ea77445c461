"""`recover --resume` with settings of another run: refused by name, before anything is loaded."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from compressor import recovering
from compressor.cli import main
from compressor.errors import RunError
from tests.test_pipeline import compress, make_source, make_text
from tests.test_save_adapter import OPTIONS, write_recipe


@pytest.mark.parametrize(
    ("more", "difference"),
    [
        (["--trainable", "mixers"], "differs in trainable lora there and mixers here;"),
        (["--rank", "3"], "differs in rank 2 there and 3 here;"),
        (["--learning-rate", "0.02"], "differs in learning_rate 0.01 there and 0.02 here;"),
    ],
)
def test_settings_of_another_run_are_named_before_any_work(
    more: list[str],
    difference: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source, cut = make_source("gated_deltanet", tmp_path / "source"), tmp_path / "cut"
    assert compress(source, cut, make_text(tmp_path), *OPTIONS) == 0
    words = ["recover", str(cut), "--recipe", str(write_recipe(tmp_path)), "--device", "cpu", *OPTIONS]
    words += ["--output-dir", str(tmp_path / "out")]

    def fail(*arguments: object) -> None:
        raise RunError("late.")

    monkeypatch.setattr(recovering, "_describe", fail)
    assert main(words) == 1
    monkeypatch.setattr(recovering, "_load", fail)
    capsys.readouterr()
    assert main(words) == 2
    assert "is left of an earlier run; give --resume" in capsys.readouterr().err
    assert main([*words, "--resume", *more]) == 2
    error = capsys.readouterr().err
    assert f"checkpoint-6 belongs to another run, which {difference} resume with" in error
    assert re.search("[0-9a-f]{64}", error) is None
    assert main([*words, "--resume"]) == 1
