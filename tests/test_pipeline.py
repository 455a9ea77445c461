"""Whole runs on tiny checkpoints made on the spot, through the command."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from compressor.cli import main
from compressor.demo import calibration_text_path
from tests.tiny_models import edit_config, read_weights, save_tiny, save_tiny_tokenizer, write_weights
from tests.verification.facts import oracle_facts

FAST = ["--round-to", "1", "--calibration-samples", "6", "--sequence-length", "80", "--device", "cpu"]
SHORT = ["--no-verify", "--no-evaluate"]


def make_source(name: str, folder: Path, dtype: torch.dtype = torch.float32, shards: str | None = None) -> Path:
    return save_tiny_tokenizer(save_tiny(name, folder, dtype, max_shard_size=shards))


def make_text(folder: Path) -> Path:
    path = folder / "text.txt"
    path.write_text(calibration_text_path().read_text(encoding="utf-8")[:4000].lower(), encoding="utf-8")
    return path


def compress(source: Path, output: Path, text: Path, *options: str) -> int:
    words = [str(source), "--output-dir", str(output), "--calibration", str(text), *FAST, *options]
    return main(words if "--ratio" in options or "--target-dim" in options else [*words, "--ratio", "0.5"])


def hashes(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize(
    "name",
    [
        "gated_deltanet_hybrid",
        pytest.param("gated_deltaproduct_hybrid", marks=pytest.mark.slow),
        pytest.param("delta_net_sum_norm", marks=pytest.mark.slow),
        pytest.param("q35", marks=pytest.mark.slow),
        pytest.param("qw", marks=pytest.mark.slow),
        pytest.param("qn_experts", marks=pytest.mark.slow),
        pytest.param("qw_experts", marks=pytest.mark.slow),
        pytest.param("oh_parts", marks=pytest.mark.slow),
    ],
)
def test_run_is_verified_and_complete(name: str, tmp_path: Path) -> None:
    source, output = make_source(name, tmp_path / "source"), tmp_path / "out"
    assert compress(source, output, make_text(tmp_path)) == 0
    report = json.loads((output / "compression.json").read_text())
    assert report["schema"] == 1
    assert report["key_dim"] == {"before": 16, "after": 8}
    before, after = report["state_bytes_per_sequence"]["before"], report["state_bytes_per_sequence"]["after"]
    assert (before, after) == (before, before // 2)
    assert report["parameters"]["after"] == sum(tensor.numel() for tensor in read_weights(output).values())
    assert report["verification"]["passed"]
    assert report["verification"]["oracle_relative_error"] < 1e-4
    assert report["evaluation"]["after"]["kl_text"] > 0
    assert len(report["layers"]) == (3 if name.startswith(("q", "oh")) else 2)
    assert {"config.json", "model.safetensors", "README.md", "recipe.yaml", "selection.json", "tokenizer.json"} <= set(
        hashes(output)
    )
    assert not (tmp_path / "out.resume").exists()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_recipe_of_a_result_reproduces_it(tmp_path: Path) -> None:
    source, output, again = make_source("q35", tmp_path / "source"), tmp_path / "out", tmp_path / "again"
    assert compress(source, output, make_text(tmp_path), "--no-verify", "--seed", "5") == 0
    assert main(["--recipe", str(output / "recipe.yaml"), "--output-dir", str(again)]) == 0
    first, second = hashes(output), hashes(again)
    for name in ("model.safetensors", "config.json", "selection.json", "tokenizer.json"):
        assert first[name] == second[name]


def test_same_seed_same_selection_other_seed_other_random_selection(tmp_path: Path) -> None:
    source, text = make_source("gated_deltanet", tmp_path / "source"), make_text(tmp_path)
    chosen = {}
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        assert compress(source, tmp_path / name, text, "--method", "random", "--seed", seed, *SHORT) == 0
        chosen[name] = (tmp_path / name / "selection.json").read_text()
    assert chosen["a"] == chosen["b"] != chosen["c"]


def test_shards_and_dtypes_and_companions_survive(tmp_path: Path) -> None:
    source = make_source("q35", tmp_path / "source", shards="20KB")
    index = json.loads((source / "model.safetensors.index.json").read_text())
    for file in set(index["weight_map"].values()):
        tensors = load_file(source / file)
        mixed = {n: t if n.endswith(("A_log", "linear_attn.norm.weight")) else t.bfloat16() for n, t in tensors.items()}
        save_file(mixed, source / file)
    companions = {
        "chat_template.jinja": "{{ messages }}", "LICENSE": "x", "preprocessor_config.json": "{}",
        "generation_config.json": '{"do_sample": false, "temperature": 0.6}',
    }  # fmt: skip
    for name, text in companions.items():
        (source / name).write_text(text)
    edit_config(source, {"torch_dtype": "bfloat16"}, remove=["dtype"])
    output = tmp_path / "out"
    assert compress(source, output, make_text(tmp_path), "--max-shard-size", "15KB", *SHORT) == 0
    before, after = read_weights(source), read_weights(output)
    assert before.keys() == after.keys()
    assert {name: tensor.dtype for name, tensor in before.items()} == {name: t.dtype for name, t in after.items()}
    name = next(name for name in before if name.endswith("A_log"))
    assert torch.equal(before[name], after[name])
    assert len(list(output.glob("model-*-of-*.safetensors"))) > 1
    assert all((output / name).read_text() == text for name, text in companions.items())
    config = json.loads((output / "config.json").read_text())
    assert config["torch_dtype"] == "bfloat16"
    assert "dtype" not in config


@pytest.mark.parametrize("verified", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_result_can_be_compressed_again(
    verified: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, text = make_source("gated_deltanet", tmp_path / "source"), make_text(tmp_path)
    first, second = tmp_path / "first", tmp_path / "second"
    assert compress(source, first, text, "--target-dim", "12", "--norm-epsilon", "scaled", "--no-verify") == 0
    words = ["--target-dim", "6", "--norm-epsilon", "scaled", *["--no-verify"] * (not verified)]
    assert compress(first, second, text, *words) == 0
    report = json.loads((second / "compression.json").read_text())
    refitted = ["--refitted"] * report["recovery"]["refit"]["kept"]
    facts = oracle_facts(second, first, monkeypatch, capsys, "--scaled", *refitted)
    assert facts["first_difference"] is None
    assert facts["relative_error"] < 1e-4
    assert report["base_compression"]["key_dim"] == {"before": 16, "after": 12}
    assert report["key_dim"] == {"before": 12, "after": 6}
    epsilons = [json.loads((folder / "config.json").read_text())["norm_eps"] for folder in (source, first, second)]
    assert epsilons[1] == pytest.approx(epsilons[0] * 16 / 12)
    assert epsilons[2] == pytest.approx(epsilons[0] * 16 / 6)
    assert len(list(second.glob("*.safetensors"))) == 1


def test_scaled_epsilon_reports_both_divergences(tmp_path: Path) -> None:
    source, text = make_source("q35", tmp_path / "source"), make_text(tmp_path)
    reports = {}
    for policy in ("keep", "scaled"):
        words = ["--norm-epsilon", policy, "--no-refit", "--no-verify"]
        assert compress(source, tmp_path / policy, text, *words) == 0
        reports[policy] = json.loads((tmp_path / policy / "compression.json").read_text())
    for policy, report in reports.items():
        assert report["norm_epsilon"]["policy"] == policy
        assert report["evaluation"]["after"]["kl_text"] == report["evaluation"]["by_norm_epsilon"][policy]["kl_text"]
    assert reports["scaled"]["norm_epsilon"]["smallest_mean_square_of_other_norms"] > 0
    kept, scaled = (reports[policy]["evaluation"]["by_norm_epsilon"] for policy in ("keep", "scaled"))
    for policy in ("keep", "scaled"):  # up to the other norms, which read the same epsilon
        assert kept[policy]["kl_text"] == pytest.approx(scaled[policy]["kl_text"], rel=3e-2)


def test_scaled_epsilon_is_refused_where_other_norms_are_small(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = make_source("gated_deltanet", tmp_path / "source")
    tensors = read_weights(source)
    write_weights(source, tensors | {"model.embeddings.weight": tensors["model.embeddings.weight"] * 1e-3})
    assert compress(source, tmp_path / "out", make_text(tmp_path), "--norm-epsilon", "scaled") == 2
    error = capsys.readouterr().err
    assert "model.layers.0.attn_norm reads the same field with inputs of mean square" in error
    assert "use --norm-epsilon keep" in error
    assert not (tmp_path / "out").exists()


def test_values_that_the_config_leaves_to_its_class(tmp_path: Path) -> None:
    for name, key in (("q35", "linear_key_head_dim"), ("qw", "text_config.linear_key_head_dim")):
        wide = {"linear_key_head_dim": 128}
        overrides = {"text_config": wide} if name == "qw" else wide
        source = save_tiny_tokenizer(save_tiny(name, tmp_path / name, overrides=overrides))
        edit_config(source, remove=[key])
        output = tmp_path / f"{name}-out"
        text = calibration_text_path()
        words = [str(source), "--ratio", "0.5", "--output-dir", str(output), "--calibration", str(text), *FAST, *SHORT]
        assert main([*words, "--calibration-samples", "20"]) == 0
        config = json.loads((output / "config.json").read_text())
        assert (config["text_config"] if name == "qw" else config)["linear_key_head_dim"] == 64


def test_old_style_rope_fields_stay(tmp_path: Path) -> None:
    source = make_source("q35", tmp_path / "source")
    edit_config(source, {"rope_theta": 1e7, "partial_rotary_factor": 0.5}, remove=["rope_parameters"])
    assert compress(source, tmp_path / "out", make_text(tmp_path), *SHORT) == 0
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (source, tmp_path / "out"))
    assert {key for key in before | after if before.get(key) != after.get(key)} == {"linear_key_head_dim"}


def test_sources_through_links_give_regular_files(tmp_path: Path) -> None:
    real = make_source("q35", tmp_path / "blobs")
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for path in real.iterdir():
        (snapshot / path.name).symlink_to(Path("..") / "blobs" / path.name)
    before = hashes(real)
    output = tmp_path / "out"
    assert compress(snapshot, output, make_text(tmp_path), *SHORT) == 0
    assert not any(path.is_symlink() for path in output.iterdir())
    assert hashes(real) == before
    shutil.rmtree(real)
    _, info = AutoModelForCausalLM.from_pretrained(output, local_files_only=True, output_loading_info=True)
    assert not any(info.values()), info
