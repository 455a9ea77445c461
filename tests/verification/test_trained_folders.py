"""Of a trained folder, what training leaves alone is the original's; so is a cut before it is trained."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from compressor.architectures.registry import architecture_of
from compressor.artifacts import Selection
from compressor.checkpoint.config_file import CONFIG_FILE, read_config
from compressor.cli import main
from compressor.recovery.student import StudentSettings, prepare_student
from compressor.reporting import read_compression
from compressor.verification.changed import refitted_tensors, trained_tensors
from compressor.verification.request import find_original
from compressor.verification.slices import first_difference, read_selection
from tests.families import tiny_checkpoint
from tests.test_pipeline import compress, make_source, make_text
from tests.tiny_models import read_weights, write_weights
from tests.verification.facts import oracle_facts

TRAIN = ["--sequences", "4", "--sequence-length", "64", "--batch-size", "2", "--retrieval-share", "0"]
TRAIN += ["--no-evaluate", "--no-verify", "--device", "cpu"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A source, its cut, and the cut whose query projections got adapters."""
    root = tmp_path_factory.mktemp("trained")
    source, cut, trained = make_source("gated_deltanet", root / "source"), root / "cut", root / "trained"
    assert compress(source, cut, make_text(root), "--no-verify", "--no-evaluate") == 0
    words = ["recover", str(cut), "--output-dir", str(trained), *TRAIN, "--rank", "2", "--targets", "q_proj"]
    assert main([*words, "--learning-rate", "1e-2"]) == 0
    return source, cut, trained


def changed(folder: Path, place: Path, ending: str, factor: float = 0.0) -> tuple[Path, str]:
    """A copy of `folder` whose first tensor of that name is multiplied by `factor`, and its name."""
    copy = Path(shutil.copytree(folder, place))
    tensors = read_weights(copy)
    name = next(name for name in tensors if name.endswith(ending))
    tensors[name] = tensors[name] * factor
    write_weights(copy, tensors)
    return copy, name


def trained_facts(folder: Path, source: Path, *context: Any) -> dict[str, Any]:
    """By the options that `compress verify` finds in the folder's own files."""
    original, _ = find_original(folder, None, read_compression(folder) or {})
    assert original is not None
    assert (original.folder, original.trained, original.targets) == (source, True, ("q_proj",))
    return oracle_facts(folder, source, *context, *original.words[2:])


