"""Surgery against the exact oracle: the unpruned model with the dropped channels zeroed."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch

from compressor.artifacts import Selection
from compressor.checkpoint.checkpoint import open_checkpoint
from compressor.checkpoint.source import resolve_model
from compressor.evaluation.language_modelling import next_token_logits
from compressor.preparation import open_model, open_source, plan_cut
from compressor.recipe import Recipe
from compressor.verification.oracle import masked_logits, relative_error
from compressor.writing import write_checkpoint
from tests.families import (
    FIXED_NORM_EPSILON,
    NORM_EPSILONS,
    SUPPORTED_VARIANTS,
    WITHOUT_SCALE,
    TinyCheckpoint,
    open_tiny,
    random_selection,
    tiny_checkpoint,
    tiny_tokens,
)
from tests.tiny_models import read_weights

WIDTHS = (1, 5, 8, 15)


def cut(tiny: TinyCheckpoint, folder: Path, selection: Selection, norm_epsilon: str) -> TinyCheckpoint:
    source = open_source(open_model(str(tiny.folder), None))
    settings = {"target_dim": selection.width, "norm_epsilon": norm_epsilon}
    recipe = Recipe.from_settings({"model": str(tiny.folder), "selection": settings})
    folder.mkdir()
    write_checkpoint(folder, source, plan_cut(source, recipe, selection.width), selection, 10**9, lambda count: None)
    return open_tiny(folder)


@pytest.mark.parametrize("length", [40, 100], ids=["recurrent", "chunked"])
@pytest.mark.parametrize(("name", "norm_epsilon"), NORM_EPSILONS)
def test_cut_model_equals_masked_model(name: str, norm_epsilon: str, length: int, tmp_path: Path) -> None:
    tiny = tiny_checkpoint(name, tmp_path / "source")
    tokens = tiny_tokens(length)
    for width in WIDTHS:
        selection = random_selection(tiny.mixers, width, seed=width)
        smaller = cut(tiny, tmp_path / f"{width}", selection, norm_epsilon)
        assert {mixer.head_k_dim for mixer in smaller.mixers} == {width}
        assert [mixer.head_v_dim for mixer in smaller.mixers] == [mixer.head_v_dim for mixer in tiny.mixers]
        expected = masked_logits(tiny.architecture, tiny.model, selection, norm_epsilon == "scaled", tokens)
        assert relative_error(next_token_logits(smaller.model, tokens), expected) < 2e-5


@pytest.mark.parametrize(
    "name", ["gated_deltanet_grouped", "gated_deltaproduct", "kda", "delta_net", "q35", "qn", "oh", "m2", "m2_fla"]
)
def test_oracle_sees_a_wrong_channel(name: str, tmp_path: Path) -> None:
    tiny = tiny_checkpoint(name, tmp_path / "source")
    tokens = tiny_tokens()
    selection = random_selection(tiny.mixers, 8)
    smaller = cut(tiny, tmp_path / "cut", selection, "keep")
    moved = {layer: indices.clone() for layer, indices in selection.kept.items()}
    last = tiny.mixers[-1].layer
    dropped = next(channel for channel in range(16) if channel not in moved[last][-1].tolist())
    moved[last][-1] = torch.tensor(sorted([*moved[last][-1][1:].tolist(), dropped]))
    wrong = dataclasses.replace(selection, kept=moved)
    expected = masked_logits(tiny.architecture, tiny.model, wrong, False, tokens)
    assert relative_error(next_token_logits(smaller.model, tokens), expected) > 1e-3


@pytest.mark.parametrize("name", ["gated_deltanet", "gated_deltaproduct", "kda", "delta_net", "q35", "qw", "qn"])
def test_only_the_matching_epsilon_is_exact(name: str, tmp_path: Path) -> None:
    tiny = tiny_checkpoint(name, tmp_path / "source")
    _shrink_mixer_outputs(tiny)
    tokens = tiny_tokens()
    selection = random_selection(tiny.mixers, 4)
    scaled = masked_logits(tiny.architecture, tiny.model, selection, True, tokens)
    kept = masked_logits(tiny.architecture, tiny.model, selection, False, tokens)
    assert relative_error(scaled, kept) > 1e-3


def _shrink_mixer_outputs(tiny: TinyCheckpoint) -> None:
    """Values small enough for the output norm's epsilon to matter, as in trained models."""
    with torch.no_grad():
        for mixer in tiny.mixers:
            module = tiny.model.get_submodule(mixer.module)
            for path, parameter in module.named_parameters():
                if path == "v_proj.weight":
                    parameter.mul_(1e-2)
                if path == "in_proj_qkv.weight":
                    parameter[2 * mixer.num_k_heads * mixer.head_k_dim :].mul_(1e-2)
                if path == "in_proj_qkvz.weight":
                    parameter.unflatten(0, (mixer.num_k_heads, -1))[:, 2 * mixer.head_k_dim :].mul_(1e-2)


