"""Two libraries write `mamba2` checkpoints: which one is meant, what is refused, and what a model card says of it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from compressor.architectures.base import RecurrenceTap
from compressor.architectures.family import FLA_MAMBA2, family_of
from compressor.architectures.mamba2 import FlaMamba2, Mamba2
from compressor.architectures.registry import architecture_of
from compressor.cli import main
from compressor.errors import RequestError
from compressor.naming import key_of
from compressor.preparation import open_model, open_source, plan_cut
from compressor.recipe import Recipe
from compressor.recovery.student import StudentSettings, check_student_settings
from compressor.writing import write_checkpoint
from tests.families import WITHOUT_SCALE, open_tiny, random_selection, tiny_checkpoint, tiny_tokens
from tests.test_pipeline import compress, make_source, make_text
from tests.tiny_models import edit_config, read_weights, save_tiny, write_weights


@pytest.mark.parametrize("name", WITHOUT_SCALE)
def test_the_class_is_that_of_the_library_that_wrote_the_checkpoint(name: str, tmp_path: Path) -> None:
    """fla is imported here, so the Auto classes would give its class for all of them."""
    import fla  # noqa: F401

    tiny = tiny_checkpoint(name, tmp_path)
    library = "fla" if "fla" in name else "transformers"
    assert tiny.raw_config["model_type"] == "mamba2"
    assert family_of(tiny.raw_config) == (FLA_MAMBA2 if library == "fla" else "mamba2")
    assert type(tiny.architecture) is (FlaMamba2 if library == "fla" else Mamba2)
    for stock in (tiny.model, tiny.config):
        assert type(stock).__module__.startswith(f"{library}.models.mamba2.")
    assert ("import fla" in tiny.architecture.load_line) == (library == "fla")
    assert library in tiny.architecture.loading_note


@pytest.mark.parametrize(
    ("name", "library"), [pytest.param("m2", "transformers", marks=pytest.mark.slow), ("m2_fla", "fla")]
)
def test_the_model_card_of_a_verified_cut_loads_it_in_a_clean_process(name: str, library: str, tmp_path: Path) -> None:
    """With the lines of its Python block, and no others."""
    source, output = make_source(name, tmp_path / "source"), tmp_path / "out"
    assert compress(source, output, make_text(tmp_path), "--no-refit", "--no-evaluate") == 0
    report = json.loads((output / "compression.json").read_text())
    assert report["verification"]["passed"]
    assert report["verification"]["oracle_relative_error"] < 1e-4
    card = (output / "README.md").read_text(encoding="utf-8")
    assert architecture_of(open_tiny(output).raw_config).loading_note in card
    (code,) = re.findall(r"## Loading\n\n```python\n(.*?)```", card, re.DOTALL)
    assert ("import fla" in code) == (library == "fla")
    code = re.sub(r"^name = .*$", f"name = {str(output)!r}", code, flags=re.MULTILINE)
    shown = "print(type(model).__module__, model.config.state_size)"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    command = [sys.executable, "-P", "-c", f"{code}\n{shown}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-2:] == [f"{library}.models.mamba2.modeling_mamba2", "8"]


def test_norms_that_the_card_speaks_of_are_those_that_fla_loads_too_wide(tmp_path: Path) -> None:
    import fla  # noqa: F401
    from transformers import AutoModelForCausalLM

    tiny = tiny_checkpoint("m2_fla", tmp_path, torch.bfloat16)  # its CPU backend is on, too
    assert "call `model.to(model.dtype)` behind the lines above" in tiny.architecture.loading_note
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    tokens = tiny_tokens(30)[None]
    with pytest.raises(RuntimeError, match="dtype"):
        model(input_ids=tokens, use_cache=False)
    assert model.to(model.dtype)(input_ids=tokens, use_cache=False).logits.dtype == torch.bfloat16


@pytest.mark.slow
def test_a_trained_model(shared_models: Path, tmp_path: Path) -> None:
    """Exact and certified, and far better than chance; nothing but the state size changes in its config."""
    words = [str(shared_models / "mamba2-13m"), "--ratio", "0.5", "--device", "cpu", "--calibration", "demo"]
    words += ["--sequence-length", "512", "--retrieval-share", "0", "--no-refit", "--calibration-samples", "8"]
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("evaluation: {tasks: [niah_single_1], samples: 2}\n")
    reports = {}
    for method, options in (("drrqr", []), ("random", ["--no-verify"])):
        output = str(tmp_path / method)
        assert main([*words, *options, "--method", method, "--recipe", str(recipe), "--output-dir", output]) == 0
        reports[method] = json.loads((tmp_path / method / "compression.json").read_text())
    report = reports["drrqr"]
    assert report["key_dim"] == {"before": 128, "after": 64}
    assert report["verification"]["oracle_relative_error"] < 1e-4
    assert report["verification"]["generation_error"] < 0.05
    assert max(rho for layer in report["layers"] for rho in layer["max_rho"]) <= 1.5
    kl = {method: each["evaluation"]["after"]["kl_text"] for method, each in reports.items()}
    assert 0 < kl["drrqr"] < 0.6 * kl["random"]
    configs = [json.loads((folder / "config.json").read_text()) for folder in (Path(words[0]), tmp_path / "drrqr")]
    assert configs[1] == configs[0] | {"state_size": 64}


def test_without_a_field_of_either_it_is_the_one_that_needs_no_import() -> None:
    assert type(architecture_of({"model_type": "mamba2", "hidden_size": 32})) is Mamba2


@pytest.mark.parametrize(("name", "field"), [("m2", "norm_eps"), ("m2_fla", "time_step_limit")])
def test_a_config_of_both_is_refused(name: str, field: str, tmp_path: Path) -> None:
    folder = edit_config(save_tiny(name, tmp_path), {field: 1e-5})
    with pytest.raises(RequestError, match=r"has norm_eps, a field of fla's Mamba-2, and .*, a field of transformers'"):
        open_model(str(folder), None)


@pytest.mark.parametrize("name", ["m2", "m2_fla"])
def test_a_scaled_epsilon_is_refused_before_calibration(name: str, tmp_path: Path) -> None:
    source = open_source(open_model(str(save_tiny(name, tmp_path)), None))
    recipe = Recipe.from_settings({"model": str(tmp_path), "selection": {"target_dim": 8, "norm_epsilon": "scaled"}})
    with pytest.raises(RequestError, match=r"has no such scale: use --norm-epsilon keep, which is exact"):
        plan_cut(source, recipe, 8)
    with pytest.raises(RequestError, match=r"^selection.norm_epsilon: scaled undoes .* selection.norm_epsilon: keep, "):
        plan_cut(source, recipe, 8, key_of)


@pytest.mark.parametrize("name", ["m2", "m2_fla"])
def test_tensors_of_another_layout_are_refused_by_name(name: str, tmp_path: Path) -> None:
    folder = save_tiny(name, tmp_path)
    tensors = read_weights(folder)
    short = {"backbone.layers.1.mixer.in_proj.weight": tensors["backbone.layers.1.mixer.in_proj.weight"][:-4]}
    write_weights(folder, tensors | short)
    with pytest.raises(RequestError, match=r"config says \(196, 32\) for backbone\.layers\.1\.mixer\.in_proj\.weight"):
        open_source(open_model(str(folder), None))
    write_weights(folder, tensors | {"backbone.layers.0.mixer.B_norm.weight": torch.ones(16)})
    with pytest.raises(RequestError, match=r"unexpected backbone\.layers\.0\.mixer\.B_norm\.weight"):
        open_source(open_model(str(folder), None))


@pytest.mark.parametrize("target", ["conv1d", "out_proj"])
def test_adapters_that_a_fused_kernel_passes_by_are_refused(target: str, tmp_path: Path) -> None:
    tiny = tiny_checkpoint("m2", tmp_path)
    settings = StudentSettings(trainable="lora", rank=2, alpha=4.0, seed=0, targets=(target,))
    with pytest.raises(RequestError, match=f"recovery cannot train {target} in mamba2; allowed: in_proj"):
        check_student_settings(tiny.architecture, tiny.model, tiny.mixers, settings)


class Seen(RecurrenceTap):
    def __init__(self) -> None:
        self.shapes: list[tuple[str, int, tuple[int, ...]]] = []

    def on_query(self, layer: int, query: Tensor) -> Tensor:
        self.shapes.append(("query", layer, tuple(query.shape)))
        return query

    def on_key(self, layer: int, key: Tensor) -> Tensor:
        self.shapes.append(("key", layer, tuple(key.shape)))
        return key

    def on_output(self, layer: int, output: Tensor) -> Tensor:
        self.shapes.append(("output", layer, tuple(output.shape)))
        return output


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", ["m2", "m2_one_group", "m2_fla", "m2_fla_no_norm"])
def test_every_scan_is_seen_once(name: str, training: bool, tmp_path: Path) -> None:
    """Also in training, where stock layers would take a fused function, and in single steps behind a cache."""
    tiny, tap = tiny_checkpoint(name, tmp_path), Seen()
    groups = tiny.mixers[0].num_k_heads
    tiny.model.train(training)

    def expected(tokens: int) -> list[tuple[str, int, tuple[int, ...]]]:
        stream = (1, tokens, groups, 16)
        return [
            each
            for layer in range(2)
            for each in (("query", layer, stream), ("key", layer, stream), ("output", layer, (1, tokens, 4, 16)))
        ]

    with torch.no_grad(), tiny.architecture.tapped(tiny.model, tiny.mixers, tap):
        tiny.model(input_ids=tiny_tokens(70)[None], use_cache=False)
        assert tap.shapes == expected(70)
        if not training:
            tap.shapes.clear()
            tiny.model.generate(
                tiny_tokens(20)[None], max_new_tokens=2, min_new_tokens=2, do_sample=False, pad_token_id=0
            )
            assert tap.shapes == expected(20) + expected(1)


def test_a_fused_function_is_kept_from_tapped_mixers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with mamba_ssm, whose function returns the whole mixer's output in training."""
    from transformers.models.mamba2 import modeling_mamba2

    tiny, tap = tiny_checkpoint("m2", tmp_path), Seen()
    other = open_tiny(tmp_path).model.train()
    monkeypatch.setattr(
        modeling_mamba2, "mamba2_split_conv1d_scan_combined", lambda zxbcdt, *_, **__: torch.zeros(1, 70, 32)
    )
    with torch.no_grad(), tiny.architecture.tapped(tiny.model, tiny.mixers, tap):
        tiny.model.train()(input_ids=tiny_tokens(70)[None], use_cache=False)
        assert len(tap.shapes) == 6
        other(input_ids=tiny_tokens(70)[None], use_cache=False)
        assert len(tap.shapes) == 6