def test_what_training_changes_passes_and_its_logits_are_not_compared(
    folders: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, cut, trained = folders
    before, after = read_weights(cut), read_weights(trained)
    assert any("q_proj" in name and not torch.equal(before[name], after[name]) for name in before)
    facts = trained_facts(trained, source, monkeypatch, capsys)
    assert facts["first_difference"] is facts["relative_error"] is None
    untrained = oracle_facts(trained, source, monkeypatch, capsys, "--refitted")
    assert untrained["first_difference"] is not None


@pytest.mark.parametrize("ending", ["mlp.down_proj.weight", "embeddings.weight", "mlp_norm.weight", "k_proj.weight"])
def test_what_training_leaves_alone_is_compared(
    ending: str,
    folders: tuple[Path, Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    copy, name = changed(folders[2], tmp_path / "copy", ending)
    assert trained_facts(copy, folders[0], monkeypatch, capsys)["first_difference"] == name


@pytest.mark.parametrize("ending", ["q_proj.weight", "attn_norm.weight", "o_norm.weight", "A_log"])
def test_a_trained_tensor_may_have_any_value(
    ending: str,
    folders: tuple[Path, Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    copy, _ = changed(folders[2], tmp_path / "copy", ending, 1.01)
    assert trained_facts(copy, folders[0], monkeypatch, capsys)["first_difference"] is None


@pytest.mark.parametrize("kept", [False, True])
def test_an_output_projection_without_adapter_is_compared_unless_it_was_refitted(
    kept: bool,
    folders: tuple[Path, Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    copy, name = changed(folders[2], tmp_path / "copy", "o_proj.weight", 1.01)
    report = json.loads((copy / "compression.json").read_text(encoding="utf-8"))
    report["recovery"]["refit"]["kept"] = kept
    (copy / "compression.json").write_text(json.dumps(report), encoding="utf-8")
    assert trained_facts(copy, folders[0], monkeypatch, capsys)["first_difference"] == (None if kept else name)


OTHER_BYTES = "model.safetensors has the SHA-256"


@pytest.mark.parametrize(
    ("kept", "ridge", "recorded", "refused"),
    [
        (True, 0.1, False, None),
        (True, 0.1, True, OTHER_BYTES),
        (True, None, True, "is not the slice of the teacher's"),
        (False, 0.1, True, "is not the slice of the teacher's"),
    ],
)
def test_a_changed_output_projection_of_a_cut_is_trained_only_where_it_was_refitted(
    kept: bool,
    ridge: float | None,
    recorded: bool,
    refused: str | None,
    folders: tuple[Path, Path, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    copy, name = changed(folders[1], tmp_path / "copy", "o_proj.weight", 1.01)
    report = json.loads((copy / "compression.json").read_text(encoding="utf-8"))
    report["recovery"]["refit"]["kept"] = kept
    report["recovery"]["refit"]["layers"][0]["ridge"] = ridge
    if not recorded:  # as by earlier versions
        del report["files"]
    (copy / "compression.json").write_text(json.dumps(report), encoding="utf-8")
    words = ["recover", str(copy), "--output-dir", str(tmp_path / "out"), *TRAIN, "--rank", "2"]
    assert main(words) == (0 if refused is None else 2)
    message = capsys.readouterr().err
    assert refused is None or refused in message
    assert refused in (None, OTHER_BYTES) or name in message


def test_a_trained_tensor_keeps_the_shape_of_the_cut(
    folders: tuple[Path, Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source, _, trained = folders
    architecture = architecture_of(read_config(trained / CONFIG_FILE))
    selection = read_selection(trained, architecture.mixers(architecture.load_config(trained), ()))
    narrower = Selection(selection.head_k_dim, {layer: kept[:, 1:] for layer, kept in selection.kept.items()})
    own = trained_tensors(architecture, trained, None)
    assert first_difference(architecture, source, trained, selection, own) is None
    assert first_difference(architecture, source, trained, narrower, own) in own


@pytest.mark.slow
def test_verify_holds_a_trained_folder_against_the_original(
    folders: tuple[Path, Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    right, _ = changed(folders[2], tmp_path / "right", "q_proj.weight", 1.01)
    assert main(["verify", str(right), "--device", "cpu"]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "trained after the cut" in output
    assert "what training leaves alone was checked" in output
    wrong, name = changed(folders[2], tmp_path / "wrong", "mlp.down_proj.weight")
    assert main(["verify", str(wrong), "--device", "cpu"]) == 1
    assert f"{name} is not the slice of the original's that selection.json says" in capsys.readouterr().err


@pytest.mark.parametrize("ending", ["mlp.up_proj.weight", "k_proj.weight"])
def test_a_changed_cut_is_refused_before_training(
    ending: str, folders: tuple[Path, Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One byte of the file."""
    copy = Path(shutil.copytree(folders[1], tmp_path / "copy"))
    path = next(copy.glob("*.safetensors"))
    tensors = load_file(path)
    name = next(name for name in tensors if name.endswith(ending))
    tensors[name].view(torch.uint8)[0, 0] ^= 1
    save_file(tensors, path, {"format": "pt"})
    assert main(["recover", str(copy), "--output-dir", str(tmp_path / "out"), *TRAIN, "--rank", "2"]) == 2
    assert f"{name} is not the slice of the teacher's" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy"]


@pytest.mark.parametrize("name", ["gated_deltanet_hybrid", "kda", "q35", "m2", "oh_parts"])
@pytest.mark.parametrize(
    ("trainable", "rank", "targets"), [("mixers", 1, None), ("lora", 4, None), ("lora", 1, "first projection")]
)
def test_the_list_is_what_a_student_writes(
    trainable: str, rank: int, targets: str | None, name: str, tmp_path: Path
) -> None:
    """Against the names that a student of the loaded model would merge; on the meta device here."""
    checkpoint = tiny_checkpoint(name, tmp_path)
    available = checkpoint.architecture.recovery_targets(checkpoint.model, checkpoint.mixers)
    named: Sequence[str] | None = None if targets is None else (available.projections[0].rpartition(".")[2],)
    settings = StudentSettings(
        "lora" if trainable == "lora" else "mixers", rank, 2.0, None if named is None else tuple(named), 0
    )
    student = prepare_student(checkpoint.architecture, checkpoint.model, checkpoint.mixers, settings)
    dtypes = {key: tensor.dtype for key, tensor in read_weights(tmp_path).items()}
    written = student.merged_tensors(dtypes).keys()
    assert trained_tensors(checkpoint.architecture, tmp_path, named) == set(written)


def test_refitted_layers_are_named_one_by_one(folders: tuple[Path, Path, Path]) -> None:
    architecture = architecture_of(read_config(folders[1] / CONFIG_FILE))
    both = refitted_tensors(architecture, folders[1])
    first = refitted_tensors(architecture, folders[1], {0})
    assert len(both) == 2
    assert len(first) == 1
    assert first < both
    assert refitted_tensors(architecture, folders[1], frozenset()) == frozenset()
