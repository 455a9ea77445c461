"""A folder that holds an adapter alone, given where a model belongs."""

from __future__ import annotations

from pathlib import Path

import pytest

from compressor.cli import main


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (["--ratio", "0.5"], "merge it into its base model, and give that."),
        (["recover"], "give the folder that compress wrote and the adapter was saved beside."),
    ],
)
def test_an_adapter_is_no_model(
    words: list[str], remedy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "adapter_config.json").write_text("{}", encoding="utf-8")
    assert main([*words, str(tmp_path)]) == 2
    assert f"{tmp_path} holds an adapter (adapter_config.json) and no model; {remedy}" in capsys.readouterr().err
