"""An error names only options that the verb has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from compressor.cli import main

OUTPUT = ["--output-dir", "out", "--device", "cpu"]
LOW_MEMORY = ["--ratio", "0.5", "--low-memory"]


def options_in(text: str) -> set[str]:
    return set(re.findall(r"--[a-z][a-z-]+", text))


@pytest.mark.parametrize(
    ("verb", "words"),
    [
        ([], [*OUTPUT, *LOW_MEMORY]),
        ([], [*OUTPUT, *LOW_MEMORY, "--recover", "--norm-epsilon", "auto", "--method", "fisher"]),
        ([], [*OUTPUT, "--ratio", "0.999"]),
        ([], [*OUTPUT, "--target-state-bytes", "1"]),
        ([], [*OUTPUT, "--ratio", "0.5", "--calibration-samples", "1"]),
        (["sweep"], [*OUTPUT, "--ratios", "0.999"]),
        (["sweep"], [*OUTPUT, "--ratios", "0.5,0.001"]),
        (["sweep"], [*OUTPUT, "--methods", "auto"]),
        (["sweep"], [*OUTPUT, "--sequence-length", "10000000"]),
        (["sweep"], [*OUTPUT, "--sequence-length", "16", "--retrieval-share", "0.5"]),
        (["sweep"], [*OUTPUT, "--calibration-samples", "1"]),
        (["sweep"], [*OUTPUT, "--device", "cuda:99"]),
        (["evaluate"], ["--lengths", "10000000"]),
        (["evaluate"], ["--tasks", "vt", "--lengths", "1"]),
        (["evaluate"], ["--stride", "8"]),
        (["bench"], ["--prefill-lengths", "10000000"]),
        (["bench"], ["--largest-batch", "--device", "cpu"]),
        (["probe"], ["--output", "out", "--length", "8", "--every", "16"]),
        (["recover"], ["absent", "--output-dir", "out", "--save-adapter", "adapter", "--trainable", "mixers"]),
    ],
)
def test_no_error_advises_an_option_that_the_verb_lacks(
    verb: list[str],
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main([*verb, "--help"])
    known = options_in(capsys.readouterr().out)
    assert main([*verb, *words]) == 2
    assert options_in(capsys.readouterr().err) <= known
