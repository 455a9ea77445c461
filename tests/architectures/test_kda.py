"""What is KDA's own: a decay of every key channel, whose gate is cut with the keys."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compressor.architectures.decay import decays_seen
from compressor.artifacts import Selection
from compressor.errors import RequestError
from compressor.evaluation.language_modelling import next_token_logits
from compressor.preparation import open_model, open_source
from compressor.verification.oracle import masked_logits, relative_error
from tests.architectures.test_cut import cut
from tests.families import TinyCheckpoint, open_tiny, random_selection, tiny_checkpoint, tiny_tokens
from tests.test_pipeline import compress, make_source, make_text
from tests.tiny_models import edit_config, read_weights, save_tiny, write_weights

MIXER = "model.layers.1.attn"
GROUP, WIDTH = 2, 16
BOUNDED = {"safe_gate": True, "lower_bound": -5.0, "allow_neg_eigval": True}


def tiny_with(folder: Path, overrides: dict[str, Any], **options: Any) -> TinyCheckpoint:
    return open_tiny(save_tiny("kda", folder, overrides=overrides, **options))


def test_a_channel_owns_a_row_of_the_gate_for_every_value_head(tmp_path: Path) -> None:
    tiny = tiny_checkpoint("kda", tmp_path)
    rows = {
        m.tensor.removeprefix(tiny.mixers[1].tensors): m.rows for m in tiny.architecture.channel_maps(tiny.mixers[1])
    }
    assert rows[".f_proj.1.weight"][1, 5].tolist() == rows[".dt_bias"][1, 5].tolist() == [2 * 16 + 5, 3 * 16 + 5]
    assert rows[".k_proj.weight"][1, 5].tolist() == [16 + 5]


def test_shards_with_tied_embeddings_are_cut_with_their_gates(tmp_path: Path) -> None:
    overrides = {"tie_word_embeddings": True}
    tiny = tiny_with(tmp_path / "source", overrides, dtype=torch.bfloat16, max_shard_size="20KB")
    assert len(list(tiny.folder.glob("model-*.safetensors"))) > 1
    selection = random_selection(tiny.mixers, 5)
    smaller = cut(tiny, tmp_path / "cut", selection, "keep")
    before, after = read_weights(tiny.folder), read_weights(smaller.folder)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        own = name.split(".attn.")[-1]
        copies = {"f_proj.1.weight": GROUP, "dt_bias": GROUP}.get(own, 1 if own.startswith(("q_", "k_")) else 0)
        expected = tensor
        if copies:
            kept = selection.kept[int(name.split(".")[2])].repeat_interleave(copies, dim=0)
            heads = tensor.unflatten(0, (-1, WIDTH))
            expected = torch.cat([head[channels] for head, channels in zip(heads, kept, strict=True)])
        assert torch.equal(after[name].view(torch.uint8), expected.contiguous().view(torch.uint8)), name


@pytest.mark.parametrize(
    "overrides",
    [
        BOUNDED,
        {"use_short_conv": False, "num_v_heads": None, "fuse_norm": False},
        {"num_hidden_layers": 3, "attn": {"layers": [1], "num_heads": 2}, "attn_mode": "fused_recurrent"},
        {"attnres_block_size": 2},
    ],
    ids=["bounded gate", "no short convolution", "hybrid", "attention over residuals"],
)
def test_other_members_equal_their_masked_models(overrides: dict[str, Any], tmp_path: Path) -> None:
    """In float64, in which a single channel, whose normalised key is little more than a sign, agrees as well."""
    tiny = tiny_with(tmp_path / "source", overrides)
    tokens = tiny_tokens()
    for width in (1, 7):
        selection = random_selection(tiny.mixers, width)
        smaller = cut(tiny, tmp_path / f"{width}", selection, "scaled")
        expected = masked_logits(tiny.architecture, tiny.model.double(), selection, True, tokens)
        assert relative_error(next_token_logits(smaller.model.double(), tokens), expected) < 1e-10


@pytest.mark.parametrize("overrides", [{}, BOUNDED], ids=["softplus", "bounded"])
def test_the_gate_of_a_dropped_channel_is_read_by_nobody(overrides: dict[str, Any], tmp_path: Path) -> None:
    """Masked channels of keys hold no state, so that another decay of theirs changes not one bit; of others it does."""
    tiny = tiny_with(tmp_path, overrides)
    selection, tokens = random_selection(tiny.mixers, 7), tiny_tokens()
    expected = masked_logits(tiny.architecture, tiny.model, selection, False, tokens)
    for kept in (False, True):
        disturb_gates(tiny, selection, kept)
        changed = masked_logits(tiny.architecture, tiny.model, selection, False, tokens)
        assert torch.equal(changed, expected) is not kept


def disturb_gates(tiny: TinyCheckpoint, selection: Selection, kept: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    for mixer in tiny.mixers:
        chosen = torch.zeros(mixer.num_k_heads, WIDTH, dtype=torch.bool).scatter_(1, selection.kept[mixer.layer], True)
        rows = (chosen == kept).repeat_interleave(mixer.num_v_heads // mixer.num_k_heads, dim=0).flatten()
        with torch.no_grad():
            for name in ("f_proj.1.weight", "dt_bias"):
                parameter = tiny.model.get_parameter(f"{mixer.module}.{name}")
                parameter[rows] = torch.randn(parameter[rows].shape, generator=generator)


@pytest.mark.parametrize("overrides", [{}, BOUNDED], ids=["softplus", "bounded"])
def test_decays_of_heads_are_means_over_channels(overrides: dict[str, Any], tmp_path: Path) -> None:
    tiny = tiny_with(tmp_path, overrides)
    seen: dict[int, Tensor] = {}
    inputs: dict[int, Tensor] = {}
    for mixer in tiny.mixers:
        tiny.model.get_submodule(mixer.module).register_forward_pre_hook(
            lambda module, arguments, keywords, layer=mixer.layer: inputs.update({layer: keywords["hidden_states"]}),
            with_kwargs=True,
        )
    with torch.inference_mode(), decays_seen(tiny.model, tiny.mixers, "kda", seen.__setitem__):
        tiny.model(input_ids=tiny_tokens(9)[None], use_cache=False)
    weights = {name: tensor.double() for name, tensor in read_weights(tiny.folder).items()}
    for mixer in tiny.mixers:
        down, up, bias, rate = (
            weights[f"{mixer.tensors}.{name}"] for name in ("f_proj.0.weight", "f_proj.1.weight", "dt_bias", "A_log")
        )
        raw = inputs[mixer.layer].double() @ down.T @ up.T + bias
        for head in range(mixer.num_v_heads):
            own, factor = raw[..., WIDTH * head : WIDTH * (head + 1)], rate[head].exp()
            log_decay = -5 / (1 + (-factor * own).exp()) if overrides else -factor * (1 + own.exp()).log()
            torch.testing.assert_close(seen[mixer.layer][..., head].double(), log_decay.mean(-1), rtol=1e-5, atol=1e-6)


def test_the_stock_layer_has_the_value_width_at_every_key_width(tmp_path: Path) -> None:
    """It takes int(head_dim * expand_v), and refuses floats that are far from it."""
    from fla.layers import KimiDeltaAttention

    tiny = tiny_with(tmp_path, {"head_dim": 64, "expand_v": 128 / 64, "num_hidden_layers": 1})
    for keep in range(1, 64):
        changed = tiny.architecture.cut_config(tiny.raw_config, tiny.config, keep, None)
        with torch.device("meta"):
            layer = KimiDeltaAttention(32, changed["expand_v"], changed["head_dim"], num_heads=2)
        assert (layer.head_k_dim, layer.head_v_dim) == (keep, 128)


def test_a_result_loads_in_a_clean_process(tmp_path: Path) -> None:
    source, output = make_source("kda", tmp_path / "source"), tmp_path / "out"
    assert compress(source, output, make_text(tmp_path), "--no-refit", "--no-evaluate") == 0
    verification = json.loads((output / "compression.json").read_text())["verification"]
    assert verification["stock_class"] == "KDAForCausalLM"
    assert verification["oracle_relative_error"] < 1e-4
    assert verification["generation_error"] < 1e-4


def without(name: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {key: value for key, value in tensors.items() if key != name}


def replaced(name: str, *shape: int) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: tensors | {name: torch.zeros(shape)}


@pytest.mark.parametrize(
    ("edit", "fragments"),
    [
        (replaced(f"{MIXER}.f_proj.1.weight", 63, 20), [f"(64, 20) for {MIXER}.f_proj.1.weight", "(63, 20)"]),
        (replaced(f"{MIXER}.dt_bias", 4), [f"(64,) for {MIXER}.dt_bias", "(4,)"]),
        (replaced(f"{MIXER}.A_log", 1, 1, 4, 1), [f"(4,) for {MIXER}.A_log", "(1, 1, 4, 1)"]),
        (replaced(f"{MIXER}.f_proj.1.bias", 64), [f"unexpected {MIXER}.f_proj.1.bias"]),
        (without(f"{MIXER}.dt_bias"), [f"missing {MIXER}.dt_bias"]),
        (without(f"{MIXER}.k_conv1d.weight"), [f"missing {MIXER}.k_conv1d.weight"]),
    ],
    ids=["gate rows", "bias a head", "rate", "gate bias", "no bias", "no convolution"],
)
def test_refused_by_name(
    edit: Callable[[dict[str, Tensor]], dict[str, Tensor]], fragments: list[str], tmp_path: Path
) -> None:
    folder = save_tiny("kda", tmp_path)
    open_source(open_model(str(folder), None))
    write_weights(folder, edit(read_weights(folder)))
    with pytest.raises(RequestError) as caught:
        open_source(open_model(str(folder), None))
    for fragment in fragments:
        assert fragment in str(caught.value)


def test_value_heads_that_key_heads_cannot_share_are_refused(tmp_path: Path) -> None:
    folder = edit_config(save_tiny("kda", tmp_path), {"num_v_heads": 3})
    with pytest.raises(RequestError, match="layer 0 3 value heads for 2 key heads"):
        open_model(str(folder), None)
