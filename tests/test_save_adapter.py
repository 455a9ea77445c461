"""The adapter that a run keeps: what its README.md says loads it, and gives the merged model's logits."""

from __future__ import annotations

import errno
import json
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file

from compressor import adapter_output, distilling, recovering, training_space
from compressor.adapter_output import BASE_RECIPE_FILE
from compressor.cli import main
from compressor.errors import RequestError, RunError
from compressor.evaluation.language_modelling import next_token_logits
from compressor.recovery.student import WHOLE_FILE, Student
from compressor.verification.oracle import relative_error
from compressor.verification.run import ORACLE_TOLERANCE
from tests.families import open_tiny, tiny_tokens
from tests.test_pipeline import FAST, compress, make_source, make_text
from tests.tiny_models import read_weights

# transformers, of what peft asks a model when it loads an adapter.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

SETTINGS = "sequences: 12, sequence_length: 64, batch_size: 2, rank: 2, retrieval_share: 0.0, learning_rate: 0.01"
OPTIONS = ["--no-verify", "--no-evaluate"]
FILES = {"README.md", "adapter_config.json", "adapter_model.safetensors", WHOLE_FILE}


def write_recipe(folder: Path, *more: str) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(f"selection: {{ratio: 0.5}}\nrecovery: {{{', '.join((SETTINGS, *more))}}}\n", encoding="utf-8")
    return path


