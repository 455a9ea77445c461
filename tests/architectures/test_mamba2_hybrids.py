"""Bamba, Granite 4.0, Nemotron-H, Falcon-H1 and Zamba2: cut, reloaded and run, each held against its dense model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from compressor.architectures.mamba2_hybrids import refuse_mixed_sequences
from compressor.architectures.registry import find_architecture
from compressor.errors import RequestError
from compressor.evaluation import generation
from compressor.evaluation.generation import generate_greedily
from compressor.evaluation.language_modelling import next_token_logits
from compressor.preparation import open_model, open_source
from compressor.verification import stock_load
from compressor.verification.oracle import masked_logits, relative_error
from tests.architectures.test_cut import cut
from tests.evaluation.test_generation import ignore, never, one_by_one
from tests.families import MAMBA2_HYBRIDS, TinyCheckpoint, open_tiny, random_selection, tiny_checkpoint, tiny_tokens
from tests.tiny_models import edit_config, read_weights, save_tiny, write_weights

STATE_FIELDS = {
    "bamba": "mamba_d_state",
    "granite": "mamba_d_state",
    "nh": "ssm_state_size",
    "falcon_h1": "mamba_d_state",
    "zamba2": "mamba_d_state",
}
EXPERTS = {
    "layers_block_type": ["linear_attention", "moe", "linear_attention", "full_attention"],
    "n_routed_experts": 4,
    "moe_intermediate_size": 8,
    "moe_shared_expert_intermediate_size": 12,
}
MEMBERS: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("bamba", {}),
    ("bamba", {"mamba_n_groups": 1, "mamba_proj_bias": True, "mamba_conv_bias": False, "tie_word_embeddings": True}),
    ("granite", {}),
    ("granite", {"num_local_experts": 4, "intermediate_size": 8, "position_embedding_type": "rope"}),
    ("nh", {}),
    ("nh", EXPERTS | {"use_bias": True, "n_groups": 4}),
    ("falcon_h1", {}),
    ("falcon_h1", {"mamba_rms_norm": False, "mamba_d_ssm": None, "mamba_n_groups": 1}),
    ("falcon_h1", {"mamba_norm_before_gate": False, "mamba_d_ssm": 96, "mamba_d_head": 24, "projectors_bias": True}),
    ("zamba2", {}),
    ("zamba2", {"num_mem_blocks": 2, "use_shared_attention_adapter": True, "add_bias_linear": True}),
)
"""Each family as tests/tiny_variants.py has it, and its members of other layouts."""


def member(name: str, overrides: Mapping[str, Any], folder: Path, size: str | None = None) -> TinyCheckpoint:
    return open_tiny(save_tiny(name, folder, max_shard_size=size, overrides=overrides))


@pytest.mark.parametrize(("name", "overrides"), MEMBERS)
def test_a_cut_is_the_masked_model_and_changes_nothing_else(
    name: str, overrides: Mapping[str, Any], tmp_path: Path
) -> None:
    tiny, tokens = member(name, overrides, tmp_path / "source"), tiny_tokens()
    before = read_weights(tiny.folder)
    scanned = {f"{mixer.tensors}.{module}" for mixer in tiny.mixers for module in ("in_proj", "conv1d")}
    assert scanned <= {key.rpartition(".")[0] for key in before}
    for width in (1, 7):
        selection = random_selection(tiny.mixers, width, seed=width)
        smaller = cut(tiny, tmp_path / f"{width}", selection, "keep")
        expected = masked_logits(tiny.architecture, tiny.model, selection, False, tokens)
        assert relative_error(next_token_logits(smaller.model, tokens), expected) < 2e-5
        assert {mixer.head_k_dim for mixer in smaller.mixers} == {width}
        assert smaller.raw_config == tiny.raw_config | {STATE_FIELDS[name]: width}
        after = read_weights(smaller.folder)
        assert before.keys() == after.keys()
        dropped = 2 * tiny.mixers[0].num_k_heads * (16 - width)
        for key, tensor in before.items():
            if key.rpartition(".")[0] in scanned:
                assert len(after[key]) == len(tensor) - dropped
            else:
                assert torch.equal(after[key], tensor), key


@pytest.mark.parametrize("name", MAMBA2_HYBRIDS)
def test_the_oracle_sees_a_wrong_channel(name: str, tmp_path: Path) -> None:
    tiny, tokens = tiny_checkpoint(name, tmp_path / "source"), tiny_tokens()
    selections = [random_selection(tiny.mixers, 8, seed) for seed in (1, 2)]
    smaller = cut(tiny, tmp_path / "cut", selections[0], "keep")
    wrong = masked_logits(tiny.architecture, tiny.model, selections[1], False, tokens)
    assert relative_error(next_token_logits(smaller.model, tokens), wrong) > 1e-3


@pytest.mark.parametrize("name", MAMBA2_HYBRIDS)
def test_keeping_every_channel_reproduces_the_checkpoint(name: str, tmp_path: Path) -> None:
    tiny = tiny_checkpoint(name, tmp_path / "source", torch.bfloat16)
    same = cut(tiny, tmp_path / "cut", random_selection(tiny.mixers, 16), "keep")
    before, after = read_weights(tiny.folder), read_weights(same.folder)
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        assert after[key].dtype == tensor.dtype
        assert torch.equal(after[key].view(torch.uint8), tensor.view(torch.uint8)), key
    assert same.raw_config == tiny.raw_config


@pytest.mark.parametrize(
    ("name", "overrides"),
    [("granite", {"tie_word_embeddings": True, "num_local_experts": 4}), ("nh", EXPERTS), ("zamba2", {})],
)
def test_shards_of_the_source_change_nothing(name: str, overrides: Mapping[str, Any], tmp_path: Path) -> None:
    """Zamba2's files hold a transformer block once for all layers that share it."""
    cuts = []
    for size in ("1GB", "20KB"):
        tiny = member(name, overrides, tmp_path / size, size)
        assert (len(list(tiny.folder.glob("*.safetensors"))) > 2) == (size == "20KB")
        cuts.append(read_weights(cut(tiny, tmp_path / f"cut-{size}", random_selection(tiny.mixers, 5), "keep").folder))
    assert cuts[0].keys() == cuts[1].keys()
    assert all(torch.equal(cuts[0][key], cuts[1][key]) for key in cuts[0])
    assert ("lm_head.weight" in cuts[0]) == (name == "nh")
    assert not any(key.startswith("model.layers.3.shared_transformer") for key in cuts[0])