@pytest.mark.parametrize("name", SUPPORTED_VARIANTS)
def test_keeping_every_channel_reproduces_the_checkpoint(name: str, tmp_path: Path) -> None:
    tiny = tiny_checkpoint(name, tmp_path / "source", torch.bfloat16)
    everything = random_selection(tiny.mixers, 16)
    smaller = cut(tiny, tmp_path / "cut", everything, "keep")
    before, after = read_weights(tiny.folder), read_weights(smaller.folder)
    assert before.keys() == after.keys()
    for tensor_name, tensor in before.items():
        assert after[tensor_name].dtype == tensor.dtype
        assert torch.equal(after[tensor_name].view(torch.uint8), tensor.view(torch.uint8)), tensor_name
    assert smaller.raw_config == tiny.raw_config


@pytest.mark.parametrize("name", SUPPORTED_VARIANTS)
def test_config_differs_in_the_cut_fields_alone(name: str, tmp_path: Path) -> None:
    tiny = tiny_checkpoint(name, tmp_path / "source")
    selection = random_selection(tiny.mixers, 6)
    scaled = name not in WITHOUT_SCALE + FIXED_NORM_EPSILON
    smaller = cut(tiny, tmp_path / "cut", selection, "scaled" if scaled else "keep")
    fields = {
        "gated_deltanet": {"head_dim", "expand_v", "norm_eps"},
        "gated_deltaproduct": {"head_dim", "expand_v", "norm_eps"},
        "kda": {"head_dim", "expand_v", "norm_eps"},
        "delta_net": {"expand_k", "norm_eps"},
        "qwen3_5_text": {"linear_key_head_dim", "rms_norm_eps"},
        "qwen3_5": {"text_config"},
        "qwen3_5_moe_text": {"linear_key_head_dim", "rms_norm_eps"},
        "qwen3_5_moe": {"text_config"},
        "qwen3_next": {"linear_key_head_dim", "rms_norm_eps"},
        "mamba2": {"state_size"},
        "olmo_hybrid": {"linear_key_head_dim"},
    }[tiny.raw_config["model_type"]]
    assert {key for key in tiny.raw_config if tiny.raw_config[key] != smaller.raw_config[key]} == fields
    assert tiny.raw_config.keys() == smaller.raw_config.keys()
    before = tiny.architecture.norm_epsilon(tiny.config)
    assert smaller.architecture.norm_epsilon(smaller.config) == pytest.approx(
        before * (16 / 6 if scaled else 1), rel=1e-12
    )


@pytest.mark.parametrize("keep", range(1, 257))
def test_value_width_survives_every_key_width(keep: int) -> None:
    from compressor.architectures.fla_layout import expansion_for

    expansion = expansion_for(keep, 128)
    assert int(keep * expansion) == 128
    assert math.isclose(keep * expansion, 128, rel_tol=1e-5)


def test_vision_tower_and_mtp_pass_through(tmp_path: Path) -> None:
    from tests.tiny_models import save_tiny, write_weights

    folder = save_tiny("qw", tmp_path / "source")
    extra = {"mtp.layers.0.self_attn.q_proj.weight": torch.randn(8, 8), "mtp.norm.weight": torch.randn(8)}
    write_weights(folder, read_weights(folder) | extra)
    tiny = open_tiny(folder)
    smaller = cut(tiny, tmp_path / "cut", random_selection(tiny.mixers, 8), "keep")
    before, after = read_weights(folder), read_weights(smaller.folder)
    untouched = [name for name in before if name.startswith(("mtp.", "model.visual."))]
    assert len(untouched) > len(extra)
    assert all(torch.equal(before[name], after[name]) for name in untouched)
    assert open_checkpoint(resolve_model(str(smaller.folder), None)).index.entries.keys() == before.keys()


