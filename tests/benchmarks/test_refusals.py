"""Every benchmark refuses what cannot be in one sentence, with the exit code of a refusal and before any work."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import pytest

from benchmarks.output_files import check_folder_to_write, draw_figure
from compressor.errors import RequestError
from tests.tiny_models import save_tiny, save_tiny_tokenizer

ROOT = Path(__file__).resolve().parents[2]
SWEEPS = ("allocation", "calibration_robustness", "pca", "quality", "selectors")
"""They read a folder of models and a folder of test texts."""
NEEDED = {
    "completion_prompts": ["--text", "texts", "--output", "prompts.jsonl"],
    "evaluation_speed": ["absent"],
    "instrument": ["models/tiny", "--text", "train.txt", "--tasks", "vt"],
    "random_checkpoint": ["models"],
    "selector_table": ["--results", "selectors.json"],
}
"""Words that argparse asks for."""
FOLDERS = ["--models", "models", "--text", "texts"]
FISHER = ["--models", "models/tiny", "--text", "texts"]
RECOVERY = ["models/tiny", "--text", "train.txt", "--training-text", "train.txt"]
PROBE = ["--models", "models", "--text", "train.txt"]
DENSE = {"model": "m", "method": "dense", "scoring": "qk", "ratio": 0.0, "norm_epsilon": "keep", "key_dim": 8}
FIGURES = {"perplexity": {"prose": 2.0}, "kl_text": 0.0, "kl_prompts": 0.0, "memory": 50.0, "scores": {}}
RECOVERED = {
    **DENSE, **FIGURES, "variant": "dense", "settings": [], "memory_difference": 0.0, "memory_standard_error": None,
    "memory_tokens": 0.5, "seconds": 1.0,
}  # fmt: skip
PROBED = {**DENSE, "losses": [], "heads": {}, "singular_values": [], "tokens": [], "utilisation": []}
FILES = {
    "words.json": "words",
    "other.json": {"rows": [{"model": "m"}], "cells": [{"model": "m"}]},
    "selectors.json": {"rows": [{**DENSE, **FIGURES}]},
    "quality.json": {"cells": [{**DENSE, "perplexity": dict.fromkeys(("prose", "docs", "code"), 2.0), "kl": 0.0}]},
    "recovery.json": {"rows": [RECOVERED]},
    "cut.json": {"rows": [{**RECOVERED, "variant": "cut", "ratio": 0.5}]},
    "probed.json": {"rows": [{**PROBED, "method": "drrqr"}]},
    "fisher.json": {
        "settings": {"seed": 1},
        "cells": [{"model": "tiny", "ratio": 0.5, "norm_epsilon": "keep", "method": "drrqr"}],
    },
}

SWEEP_CASES: list[tuple[list[str], str]] = [
    ([], "--models is missing; name a folder"),
    (["--models", "absent"], "--models absent is no folder"),
    (["--models", "train.txt"], "--models train.txt is no folder"),
    (["--models", "models"], "--text is missing; name a folder"),
    (["--models", "models", "--text", "absent"], "--text absent is no folder"),
    (["--models", "models", "--text", "empty"], 'the text "empty/test_prose.txt" does not exist'),
    (["--models", "empty", "--text", "texts"], "nothing was measured"),
    ([*FOLDERS, "--only", "tinny"], "--only tinny is no model folder in models, which has tiny."),
    (["--results", "absent.json"], "absent.json cannot be read (No such file or directory)"),
    (["--results", "words.json"], "words.json cannot be read (no JSON"),
    (["--results", "empty"], "empty cannot be read (Is a directory)"),
    (["--results", "other.json"], "other.json is no result of benchmarks."),
    (["--device", "tpu"], '--device: "tpu" is no device; give auto, cpu, cuda or cuda:N.'),
    (["--device", "cuda:99"], "--device cuda:99: torch sees"),
    (["--window", "1"], "--window 1 is outside its limits; give at least 2."),
    (["--samples", "0"], "--samples 0 is outside its limits; give at least 1."),
    (["--seed", "-1"], "--seed -1 is outside its limits; give 0 to 2^63 - 1."),
]
CASES: list[tuple[str, list[str], str]] = [
    *((name, *case) for name in SWEEPS for case in SWEEP_CASES),
    *(
        (name, [*FOLDERS, "--calibration", "absent.txt"], 'the calibration source "absent.txt" does not exist')
        for name in ("allocation", "pca", "quality", "selectors")
    ),
    *(
        (name, ["--ratios", "0.5", ratio], f"--ratios {ratio} is outside its limits; give above 0 and below 1.")
        for name in ("allocation", "pca", "selectors", "probe_selectors", "fisher")
        for ratio in ("0", "1", "-0.5", "nan")
    ),
    *(
        (name, [*FOLDERS, "--methods", method], message)
        for name in ("pca", "selectors", "calibration_robustness")
        for method, message in (("drqr", "did you mean drrqr?"), ("auto", "runs the model"))
    ),
    *(
        (name, [*words, "--ratios", "0.99"], "a ratio of 0.99 leaves none of the 16 key channels of tiny")
        for name, words in (("pca", FOLDERS), ("selectors", FOLDERS), ("probe_selectors", PROBE), ("fisher", FISHER))
    ),
    *(
        (name, ["--ratios", "0.5", "0.75", "0.50"], "--ratios: 0.5 is named twice; leave one out.")
        for name in ("allocation", "pca", "selectors", "probe_selectors", "fisher", "selector_table")
    ),
    *(
        (name, ["--methods", "drrqr", "energy", "drrqr"], "--methods: drrqr is named twice; leave one out.")
        for name in ("pca", "selectors", "probe_selectors", "calibration_robustness")
    ),
    ("selectors", ["--only", "tiny", "tiny"], "--only: tiny is named twice"),
    ("selectors", ["--scorings", "qk", "k", "qk"], "--scorings: qk is named twice"),
    ("selectors", ["--norm-epsilon", "keep", "keep"], "--norm-epsilon: keep is named twice"),
    ("fisher", ["--models", "models/tiny", "models/tiny/"], "--models: models/tiny is named twice"),
    ("recovery", ["--variants", "cut", "cut"], "--variants: cut is named twice"),
    ("speed", ["--key-widths", "64", "64"], "--key-widths: 64 is named twice"),
    ("state_tracking", ["--depth", "1", "1"], "--depth: 1 is named twice"),
    ("calibration_robustness", ["--seeds", "0", "0"], "--seeds: 0 is named twice"),
    ("allocation", ["--models", "models", "--text", "texts", "--step", "16"], "--step 16 has no multiple below"),
    ("calibration_robustness", [*FOLDERS, "--sources", "demo"], '--sources "demo" is no NAME=TEXT'),
    ("calibration_robustness", [*FOLDERS, "--sources", "a=absent.txt"], 'source "absent.txt" does not exist'),
    ("calibration_robustness", ["--ratio", "1"], "--ratio 1 is outside"),
    ("calibration_robustness", ["--seeds", "0", "-1"], "--seeds -1 is outside"),
    ("quality", FOLDERS, "texts/test_prose.txt has 7 tokens, and a window 2048"),
    ("quality", ["--results", "quality.json", "--figure", "a.png"], "--figure a.png: no cut that it shows"),
    ("pca", [*FOLDERS, "--calibration", ""], "a text is named by no word"),
    ("pca", ["--results", "selectors.json", "--figure", "a.png"], "--figure a.png: no cut that it shows"),
    ("selectors", ["--results", "selectors.json", "--figure", "a.png"], "--figure a.png: no cut that it shows"),
    ("selectors", ["--output", "a.png", "--figure", "a.png"], "a.png is named for two results"),
    ("selectors", [*FOLDERS, "--memory-methods", "drqr"], "did you mean drrqr?"),
    ("selectors", ["--f", "0.5"], "f = 0.5 cannot bound"),
    ("selectors", ["--retrieval-share", "1.5"], "--retrieval-share 1.5 is outside its limits; give 0 to 1."),
    ("probe_selectors", [], "--models is missing"),
    ("probe_selectors", ["--models", "absent"], "--models absent is no folder"),
    ("probe_selectors", ["--models", "models", "--text", "absent.txt"], 'the text "absent.txt" does not exist'),
    ("probe_selectors", [*PROBE, "--calibration", "absent.txt"], 'the calibration source "absent.txt" does not exist'),
    ("probe_selectors", [*PROBE, "--methods", "drqr"], "did you mean drrqr?"),
    ("probe_selectors", ["--results", "other.json"], "other.json is no result of benchmarks.probe_selectors"),
    ("probe_selectors", ["--results", "probed.json"], "no row of m as it is"),
    ("fisher", [], "--text is missing"),
    ("fisher", ["--text", "texts"], "--models is missing; name model folders"),
    ("fisher", [*FISHER, "--models", "models/tiny", "absent/model"], "absent/model"),
    ("fisher", ["--models", "models/tiny", "--text", "empty"], 'the text "empty/test_prose.txt" does not exist'),
    ("fisher", [*FISHER, "--calibration", "absent.txt"], 'the calibration source "absent.txt" does not exist'),
    ("fisher", ["--results", "other.json"], "other.json is no result of benchmarks.fisher"),
    ("fisher", [*FISHER, "--output", "fisher.json"], "fisher.json was measured with another "),
    ("fisher", [*FISHER, "--window", "4"], "4 is too short for retrieval prompts"),
    ("recovery", [], "--text is missing"),
    ("recovery", ["models/tiny", "--text", "absent.txt"], 'the text "absent.txt" does not exist'),
    ("recovery", ["models/tiny", "--text", "train.txt"], "--training-text is missing"),
    ("recovery", [*RECOVERY, "--training-text", "absent.txt"], 'the calibration source "absent.txt" does not exist'),
    ("recovery", [*RECOVERY, "--variants", "mixer-4M"], '--variants "mixer-4M" is unknown'),
    ("recovery", [*RECOVERY, "--variants", "mixers-0M"], "recovery.sequences: "),
    ("recovery", [*RECOVERY, "--set", "rank"], "--set rank is no NAME=VALUE"),
    ("recovery", [*RECOVERY, "--set", "trainable=lora"], "--set trainable=lora is no NAME=VALUE"),
    ("recovery", [*RECOVERY, "--set", "rang=8"], "recovery.rang is not a setting; did you mean rank?"),
    ("recovery", [*RECOVERY, "--method", "drqr"], "did you mean drrqr?"),
    ("recovery", ["absent/model", *RECOVERY[1:]], "absent/model"),
    ("recovery", [*RECOVERY, "--ratio", "0.01"], "--ratio 0.01 leaves"),
    ("recovery", [*RECOVERY, "--ratio", "1"], "--ratio 1 is outside"),
    ("recovery", [*RECOVERY, "--variants", "dense", "--work", "train.txt"], "--work train.txt is no folder"),
    ("recovery", ["--results", "other.json"], "other.json is no result of benchmarks.recovery"),
    ("recovery", ["--results", "recovery.json", "--figure", "a.png"], "no cut by dense"),
    ("recovery", ["--results", "cut.json", "--figure", "a.png"], "no row of m as it is"),
    ("recovery_cost", ["--device", "cuda:99"], "--device cuda:99: torch sees"),
    ("recovery_cost", ["--device", "cpu", "--steps", "0"], "--steps 0 is outside"),
    ("recovery_cost", ["--device", "cpu", "--warm-up", "-1"], "--warm-up -1 is outside its limits; give at least 0."),
    ("evaluation_speed", ["--device", "cpu", "--text", "absent.txt"], "absent"),
    ("memory", ["--folder", "train.txt"], "--folder train.txt is no folder to write into"),
    ("memory", ["--layers", "0"], "--layers 0 is outside"),
    ("memory", ["--cut", "absent/model", "cut"], "absent/model"),
    ("random_checkpoint", ["--layers", "0"], "--layers 0 is outside"),
    ("random_checkpoint", ["--layers", "1", "--hidden-size", "16"], "models cannot be made (File exists)"),
    ("completion_prompts", ["--text", "absent"], "--text absent is no folder"),
    ("completion_prompts", ["--text", "empty"], 'the text "empty/test_prose.txt" does not exist'),
    ("instrument", ["--text", "absent.txt"], 'the text "absent.txt" does not exist'),
    ("instrument", ["--tasks", "vtt"], 'unknown task "vtt"'),
    ("instrument", ["--shares", "1.5"], "--shares 1.5 is outside its limits; give above 0 and at most 1."),
    ("calibration", ["--samples", "0"], "--samples 0 is outside"),
    ("calibration", ["--device", "cuda:99"], "--device cuda:99: torch sees"),
    ("selection", ["--width", "3"], "--width 3 at --ratio 0.5 keeps 1 channels"),
    ("selection", ["--width", "8", "--ratio", "0.99"], "keeps 0 channels"),
    ("selection", ["--f", "0.5"], "f = 0.5 cannot bound"),
    ("state_truncation", ["--rank", "12", "--width", "8"], "--rank 12 is more than the width 8 of the states"),
    ("state_truncation", ["--model", "absent/model"], "absent/model"),
    ("state_truncation", ["--model", "models/tiny", "--rank", "60"], "--rank 60 is more than the width 16"),
    ("state_truncation", ["--repetitions", "0"], "--repetitions 0 is outside"),
    ("speed", ["--results", "other.json", "--figure", "a.png"], "other.json is no result of benchmarks.speed"),
    ("speed", ["--results", "other.json"], "--results needs --figure"),
    ("speed", ["--device", "cpu", "--key-widths", "512"], "a key width of 512 is over 256"),
    ("speed", ["--device", "cpu", "--key-widths", "0"], "--key-widths 0 is outside"),
    ("speed", ["--device", "cuda:99"], "--device cuda:99: torch sees"),
    ("state_tracking", ["--num-heads", "0"], "--num-heads 0 is outside"),
    ("state_tracking", ["--learning-rate", "nan"], "--learning-rate nan is outside its limits; give above 0"),
    ("state_tracking", ["--train-lengths", "9", "8"], "--train-lengths 9 8: give the shortest"),
    ("state_tracking", ["--checkpoints", "train.txt"], "--checkpoints train.txt is no folder to write into"),
    ("selector_table", ["--recovery", "other.json"], "other.json is no result of benchmarks.recovery"),
]  # fmt: skip


def scripts() -> list[str]:
    """Everything that `python -m benchmarks.NAME` runs."""
    files = (ROOT / "benchmarks").rglob("*.py")
    mains = [path for path in files if "\ndef main(" in path.read_text(encoding="utf-8")]
    return sorted(path.parent.name if path.name == "__main__.py" else path.stem for path in mains)


WRITING = {
    "--output": [name for name in scripts() if name != "random_checkpoint"],
    "--figure": [
        "calibration_robustness", "pca", "probe_selectors", "quality", "recovery", "selector_table", "selectors",
        "speed", "state_tracking",
    ],
    "--heads-figure": ["selectors"],
}  # fmt: skip
"""Which benchmarks have the options."""
_FIGURE = (("a.foo", '".foo" is not drawn; use .png, .svg, .pdf.'), ("train.txt/a.png", "a.png cannot be written"))
UNWRITABLE = {
    "--output": (("empty", "empty is a folder or a device"), ("train.txt/a.json", "a.json cannot be written")),
    "--figure": _FIGURE,
    "--heads-figure": _FIGURE,
}


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, texts and result files, in a folder that nothing may be left in."""
    folder = tmp_path_factory.mktemp("workplace")
    for name in ("texts", "empty"):
        (folder / name).mkdir()
    save_tiny_tokenizer(save_tiny("gated_deltanet", folder / "models" / "tiny"))
    for name in ("train.txt", *(f"texts/test_{text}.txt" for text in ("prose", "docs", "code"))):
        (folder / name).write_text("A text.", encoding="utf-8")
    for name, content in FILES.items():
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return folder