@pytest.mark.parametrize("name", ["m2_tied", "m2_fla_tied"])
def test_a_sharded_cut_is_the_whole_one(name: str, tmp_path: Path) -> None:
    """Source and result in several files; tied embeddings are written once."""
    cuts = []
    for shards, size in (("1", None), ("several", "8KB")):
        folder = save_tiny(name, tmp_path / shards, max_shard_size=size)
        source = open_source(open_model(str(folder), None))
        selection = random_selection(source.mixers, 7)
        recipe = Recipe.from_settings({"model": str(folder), "selection": {"target_dim": 7}})
        output = tmp_path / f"{shards}-cut"
        output.mkdir()
        limit = 10**9 if size is None else 8000
        write_checkpoint(output, source, plan_cut(source, recipe, 7), selection, limit, lambda count: None)
        cuts.append(output)
    assert len(list(cuts[0].glob("*.safetensors"))) == 1 < len(list(cuts[1].glob("*.safetensors")))
    whole, sharded = (read_weights(folder) for folder in cuts)
    assert whole.keys() == sharded.keys()
    assert "lm_head.weight" not in whole
    assert all(torch.equal(whole[key], sharded[key]) for key in whole)
    models = [open_tiny(folder).model for folder in cuts]
    logits = [model(input_ids=tiny_tokens(30)[None], use_cache=False).logits for model in models]
    assert torch.equal(logits[0], logits[1])