@pytest.mark.parametrize("name", ["qn_experts", "q35_experts", "qw_experts"])
@pytest.mark.parametrize("original_format", [True, False], ids=["apart", "stacked"])
def test_experts_are_copied_and_never_cut(
    name: str, original_format: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts stand apart in published files, or side by side in one tensor; of a multi-token head as well."""
    from compressor import writing
    from tests.tiny_models import tiny_model, write_weights

    folder = tmp_path / "source"
    tiny_model(name).save_pretrained(folder, save_original_format=original_format)  # type: ignore[operator]
    extra = {"mtp.layers.0.mlp.experts.0.up_proj.weight": torch.randn(8, 32), "mtp.norm.weight": torch.randn(32)}
    before = read_weights(folder) | extra
    write_weights(folder, before)
    tiny = open_tiny(folder)
    applied: list[tuple[int, ...]] = []
    apply = writing.TensorCut.apply
    monkeypatch.setattr(
        writing.TensorCut, "apply", lambda self, tensor: applied.append(tuple(tensor.shape)) or apply(self, tensor)
    )
    selection = random_selection(tiny.mixers, 8)
    smaller = cut(tiny, tmp_path / "cut", selection, "keep")
    after = read_weights(smaller.folder)
    untouched = [key for key in before if ".mlp." in key or key.startswith("mtp.")]
    assert len([key for key in untouched if ".experts." in key]) >= 6
    assert all(torch.equal(before[key], after[key]) for key in untouched)
    assert len(applied) == 2 * len(tiny.mixers)  # the projection and the convolution
    tokens = tiny_tokens()
    expected = masked_logits(tiny.architecture, tiny.model, selection, False, tokens)
    assert relative_error(next_token_logits(smaller.model, tokens), expected) < 2e-5


@pytest.mark.parametrize("name", ["qn_tied", "qw_experts", "oh_parts"])
def test_shards_of_the_source_change_nothing(name: str, tmp_path: Path) -> None:
    from tests.tiny_models import save_tiny

    whole = open_tiny(save_tiny(name, tmp_path / "whole"))
    sharded = open_tiny(save_tiny(name, tmp_path / "sharded", max_shard_size="20KB"))
    assert len(list(sharded.folder.glob("*.safetensors"))) > 2
    selection = random_selection(whole.mixers, 5)
    one, other = (cut(tiny, tmp_path / f"cut-{tiny.folder.name}", selection, "keep") for tiny in (whole, sharded))
    before, after = read_weights(one.folder), read_weights(other.folder)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert ("lm_head.weight" in before) == (name == "oh_parts")


def test_a_value_width_that_is_left_out_is_written(tmp_path: Path) -> None:
    """Olmo-Hybrid takes it from the key width, which a cut changes."""
    from tests.tiny_models import edit_config, save_tiny

    folder = save_tiny("oh", tmp_path / "source", overrides={"linear_value_head_dim": 32})
    edit_config(folder, remove=["linear_value_head_dim"])
    tiny = open_tiny(folder)
    assert "linear_value_head_dim" not in tiny.raw_config
    smaller = cut(tiny, tmp_path / "cut", random_selection(tiny.mixers, 8), "keep")
    assert smaller.raw_config == tiny.raw_config | {"linear_key_head_dim": 8, "linear_value_head_dim": 32}
    assert {mixer.head_v_dim for mixer in smaller.mixers} == {32}


@pytest.mark.parametrize("name", FIXED_NORM_EPSILON)
def test_a_norm_epsilon_that_no_config_holds_cannot_be_scaled(name: str, tmp_path: Path) -> None:
    from compressor.errors import RequestError

    tiny = tiny_checkpoint(name, tmp_path / "source")
    for mixer in tiny.mixers:
        norm = tiny.model.get_submodule(f"{mixer.module}.o_norm")
        assert vars(norm)["variance_epsilon"] == tiny.architecture.norm_epsilon(tiny.config) == 1e-5
    message = (
        "^--norm-epsilon scaled would write 2e-05, and the output norm of Olmo-Hybrid .* takes 1e-05 whatever "
        "config.json says; use --norm-epsilon keep.$"
    )
    with pytest.raises(RequestError, match=message):
        cut(tiny, tmp_path / "cut", random_selection(tiny.mixers, 8), "scaled")


def test_mtp_with_a_linear_attention_layer_is_refused(tmp_path: Path) -> None:
    from compressor.errors import RequestError
    from tests.tiny_models import save_tiny, write_weights

    folder = save_tiny("q35", tmp_path / "source")
    write_weights(folder, read_weights(folder) | {"mtp.layers.0.linear_attn.in_proj_qkv.weight": torch.randn(8, 8)})
    with pytest.raises(RequestError, match=r"mtp\.layers\.0\.linear_attn\.in_proj_qkv\.weight .*cannot be calibrated"):
        open_source(open_model(str(folder), None))