def test_cuts_reload_and_generate_in_a_process_without_this_package(tmp_path: Path) -> None:
    """One process for all families; in float32, so that generation with a cache is the full pass to rounding."""
    tokens = tiny_tokens(70)
    (tmp_path / "tokens.json").write_text(json.dumps(tokens.tolist()))
    expected = {}
    for name in MAMBA2_HYBRIDS:
        tiny = tiny_checkpoint(name, tmp_path / f"{name}-source")
        selection = random_selection(tiny.mixers, 7)
        cut(tiny, tmp_path / name, selection, "keep")
        expected[name] = masked_logits(tiny.architecture, tiny.model, selection, False, tokens)
    child = Path(__file__).with_name("stock_reload_process.py")
    command = [sys.executable, "-P", str(child), stock_load.__file__, *(str(tmp_path / name) for name in expected)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.strip().splitlines()[-1])
    assert not result["imported_compressor"]
    for (name, logits), facts in zip(expected.items(), result["folders"], strict=True):
        assert facts["class"].endswith("ForCausalLM")
        assert facts["problems"] == {}
        assert facts["generation_error"] < 2e-5
        reloaded = load_file(tmp_path / name / "logits.safetensors.reloaded")["logits"]
        assert relative_error(reloaded[:-1], logits) < 2e-5


@pytest.mark.parametrize("name", MAMBA2_HYBRIDS)
def test_prompts_read_in_pieces_go_on_from_the_cache(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bamba's decoder would count the tokens of every piece from the first position."""
    tiny = tiny_checkpoint(name, tmp_path / "source")
    model = cut(tiny, tmp_path / "cut", random_selection(tiny.mixers, 11), "keep").model
    prompts = [tiny_tokens(length, seed) for seed, length in enumerate((70, 93))]
    expected = [one_by_one(model, prompt, 4) for prompt in prompts]
    monkeypatch.setattr(generation, "SMALLEST_PIECE", 30)
    monkeypatch.setattr(generation, "TOKENS_PER_FORWARD", 1)
    assert generate_greedily(model, prompts, [4, 4], 2, frozenset(), never, ignore) == expected


@pytest.mark.parametrize("name", ["nh", "zamba2"])
def test_steps_behind_a_cache_know_no_least_step_size(name: str, tmp_path: Path) -> None:
    """What transformers does; the other families take no limit there by default."""
    errors = []
    for least in (1e-6, 0.3):
        model = member(name, {"time_step_min": least, "time_step_max": 0.4}, tmp_path / f"{least}").model
        errors.append(stock_load.generation_facts(model, tiny_tokens(40))["generation_error"])
    assert errors[0] < 2e-5 < 1e-3 < errors[1]


def refused(folder: Path, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        open_source(open_model(str(folder), None))


@pytest.mark.parametrize("name", MAMBA2_HYBRIDS)
def test_tensors_of_another_layout_are_refused_by_name(name: str, tmp_path: Path) -> None:
    folder = save_tiny(name, tmp_path)
    tensors = read_weights(folder)
    mixer = open_tiny(folder).mixers[-1].tensors
    projection, convolution = f"{mixer}.in_proj.weight", f"{mixer}.conv1d.weight"
    write_weights(folder, tensors | {projection: tensors[projection][:-4]})
    refused(folder, rf"config says \(196, 32\) for {projection}, the file has \(192, 32\)")
    write_weights(folder, tensors | {f"{mixer}.B_norm.weight": torch.ones(16)})
    refused(folder, rf"unexpected \S*{mixer.partition('.')[2]}\.B_norm\.weight")
    write_weights(folder, {key: value for key, value in tensors.items() if key != convolution})
    refused(folder, rf"missing \S*{convolution.partition('.')[2]}")


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("bamba", {"mamba_n_groups": 3}, "gives layer 0 4 value heads for 3 key heads"),
        ("granite", {"mamba_d_head": 8}, "do not match the model intermediate_size"),
        ("nh", {"n_groups": 0}, "gives layer 0 num_k_heads = 0; it must be a whole number of at least 1"),
        ("falcon_h1", {"mamba_d_ssm": 60, "mamba_n_heads": 8}, "mamba_n_heads must divide"),
        ("zamba2", {"n_mamba_heads": 6}, "gives Mamba-2 layers 6 heads of 16 channels and 64 channels in all"),
    ],
)
def test_shapes_that_do_not_factor_are_refused(
    name: str, changes: Mapping[str, Any], message: str, tmp_path: Path
) -> None:
    refused(edit_config(save_tiny(name, tmp_path), changes), message)


