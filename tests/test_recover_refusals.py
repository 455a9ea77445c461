"""What `compress recover` says where a folder, its original or the disk is not as it must be, and what is left then."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from compressor.cli import main
from compressor.recovery.loop import TrainingLoop
from tests.test_interruption import file_size_limit
from tests.test_pipeline import compress, make_source, make_text
from tests.test_recover import refused
from tests.tiny_models import edit_config, read_weights, write_weights

TRAIN = ["--sequences", "8", "--sequence-length", "64", "--batch-size", "2", "--rank", "2", "--retrieval-share", "0"]
TRAIN += ["--no-evaluate", "--no-verify"]


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("refusals")
    source = make_source("gated_deltanet", folder / "source")
    assert compress(source, folder / "half", make_text(folder), "--no-verify", "--no-evaluate") == 0
    return folder / "half"


@pytest.fixture
def copy(cut: Path, tmp_path: Path) -> Path:
    """Of the cut and of its source, which its recipe names."""
    shutil.copytree(cut.parent / "source", tmp_path / "source")
    folder = Path(shutil.copytree(cut, tmp_path / "half"))
    recipe = (folder / "recipe.yaml").read_text(encoding="utf-8")
    moved = recipe.replace(str(cut.parent / "source"), str(tmp_path / "source"))
    (folder / "recipe.yaml").write_text(moved, encoding="utf-8")
    return folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_that_cannot_be_copied_is_one_sentence(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with file_size_limit(50_000):
        assert main(["recover", str(copy), *TRAIN, "--device", "cpu"]) == 1
    assert capsys.readouterr().err == (
        f"compress: error: {copy}/model.safetensors could not be copied to {copy}-recovered (File too large); raise "
        "the limit of its file system or of `ulimit -f`, and run again with --resume.\n"
    )
    assert names(copy.parent) == ["half", "source"]


def test_a_model_that_changed_since_the_cut_is_no_teacher(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = copy.parent / "source"
    weights = read_weights(source)
    weights["lm_head.weight"][0, 0] += 1
    write_weights(source, weights)
    refused(
        capsys, [str(copy), *TRAIN],
        f"the weights of the model at {source} are not those that half was cut from; it changed since the cut: give "
        "the place of the original as it was with --teacher.",
    )  # fmt: skip
    said = "the weights of --teacher source are not those that half was cut from; give the model that it was cut from."
    refused(capsys, [str(copy), *TRAIN, "--teacher", str(source)], said)


def test_a_teacher_that_was_not_given_is_not_called_an_option(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit_config(copy.parent / "source", {"vocab_size": 99})
    said = f"the model at {copy.parent}/source has a vocabulary of 99 tokens and half one of"
    refused(capsys, [str(copy), *TRAIN], said, "with --teacher.")


def test_a_config_without_a_model_is_refused_in_one_sentence(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in (copy, copy.parent / "source"):
        edit_config(folder, {"hidden_act": "relu"})
    said = f"the stock classes make no model from {copy}/config.json (Unsupported hidden_act: relu); use the config"
    refused(capsys, [str(copy), *TRAIN], said)


def test_a_selection_is_asked_for_before_anything_is_hashed(
    copy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("compressor.recovering.weights_sha256", pytest.fail)
    file = copy / "selection.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    content["key_dim"]["before"] *= 2
    file.write_text(json.dumps(content), encoding="utf-8")
    refused(capsys, [str(copy), *TRAIN], "selection.json names channels of 32 of a head and the original has 16;")
    file.unlink()
    refused(capsys, [str(copy), *TRAIN], "selection.json cannot be read (No such file or directory)")


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("recovery: {temprature: 2}", "recovery.temprature is not a setting; did you mean temperature? Known here: re"),
        ("recovery: {zzz: 2}", "recovery.zzz is not a setting; known here: refit, train, source, column, config,"),
        ("runtime: {sed: 2}", "runtime.sed is not a setting; did you mean seed? Known here: seed, dtype, device,"),
        ("recovery: {temperature: 1.0e-300}", "recovery.temperature: Input should be greater than or equal to 0.01"),
        ("recovery: {alpha: 1.0e+30}", "recovery.alpha: Input should be less than or equal to 1000000"),
        ("recovery: {kl_weight: 1.0e+30}", "recovery.kl_weight: Input should be less than or equal to 1000000"),
    ],
)
def test_a_section_names_its_own_settings(
    written: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "recipe.yaml").write_text(f"{written}\n", encoding="utf-8")
    refused(capsys, ["absent", "--recipe", str(tmp_path / "recipe.yaml")], message)


@pytest.mark.parametrize(("every", "left"), [("2", ["half", "half-recovered.resume", "source"]), ("9", None)])
def test_a_failed_training_leaves_what_can_be_gone_on_with(
    every: str,
    left: list[str] | None,
    copy: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    mean, steps = TrainingLoop._mean, iter((1.0, 1.0, float("nan")))
    monkeypatch.setattr(TrainingLoop, "_mean", lambda loop, terms: mean(loop, terms) * next(steps))
    assert main(["recover", str(copy), *TRAIN, "--checkpoint-every", every, "--device", "cpu"]) == 1
    assert "step 3: the loss is nan" in capsys.readouterr().err
    assert names(copy.parent) == (left or ["half", "source"])
