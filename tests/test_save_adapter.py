"""The adapter that a run keeps: what its README.md says loads it, and gives the merged model's logits."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel

from compressor.cli import main
from compressor.evaluation.language_modelling import next_token_logits
from compressor.recovery.student import WHOLE_FILE
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


def loaded_as_described(adapter: Path, base: Path) -> PeftModel:
    """What the code in the adapter's README.md gives."""
    found = re.search(r"```python\n(.*?)```", (adapter / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    names: dict[str, Any] = {}
    exec(found[1].replace("'BASE'", repr(str(base))), names)
    model: PeftModel = names["model"]
    return model.eval()


def check_adapter(adapter: Path, base: Path, merged: Path) -> None:
    assert {path.name for path in adapter.iterdir()} == FILES
    expected = next_token_logits(open_tiny(merged).model, tiny_tokens(100))
    before = next_token_logits(open_tiny(base).model, tiny_tokens(100))
    adapted = loaded_as_described(adapter, base)
    assert relative_error(before, expected) > 0.01
    assert relative_error(next_token_logits(adapted, tiny_tokens(100)), expected) < ORACLE_TOLERANCE
    weights = adapted.merge_and_unload().state_dict()
    for name, tensor in read_weights(merged).items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-6, atol=1e-7)
    assert [path.name for path in merged.glob("*.safetensors")] == ["model.safetensors"]


def test_an_adapter_fits_the_folder_that_was_recovered(tmp_path: Path) -> None:
    source, cut = make_source("gated_deltanet", tmp_path / "source"), tmp_path / "cut"
    assert compress(source, cut, make_text(tmp_path), *OPTIONS) == 0
    words = ["recover", str(cut), "--recipe", str(write_recipe(tmp_path)), "--output-dir", str(tmp_path / "out")]
    words += ["--save-adapter", str(tmp_path / "new" / "adapter"), "--device", "cpu", *OPTIONS]
    assert main(words) == 0
    check_adapter(tmp_path / "new" / "adapter", cut, tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"source", "cut", "out", "new", "recipe.yaml", "text.txt"}
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["adapter"]


@pytest.mark.parametrize("name", ["qw", "q35"])
def test_an_adapter_fits_what_the_same_run_gives_without_training(name: str, tmp_path: Path) -> None:
    source, text = make_source(name, tmp_path / "source"), make_text(tmp_path)
    words = [str(source), "--calibration", str(text), *FAST, *OPTIONS, "--recipe", str(write_recipe(tmp_path))]
    assert main([*words, "--output-dir", str(tmp_path / "base")]) == 0
    adapter, out = tmp_path / "adapter", tmp_path / "out"
    assert main([*words, "--output-dir", str(out), "--recover", "--save-adapter", str(adapter)]) == 0
    check_adapter(adapter, tmp_path / "base", out)
    assert f"save_adapter: {adapter}" in (out / "recipe.yaml").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("options", "place", "message"),
    [
        (["--recover", "--recipe", "mixers.yaml"], "adapter", "--trainable mixers trains no adapter; use"),
        (["--recipe", "lora.yaml"], "adapter", "this run trains nothing; add --recover"),
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


def test_a_failed_run_leaves_no_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from compressor import recovering
    from compressor.errors import RunError

    source, cut = make_source("gated_deltanet", tmp_path / "source"), tmp_path / "cut"
    assert compress(source, cut, make_text(tmp_path), *OPTIONS) == 0

    def fail(*arguments: object) -> None:
        raise RunError("a check failed.")

    monkeypatch.setattr(recovering, "_verify", fail)
    words = ["recover", str(cut), "--recipe", str(write_recipe(tmp_path)), "--output-dir", str(tmp_path / "out")]
    words += ["--save-adapter", str(tmp_path / "adapter"), "--device", "cpu", "--no-evaluate"]
    assert main(words) == 1
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"source", "cut", "out.resume", "recipe.yaml", "text.txt"}
    monkeypatch.undo()
    assert main([*words, "--resume", "--no-verify"]) == 0
    check_adapter(tmp_path / "adapter", cut, tmp_path / "out")