def test_a_mamba_layer_that_is_never_run_is_refused(tmp_path: Path) -> None:
    """Nemotron-H's multi-token head may hold one; other tensors of that head are copied."""
    folder = save_tiny("nh", tmp_path / "source")
    tensors = read_weights(folder)
    extra = {"mtp.layers.0.mixer.q_proj.weight": torch.ones(8, 8)}
    write_weights(folder, tensors | extra)
    tiny = open_tiny(folder)
    smaller = cut(tiny, tmp_path / "cut", random_selection(tiny.mixers, 7), "keep")
    assert torch.equal(read_weights(smaller.folder)[next(iter(extra))], torch.ones(8, 8))
    write_weights(folder, tensors | {"mtp.layers.0.mixer.A_log": torch.ones(4)})
    refused(folder, r"mtp\.layers\.0\.mixer\.A_log belongs to a Mamba-2 layer .* remove the mtp\.\* tensors first")


def test_an_epsilon_that_no_config_holds_is_not_written(tmp_path: Path) -> None:
    tiny = tiny_checkpoint("zamba2", tmp_path)
    with pytest.raises(RequestError, match="output norm of Zamba2 .* takes 1e-05 whatever config.json says"):
        tiny.architecture.cut_config(tiny.raw_config, tiny.config, 8, 2e-5)
    norm = tiny.model.get_submodule(f"{tiny.mixers[0].module}.norm")
    assert vars(norm)["variance_epsilon"] == tiny.architecture.norm_epsilon(tiny.config) == 1e-5


def test_a_version_that_mixes_sequences_is_refused(tmp_path: Path) -> None:
    """Up to 5.22, and only where the mixer has a norm; the test of prompts in pieces shows that 5.23 does not."""
    with_norm = tiny_checkpoint("falcon_h1", tmp_path / "with").config
    without = member("falcon_h1", {"mamba_rms_norm": False}, tmp_path / "without").config
    with pytest.raises(RequestError, match=r"^transformers 5\.22\.0 mixes .*; install transformers 5\.23\.$"):
        refuse_mixed_sequences(with_norm, "5.22.0")
    refuse_mixed_sequences(with_norm, "5.23.0")
    refuse_mixed_sequences(without, "5.22.0")


@pytest.mark.parametrize(
    ("name", "remove", "changes"),
    [
        ("granite", ["layer_types"], {"layer_types": ["mamba", "attention", "mamba"]}),
        ("nh", ["layers_block_type"], {"hybrid_override_pattern": "M-M*"}),
        ("zamba2", ["layers_block_type"], {"layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"]}),
    ],
)
def test_layers_as_published_configs_list_them(
    name: str, remove: list[str], changes: Mapping[str, Any], tmp_path: Path
) -> None:
    tiny, tokens = tiny_checkpoint(name, tmp_path / "source"), tiny_tokens()
    published = open_tiny(edit_config(tiny.folder, changes, remove))
    assert published.mixers == tiny.mixers
    selection = random_selection(tiny.mixers, 7)
    smaller = cut(published, tmp_path / "cut", selection, "keep")
    assert smaller.raw_config == published.raw_config | {STATE_FIELDS[name]: 7}
    expected = masked_logits(tiny.architecture, tiny.model, selection, False, tokens)
    assert relative_error(next_token_logits(smaller.model, tokens), expected) < 2e-5


def test_every_family_is_found_by_its_stock_name(tmp_path: Path) -> None:
    for name in MAMBA2_HYBRIDS:
        model_type = json.loads((save_tiny(name, tmp_path / name) / "config.json").read_text())["model_type"]
        assert model_type in find_architecture(model_type).model_types
