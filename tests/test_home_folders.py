"""Paths that begin with `~`: a home folder in every verb, and refused where there is none of that name."""

from __future__ import annotations

from pathlib import Path

import pytest

from compressor.cli import main
from compressor.command_words import path
from compressor.errors import RequestError
from compressor.probe_section import ProbeSection
from compressor.recipe import RuntimeSection
from tests.test_pipeline import FAST, SHORT, compress, make_source, make_text

NOBODY = "~nobody-there/x"
CUT = ["--ratio", "0.5", "--device", "cpu", "--no-evaluate", "--no-verify", "--dry-run"]
TRAINED = ["recover", "absent", "--output-dir", "out"]


@pytest.mark.parametrize(
    "words",
    [
        [*CUT, "--output-dir", NOBODY],
        [*CUT, "--output-dir", "out", "--recover", "--save-adapter", NOBODY],
        [*CUT, "--output-dir", "out", "--save-statistics", NOBODY],
        [*CUT, "--output-dir", "out", "--statistics", NOBODY],
        ["--recipe", NOBODY],
        ["sweep", "--device", "cpu", "--output-dir", NOBODY],
        ["sweep", "--device", "cpu", "--output-dir", "out", "--save-statistics", NOBODY],
        ["recover", NOBODY, "--device", "cpu"],
        [*TRAINED, "--recipe", NOBODY],
        ["evaluate", "--output", NOBODY],
        ["bench", "--output", NOBODY],
        ["probe", "--output", NOBODY],
        ["compare", NOBODY, "b.json"],
        ["compare", "a.json", "b.json", "--figure", f"{NOBODY}.png"],
        ["verify", NOBODY],
        ["validate", NOBODY],
        ["push", NOBODY, "owner/name"],
    ],
    ids=" ".join,
)
def test_a_home_that_is_not_known_is_refused(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"compress: error: {NOBODY}")
    assert said.endswith(": this machine knows no home folder of ~nobody-there; write the path out.\n")
    assert list(tmp_path.iterdir()) == []


def test_probe_from_python_refuses_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from compressor.probing import ProbeRequest, probe

    monkeypatch.chdir(tmp_path)
    with pytest.raises(RequestError, match=f"^{NOBODY}: this machine knows no home folder"):
        probe(ProbeRequest(output=Path(NOBODY), section=ProbeSection(), runtime=RuntimeSection()))
    assert list(tmp_path.iterdir()) == []


def test_a_home_stands_for_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(tmp_path)
    assert path("--output")("~/x.json") == home / "x.json"
    source, text = make_source("gated_deltanet", tmp_path / "source"), make_text(tmp_path)
    words = [*SHORT, "--no-refit"]
    assert compress(source, tmp_path / "first", text, *words, "--save-statistics", "~/saved.safetensors") == 0
    assert (home / "saved.safetensors").is_file()
    assert compress(source, tmp_path / "second", text, *words, "--statistics", "~/saved.safetensors") == 0
    chosen = [(tmp_path / name / "selection.json").read_text() for name in ("first", "second")]
    assert chosen[0] == chosen[1]
    swept = ["sweep", str(source), "--ratios", "0.5", "--methods", "drrqr", "--calibration", str(text), *FAST]
    assert main([*swept, "--output-dir", "~/swept", "--no-verify"]) == 0
    assert (home / "swept" / "sweep.json").is_file()
    assert not (tmp_path / "~").exists()
