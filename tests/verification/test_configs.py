"""The config of a cut is that of its original but for widths and a scaled epsilon, also after training."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from compressor.architectures.registry import architecture_of
from compressor.checkpoint.config_file import dump_config, read_config
from compressor.cli import main
from compressor.errors import RunError
from compressor.preparation import open_model
from compressor.verification import run
from compressor.verification.configs import config_difference, tokenizer_note
from tests.families import FIXED_NORM_EPSILON, WITHOUT_SCALE
from tests.test_pipeline import compress, make_source, make_text
from tests.tiny_models import VARIANTS, edit_config, save_tiny

TRAIN = ["--sequences", "4", "--sequence-length", "64", "--batch-size", "2", "--rank", "2", "--retrieval-share", "0"]
TRAIN += ["--no-evaluate", "--no-verify", "--device", "cpu"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A source, its cut with a scaled epsilon, and the cut trained."""
    root = tmp_path_factory.mktemp("configs")
    source, cut, trained = make_source("gated_deltanet", root / "source"), root / "cut", root / "trained"
    words = ["--norm-epsilon", "scaled", "--no-verify", "--no-evaluate"]
    assert compress(source, cut, make_text(root), *words) == 0
    assert main(["recover", str(cut), "--output-dir", str(trained), *TRAIN]) == 0
    return source, cut, trained


def cut_config(folder: Path, keep: int, epsilon: float | None) -> dict[str, Any]:
    configured = open_model(str(folder), None)
    return configured.architecture.cut_config(configured.raw_config, configured.config, keep, epsilon)


def difference(original: Path, folder: Path, scaled: bool) -> str | None:
    return config_difference(architecture_of(read_config(folder / "config.json")), original, folder, scaled)


@pytest.mark.parametrize("name", VARIANTS)
def test_what_a_cut_writes_is_no_difference_in_any_family(name: str, tmp_path: Path) -> None:
    original, folder = save_tiny(name, tmp_path / "original"), tmp_path / "cut"
    folder.mkdir()
    configured = open_model(str(original), None)
    width, policies = configured.mixers[0].head_k_dim, [False]
    if name not in WITHOUT_SCALE + FIXED_NORM_EPSILON and configured.architecture.norm_epsilon_in_config:
        policies.append(True)
    for scaled in policies:
        epsilon = configured.architecture.norm_epsilon(configured.config) * 2 if scaled else None
        config = cut_config(original, width // 2, epsilon)
        (folder / "config.json").write_text(dump_config(config), encoding="utf-8")
        assert difference(original, folder, scaled) is None
        # Read by the stock classes, and not by the words.
        edit_config(folder, {"transformers_version": "0", "architectures": None, "a_field_of_ours": 1})
        assert "has a_field_of_ours = 1 where the cut of" in (difference(original, folder, scaled) or "")
        edit_config(folder, remove=["a_field_of_ours"])
        assert difference(original, folder, scaled) is None


CHANGES: tuple[tuple[dict[str, Any], str], ...] = (
    ({"norm_eps": 0.01}, "norm_eps = 0.01 where the cut of"),
    ({"hidden_act": "relu"}, "hidden_act = 'relu' where the cut of"),
    ({"tie_word_embeddings": True}, "tie_word_embeddings = True where the cut of"),
    ({"fuse_norm": False, "use_short_conv": False}, "(1 more fields differ)"),
)


@pytest.mark.parametrize(("changes", "told"), CHANGES)
def test_an_edited_config_is_not_trained_on(
    changes: Mapping[str, Any],
    told: str,
    folders: tuple[Path, Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    copy = edit_config(Path(shutil.copytree(folders[1], tmp_path / "copy")), changes)
    monkeypatch.setattr("compressor.recovering.weights_sha256", pytest.fail)
    assert main(["recover", str(copy), "--output-dir", str(tmp_path / "out"), *TRAIN]) == 2
    message = capsys.readouterr().err
    assert told in message
    assert str(copy / "config.json") in message
    assert str(folders[0] / "config.json") in message
    assert "set it back, or compress the original again." in message
    assert [path.name for path in tmp_path.iterdir()] == ["copy"]


@pytest.mark.parametrize("of", ["cut", "trained"])
@pytest.mark.parametrize(("changes", "told"), CHANGES)
def test_an_edited_config_is_not_verified(
    changes: Mapping[str, Any],
    told: str,
    of: str,
    folders: tuple[Path, Path, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    copy = edit_config(Path(shutil.copytree(folders[0].parent / of, tmp_path / "copy")), changes)
    assert main(["verify", str(copy), "--device", "cpu"]) == 1
    message = capsys.readouterr().err
    assert told in message
    assert "the checkpoint is not the cut it says: set it back, or compress again." in message


def test_the_epsilon_of_the_other_policy_is_a_difference(folders: tuple[Path, Path, Path]) -> None:
    source, cut, _ = folders
    assert difference(source, cut, True) is None
    assert "norm_eps = 2e-06 where the cut of" in (difference(source, cut, False) or "")


def test_a_config_of_another_family_is_a_difference(folders: tuple[Path, Path, Path], tmp_path: Path) -> None:
    other = save_tiny("delta_net", tmp_path / "other")
    assert "has model_type = 'delta_net' where the cut of" in (difference(folders[0], other, False) or "")


def test_a_tokenizer_of_its_own_is_noted(folders: tuple[Path, Path, Path], tmp_path: Path) -> None:
    source, cut, trained = folders
    assert tokenizer_note(source, cut) is None
    assert tokenizer_note(source, trained) is None
    copy = Path(shutil.copytree(cut, tmp_path / "copy"))
    settings = json.loads((copy / "tokenizer_config.json").read_text(encoding="utf-8"))
    (copy / "tokenizer_config.json").write_text(json.dumps(settings | {"model_max_length": 5}), encoding="utf-8")
    (copy / "chat_template.jinja").write_text("{{ messages }}", encoding="utf-8")
    note = tokenizer_note(source, copy)
    assert note is not None
    assert note.startswith("chat_template.jinja, tokenizer_config.json: not as in the original")


def test_logits_that_are_not_the_originals_fail(
    folders: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, cut, _ = folders
    configured = open_model(str(cut), None)
    facts = {"first_difference": None, "relative_error": 0.5, "generation_error": 0.0}
    monkeypatch.setattr(run, "_run_stock_load", lambda *given: {"fla_softmax_layers": False})
    monkeypatch.setattr(run, "_run_oracle", lambda *given: facts)
    original = run.Original(source, True, True)
    with pytest.raises(RunError, match="dropped channels zeroed by 0.5 .* the checkpoint is not the cut it says"):
        run.verify_folder(cut, configured.architecture, run.torch.device("cpu"), [1], original)