def told(name: str, words: Sequence[str], workplace: Path, monkeypatch: pytest.MonkeyPatch) -> int | str | None:
    """The exit code of a benchmark that is begun in `workplace`, where it leaves nothing."""
    monkeypatch.chdir(workplace)
    before = sorted(workplace.rglob("*"))
    module = import_module(f"benchmarks.{name}" if name != "state_tracking" else "benchmarks.state_tracking.__main__")
    monkeypatch.setattr(sys, "argv", [name, *NEEDED.get(name, []), *words])
    with pytest.raises(SystemExit) as exit_:
        module.main()
    assert sorted(workplace.rglob("*")) == before
    return exit_.value.code


@pytest.mark.parametrize(("name", "words", "message"), CASES)
def test_what_cannot_be_is_refused_in_a_sentence(
    name: str,
    words: list[str],
    message: str,
    workplace: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert told(name, words, workplace, monkeypatch) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert message in said
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize("name", scripts())
def test_where_nothing_can_be_written_is_known_before_the_work(
    name: str, workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [option for option, names in WRITING.items() if name in names]
    assert options or name == "random_checkpoint"
    for option in options:
        for place, message in UNWRITABLE[option]:
            assert told(name, [option, place], workplace, monkeypatch) == 2
            said = capsys.readouterr()
            assert message in said.err
            assert (said.out, len(said.err.splitlines())) == ("", 1)


def test_every_benchmark_refuses_something_else() -> None:
    assert {name for name, _, _ in CASES} == set(scripts())


def test_a_folder_to_write_into_is_made(tmp_path: Path) -> None:
    check_folder_to_write("--work", None)
    check_folder_to_write("--work", tmp_path / "new" / "work")
    assert sorted(tmp_path.rglob("*")) == [tmp_path / "new", tmp_path / "new" / "work"]


def test_a_figure_is_there_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    figure = tmp_path / "a.png"

    def broken(partial: Path) -> None:
        partial.write_text("half")
        raise RequestError("nothing to draw; measure.")

    draw_figure(None, [], broken)
    for shown, message in (([], "--heads-figure .*a.png: no cut"), ([1], "nothing to draw")):
        with pytest.raises(RequestError, match=message):
            draw_figure(figure, shown, broken, "--heads-figure")
        assert list(tmp_path.iterdir()) == []

    def whole(partial: Path) -> None:
        partial.write_text("whole")

    draw_figure(figure, [1], whole)
    assert figure.read_text() == "whole"
    assert list(tmp_path.iterdir()) == [figure]