def described(adapter: Path, language: str) -> str:
    """The code of the adapter's README.md."""
    found = re.findall(rf"```{language}\n(.*?)```", (adapter / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert len(found) == 1
    return str(found[0])


def loaded_as_described(adapter: Path) -> PeftModel:
    """What the code in the adapter's README.md gives."""
    names: dict[str, Any] = {}
    exec(described(adapter, "python"), names)
    model: PeftModel = names["model"]
    return model.eval()


def check_adapter(adapter: Path, base: Path, merged: Path) -> None:
    expected = next_token_logits(open_tiny(merged).model, tiny_tokens(100))
    before = next_token_logits(open_tiny(base).model, tiny_tokens(100))
    adapted = loaded_as_described(adapter)
    assert relative_error(before, expected) > 0.01
    assert relative_error(next_token_logits(adapted, tiny_tokens(100)), expected) < ORACLE_TOLERANCE
    weights = adapted.merge_and_unload().state_dict()
    for name, tensor in read_weights(merged).items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-6, atol=1e-7)
    assert [path.name for path in merged.glob("*.safetensors")] == ["model.safetensors"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    source = make_source("gated_deltanet", folder / "source")
    assert compress(source, folder / "cut", make_text(folder), *OPTIONS) == 0
    return folder / "cut"


@pytest.fixture
def cut(made: Path, tmp_path: Path) -> Path:
    """The compressed folder that `recover_words` are for."""
    return Path(shutil.copytree(made, tmp_path / "cut"))


def recover_words(tmp_path: Path) -> list[str]:
    """Of a run in `tmp_path` that recovers cut as out, and saves the adapter as adapter."""
    words = ["recover", str(tmp_path / "cut"), "--recipe", str(write_recipe(tmp_path)), "--device", "cpu"]
    return [*words, "--output-dir", str(tmp_path / "out"), "--save-adapter", str(tmp_path / "adapter"), *OPTIONS]


def test_an_adapter_fits_the_folder_that_was_recovered(
    cut: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Places are given as seen from one folder, and the README's code runs in another."""
    monkeypatch.chdir(tmp_path)
    words = ["recover", "cut", "--recipe", str(write_recipe(tmp_path)), "--output-dir", "out"]
    assert main([*words, "--save-adapter", "new/adapter", "--device", "cpu", *OPTIONS]) == 0
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    adapter = tmp_path / "new" / "adapter"
    assert {path.name for path in adapter.iterdir()} == FILES
    check_adapter(adapter, tmp_path / "cut", tmp_path / "out")
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"cut", "out", "new", "recipe.yaml", "elsewhere"}
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["adapter"]


@pytest.mark.parametrize("name", ["qw", "q35"])
def test_the_steps_of_the_readme_give_the_merged_model(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The base was not kept: the README says how the same run gives it, from any folder."""
    make_source(name, tmp_path / "source")
    make_text(tmp_path)
    write_recipe(tmp_path)
    monkeypatch.chdir(tmp_path)
    words = ["source", "--calibration", "text.txt", *FAST, *OPTIONS, "--recipe", "recipe.yaml", "--recover"]
    assert main([*words, "--output-dir", "out", "--save-adapter", "the adapter"]) == 0
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    adapter = tmp_path / "the adapter"
    assert {path.name for path in adapter.iterdir()} == FILES | {BASE_RECIPE_FILE}
    command, *words = shlex.split(described(adapter, "bash"))
    assert command == "compress"
    assert main(words) == 0
    check_adapter(adapter, tmp_path / "out-untrained", tmp_path / "out")
    assert "save_adapter: the adapter" in (tmp_path / "out" / "recipe.yaml").read_text(encoding="utf-8")
    report = json.loads((tmp_path / "out" / "compression.json").read_text(encoding="utf-8"))
    assert report["recovery"]["training"]["adapter_folder"] == "the adapter"
    assert "the adapter by itself is in the adapter" in (tmp_path / "out" / "README.md").read_text(encoding="utf-8")


def appears(place: Path) -> Callable[..., None]:
    """What another program does during the run."""

    def appear(*arguments: object) -> None:
        place.mkdir()
        (place / "x").write_text("", encoding="utf-8")

    return appear


@pytest.mark.parametrize("place", ["adapter", "out"])
def test_a_place_that_is_taken_meanwhile_leaves_neither_folder(
    place: str, cut: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = recover_words(tmp_path)
    capsys.readouterr()
    monkeypatch.setattr(recovering, "describe_adapter", appears(tmp_path / place))
    assert main(words) == 1
    error = capsys.readouterr().err
    assert "changed during the run" in error
    assert str(tmp_path / place) in error
    # --overwrite does not replace an adapter.
    assert ("--overwrite" in error) == (place == "out")
    assert ("give another --save-adapter, and run again with --resume" in error) == (place == "adapter")
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"cut", "out.resume", "recipe.yaml", place}
    monkeypatch.undo()
    other = tmp_path / "other"
    changed = ["--save-adapter", str(other)] if place == "adapter" else []
    if place == "out":
        shutil.rmtree(tmp_path / "out")
    assert main([*words, "--resume", *changed]) == 0
    check_adapter(other if changed else tmp_path / "adapter", cut, tmp_path / "out")


@pytest.mark.parametrize(
    ("options", "place", "message"),
    [
        (
            ["--recover", "--recipe", "mixers.yaml"],
            "adapter",
            "adapter: recovery.trainable: mixers trains no adapter; use recovery.trainable: lora, or leave "
            "--save-adapter out",
        ),
        (["--recipe", "lora.yaml"], "adapter", "this run trains nothing; add recovery.train: true"),
        (["--recover", "--recipe", "lora.yaml"], "out", "is in the output folder"),
        (["--recover", "--recipe", "lora.yaml"], "out/adapter", "is in the output folder"),
        (["--recover", "--recipe", "lora.yaml"], ".", "holds the output folder"),
        (["--recover", "--recipe", "lora.yaml"], "source/adapter", "--save-adapter: the output folder"),
        (["--recover", "--recipe", "lora.yaml", "--overwrite"], "full", "exists and is not empty"),
    ],
)
def test_an_adapter_that_cannot_be_is_refused_before_any_work(
    options: list[str],
    place: str,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("", encoding="utf-8")
    make_source("gated_deltanet", tmp_path / "source")
    make_text(tmp_path)
    write_recipe(tmp_path, "trainable: mixers").rename(tmp_path / "mixers.yaml")
    write_recipe(tmp_path).rename(tmp_path / "lora.yaml")
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    words = ["source", "--calibration", "text.txt", *FAST, *options, "--output-dir", "out", "--save-adapter", place]
    assert main(words) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_a_failed_run_leaves_no_adapter(cut: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = recover_words(tmp_path)

    def fail(*arguments: object) -> None:
        raise RunError("a check failed.")

    monkeypatch.setattr(recovering, "describe_adapter", fail)
    assert main(words) == 1
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"cut", "out.resume", "recipe.yaml"}
    monkeypatch.undo()
    assert main([*words, "--resume"]) == 0
    check_adapter(tmp_path / "adapter", cut, tmp_path / "out")


@pytest.mark.usefixtures("cut")
@pytest.mark.parametrize(("owner", "name"), [(Student, "save_adapter"), (adapter_output, "_readme")])
def test_a_full_disk_is_the_adapters(
    owner: object, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:

    def write(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(owner, name, write)
    capsys.readouterr()
    assert main(recover_words(tmp_path)) == 1
    error = capsys.readouterr().err
    assert f"no space left on device while writing {tmp_path / 'adapter'};" in error
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"cut", "out.resume", "recipe.yaml"}


@pytest.mark.usefixtures("cut")
def test_a_full_disk_is_the_outputs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:

    def write(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(distilling, "replace_tensors", write)
    capsys.readouterr()
    assert main(recover_words(tmp_path)) == 1
    assert f"no space left on device while writing {tmp_path / 'out'};" in capsys.readouterr().err


@pytest.mark.usefixtures("cut")
def test_space_for_the_adapter_is_asked_before_any_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many bytes as its files then have, but for their headers."""
    words = recover_words(tmp_path)
    assert main(words) == 0
    files = (tmp_path / "adapter").glob("*.safetensors")
    elements = sum(tensor.numel() for path in files for tensor in load_file(path).values())
    shutil.rmtree(tmp_path / "adapter")
    shutil.rmtree(tmp_path / "out")
    before, asked = sorted(tmp_path.rglob("*")), []

    def refuse(folder: Path, required_bytes: int) -> None:
        asked.append((folder, required_bytes))
        raise RequestError("too little.")

    monkeypatch.setattr(training_space, "refuse_too_little_space", refuse)
    capsys.readouterr()
    assert main(words) == 2
    assert asked == [(tmp_path / "adapter", 4 * elements)]
    assert "--save-adapter: too little." in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before
