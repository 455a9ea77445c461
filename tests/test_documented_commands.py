"""README.md and docs/: what a newcomer types runs to its end, on the bundled model, each command with its own words.

What stands for a name of the reader's own is made here in the order in which one would come by it. Options are added
where a command without them takes the network or minutes: the bundled text, fewer samples.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path

import pytest

from compressor.cli import main
from compressor.demo import calibration_text_path, demo_model_path
from tests.test_documentation import ROOT, commands

pytestmark = pytest.mark.slow

QUICK = ["--calibration-samples", "8", "--sequence-length", "512", "--retrieval-share", "0", "--device", "cpu"]
CUT = ["--calibration", "demo", *QUICK]
UNPROVEN = [*QUICK, "--recipe", "few.yaml", "--no-verify"]
TRAIN = ["--sequences", "4", "--sequence-length", "128", "--batch-size", "2", "--retrieval-share", "0"]
EVALUATED = ["--tasks", "recall_2", "--lengths", "400", "--samples", "2", "--windows", "2", "--device", "cpu"]
EVALUATION = "evaluation: {tasks: [recall_2], lengths: [400], samples: 2}\n"
BENCHED = ["--batch-sizes", "1", "--prompt-length", "16", "--prefill-lengths", "64", "--steps", "4", "--warm-up", "1"]
# What is added to a verb's documented words, in the order in which a newcomer gets to the verbs.
ADDED = {
    "cut": [*CUT, "--recipe", "few.yaml"],
    "sweep": [*CUT, "--table-only", "--no-refit", "--ratios", "0.5"],
    "inspect": [],
    "validate": [],
    "verify": ["--device", "cpu"],
    "recover": [*TRAIN, "--device", "cpu", "--no-evaluate"],
    "evaluate": EVALUATED,
    "compare": [],
    "bench": [*BENCHED, "--repeats", "1", "--device", "cpu"],
    "probe": ["--length", "256", "--documents", "1", "--every", "128", "--device", "cpu"],
    "push": ["--dry-run"],
}


def verb_of(words: list[str]) -> str:
    return "cut" if words[0].startswith("-") or words[0].isupper() else words[0]


def documented(verb: str) -> list[list[str]]:
    """The words after `compress` of every command of the pages, once each. Several GPUs are not to be had here."""
    lines = dict.fromkeys(command for _, command in commands() if command.startswith("compress "))
    found = [shlex.split(line)[1:] for line in lines]
    return [words for words in found if verb_of(words) == verb]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the reader's own things: texts, a recipe, a cut of the bundled model and two evaluations."""
    folder = tmp_path_factory.mktemp("newcomer")
    text = calibration_text_path().read_text(encoding="utf-8")
    rows = [json.dumps({"text": part}) for part in text.split("\n\n") if part.strip()]
    (folder / "train.jsonl").write_text("\n".join(rows), encoding="utf-8")
    (folder / "held_out.txt").write_text(text[:20_000], encoding="utf-8")
    (folder / "few.yaml").write_text(EVALUATION, encoding="utf-8")
    options = [*CUT, "--recipe", str(folder / "few.yaml"), "--no-verify", "--output-dir", str(folder / "DIR")]
    assert main(["--ratio", "0.5", *options]) == 0
    return folder


def words_of(words: list[str], output: Path) -> list[str]:
    """With the reader's names for a model, its original and a recipe; a cut is written to a folder of its own.

    The bundled model stands for the larger trained ones, which lie beside a clone or do not.
    """
    names = {"MODEL": str(demo_model_path()), "ORIGINAL": str(demo_model_path()), "REPO": "someone/half"}
    names |= {"MODEL2": "DIR", "RECIPE": str(ROOT / "recipes" / "paper-drrqr.yaml")}
    names |= {f"../shared/models/{name}": str(demo_model_path()) for name in ("gdn-28m", "qwen35-18m")}
    names["../shared/text/test_prose.txt"] = "held_out.txt"
    named = [names.get(word, word) for word in words]
    if verb_of(words) in ("cut", "sweep", "probe"):
        named = [str(output) if word == "DIR" else word for word in named]
    return [word.replace("DIR-", f"{output}-") for word in named]


def added_to(words: list[str], output: Path) -> list[str]:
    """What `ADDED` has for the verb, without what would contradict the words. One proof of a verb is enough."""
    verb = verb_of(words)
    if verb == "cut" and "--calibration" in words:
        return UNPROVEN
    if verb == "recover":
        return [*ADDED[verb], *(["--no-verify"] if "--text" in words else ["--output-dir", f"{output}-recovered"])]
    if verb == "probe":
        return [*ADDED[verb], *(["--samples", "1", "--task-length", "512"] if "--samples" in words else ["--no-tasks"])]
    if verb == "push" and "--dry-run" in words:
        return []
    return ADDED[verb]


def test_every_verb_is_run() -> None:
    assert {verb_of(shlex.split(line)[1:]) for _, line in commands() if line.startswith("compress ")} <= ADDED.keys()


@pytest.mark.parametrize("verb", [verb for verb in ADDED if verb != "compare"])
def test_a_newcomer_gets_to_the_end(
    verb: str, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    found = documented(verb)
    assert found, verb
    for number, words in enumerate(found):
        output = tmp_path / str(number)
        given = [*words_of(words, output), *added_to(words, output)]
        assert main(given) == 0, (given, capsys.readouterr().err)


def test_evaluations_are_compared(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files that `compress compare` is shown with come from `compress evaluate`."""
    monkeypatch.chdir(tmp_path)
    ((compare, *words),) = documented("compare")
    files = [word for word in words if word.endswith(".json")]
    for file, model in zip(files, [demo_model_path(), place / "DIR", place / "DIR"], strict=True):
        assert main(["evaluate", str(model), *EVALUATED, "--output", file]) == 0
    assert main([compare, *words]) == 0
    figures = [word for word in words if word.endswith(".png")]
    assert figures
    assert all(Path(file).stat().st_size > 1000 for file in figures)


def test_the_python_of_the_readme_runs(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`from compressor import ...` with the reader's model and folder, the bundled text and few samples."""
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    ((first, rest),) = re.findall(r"^    (from compressor import .*\n)((?:\n|    .*\n)*)", page, re.MULTILINE)
    code = first + re.sub(r"^    ", "", rest, flags=re.MULTILINE)
    assert '"path/or/hub-id"' in code
    quick = '"calibration": {"source": "demo", "samples": 8, "sequence_length": 512, "retrieval_share": 0.0}, '
    quick += '"evaluation": {"tasks": ["recall_2"], "lengths": [400], "samples": 2}, "runtime": {"device": "cpu"}, '
    quick += '"export": {"verify": False}, '
    code = code.replace('"path/or/hub-id"', repr(os.fspath(demo_model_path()))).replace('"model":', f'{quick}"model":')
    exec(code, {})
    assert (tmp_path / "smaller" / "model.safetensors").exists()
