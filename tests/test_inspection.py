"""What `compress inspect` says of a model: what is cut in its tensors and config, and what engines make of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from compressor.cli import main
from compressor.inspection import inspect_model, inspection_tables
from tests.architectures.test_cut import cut
from tests.families import MAMBA2_HYBRIDS, SUPPORTED_VARIANTS, open_tiny, random_selection
from tests.test_hub_model import fake_cache
from tests.tiny_models import read_weights, save_tiny

EIGHT_HEADS = {"num_heads": 8, "head_dim": 8}


@pytest.mark.parametrize("name", [*SUPPORTED_VARIANTS, *MAMBA2_HYBRIDS])
def test_what_is_said_to_be_cut_is_what_a_cut_changes(name: str, tmp_path: Path) -> None:
    tiny = open_tiny(save_tiny(name, tmp_path / "source"))
    inspection = inspect_model(str(tiny.folder))
    smaller = cut(tiny, tmp_path / "cut", random_selection(tiny.mixers, 15), "keep")
    before, after = read_weights(tiny.folder), read_weights(smaller.folder)
    mixers = tiny.architecture.mixers(tiny.config, list(before))
    said = {f"{mixer.tensors}.{tensor.name}": tensor for mixer in mixers for tensor in inspection.cut_tensors}
    assert {key for key in before if before[key].shape != after[key].shape} == said.keys()
    for key, tensor in said.items():
        assert before[key].shape[tensor.dim] - after[key].shape[tensor.dim] == tensor.slices // 16
    nested = "text_config" in tiny.raw_config
    raw, changed = (each.raw_config.get("text_config", each.raw_config) for each in (tiny, smaller))
    fields = {f"text_config.{key}" if nested else key for key in changed if raw.get(key) != changed[key]}
    assert set(inspection.cut_fields) == fields


def test_the_command_prints_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_tiny("qn", tmp_path)
    assert main(["inspect", str(folder)]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "Qwen3-Next (transformers), 3 linear-attention layers of 4" in output
    assert "in_proj_qkvz.weight" in output
    assert "config.json: a cut changes linear_key_head_dim" in output


def test_a_hub_model_is_inspected_without_its_weights(tmp_path: Path) -> None:
    repository = fake_cache(tmp_path / "hub")
    for path in repository.rglob("*.safetensors"):
        path.unlink()
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path / "hub")}
    command = [sys.executable, "-m", "compressor", "inspect", "org/tiny", "--revision", "v1"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    output = " ".join(done.stdout.split())
    assert "the weights were not looked at" in output
    assert "in_proj_qkv.weight" in output
    assert "config.json: a cut changes linear_key_head_dim" in output


def test_every_engine_is_explained(tmp_path: Path) -> None:
    inspection = inspect_model(str(save_tiny("qn", tmp_path)))
    sentences = [part for part in inspection_tables(inspection) if isinstance(part, str)]
    for answer in inspection.widths[0].engines:
        assert f"{answer.engine}: {answer.note} ({answer.evidence})" in sentences


def test_the_widths_between_the_listed_ones(tmp_path: Path) -> None:
    """As with one group of Mamba-2, whose convolution's width goes by twice the state's: 8 channels in fours."""
    one_group = inspect_model(str(save_tiny("m2_one_group", tmp_path / "one", overrides=EIGHT_HEADS)))
    assert [(each.engine, each.step) for each in one_group.engine_steps] == [
        ("transformers 5.23 with causal_conv1d 1.6", 4)
    ]
    assert "transformers 5.23 with causal_conv1d 1.6 takes the multiples of 4 alone" in inspection_tables(one_group)
    two_groups = inspect_model(str(save_tiny("m2", tmp_path / "two", overrides=EIGHT_HEADS)))
    assert [each.step for each in two_groups.engine_steps] == [2]
    assert inspect_model(str(save_tiny("gated_deltanet", tmp_path / "fla"))).engine_steps == ()
