"""Whole tiny fla models on the CPU: against the definitions, and against themselves token by token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.reference.formulas import model_logits, relative_error
from tests.tiny_models import tiny_model

pytestmark = pytest.mark.usefixtures("fla_on_cpu")

VOCABULARY = 64

# Name in tests.tiny_models and what is changed of it.
LINEAR_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gated_deltanet": ("gated_deltanet", {}),
    "gated_deltanet, grouped value heads": ("gated_deltanet_grouped", {}),
    "gated_deltanet, wide values": ("gated_deltanet_wide_values", {}),
    "gated_deltanet, no short convolution": ("gated_deltanet_no_short_conv", {}),
    "gated_deltanet, no gate": ("gated_deltanet_no_gate", {}),
    "gated_deltanet, sigmoid gate": ("gated_deltanet", {"output_gate_activation": "sigmoid"}),
    "gated_deltanet, tied": ("gated_deltanet_tied", {}),
    "gated_deltanet, negative eigenvalues": ("gated_deltanet_negative_eigenvalues", {}),
    "gated_deltanet, nothing fused": ("gated_deltanet", {"fuse_norm": False, "fuse_swiglu": False}),
    "gated_deltaproduct": ("gated_deltaproduct", {}),
    "gated_deltaproduct, one key": ("gated_deltaproduct_one_key", {}),
    "gated_deltaproduct, three keys": ("gated_deltaproduct_three_keys", {}),
    "gated_deltaproduct, no gates": ("gated_deltaproduct_no_gates", {}),
    "gated_deltaproduct, no short convolution": ("gated_deltaproduct_no_short_conv", {}),
    "gated_deltaproduct, tied": ("gated_deltaproduct_tied", {}),
    "gated_deltaproduct, nothing fused": ("gated_deltaproduct", {"fuse_norm": False, "fuse_swiglu": False}),
    "kda": ("kda", {}),
    "kda, bounded gate, one value head a key head": (
        "kda",
        {
            "num_v_heads": None,
            "allow_neg_eigval": True,
            "safe_gate": True,
            "lower_bound": -5.0,
            "use_short_conv": False,
            "fuse_norm": False,
            "fuse_swiglu": False,
        },
    ),
    "delta_net": ("delta_net", {}),
    "delta_net, sum norm": ("delta_net_sum_norm", {}),
    "delta_net, sum norm and relu": ("delta_net_relu", {"qk_norm": "sum"}),
    "delta_net, relu": ("delta_net_relu", {}),
    "delta_net, elu": ("delta_net_elu", {}),
    "delta_net, identity": ("delta_net_identity", {}),
    "delta_net, gate": ("delta_net_gate", {}),
    "delta_net, no beta": ("delta_net_no_beta", {}),
    "delta_net, no short convolution": ("delta_net_no_short_conv", {}),
    "delta_net, negative eigenvalues": ("delta_net", {"allow_neg_eigval": True}),
    "delta_net, nothing fused": ("delta_net", {"fuse_norm": False, "fuse_swiglu": False}),
}
OTHER_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gated_deltanet, powlu": ("gated_deltanet", {"hidden_act": "powlu"}),
    "gated_deltanet, attention over residuals": ("gated_deltanet", {"attnres_block_size": 2}),
    "delta_net, attention over residuals": ("delta_net", {"attnres_block_size": 1}),
    "gated_deltanet hybrid": ("gated_deltanet_hybrid", {}),
    "gated_deltanet hybrid, window and grouped heads": (
        "gated_deltanet_hybrid",
        {"attn": {"layers": [0, 2], "num_heads": 4, "num_kv_heads": 2, "window_size": 5, "qkv_bias": True}},
    ),
    "gated_deltaproduct, attention over residuals": ("gated_deltaproduct", {"attnres_block_size": 2}),
    "gated_deltaproduct hybrid": ("gated_deltaproduct_hybrid", {}),
    "kda hybrid": ("kda", {"num_hidden_layers": 3, "attn": {"layers": [1], "num_heads": 2}}),
    "delta_net hybrid": ("delta_net", {"attn": {"layers": [1], "num_heads": 2}}),
}
ALL_MODELS = LINEAR_MODELS | OTHER_MODELS


def build(model: str) -> Any:
    name, overrides = ALL_MODELS[model]
    return tiny_model(name, overrides)


def draw_tokens(*shape: int) -> Tensor:
    return torch.randint(2, VOCABULARY, shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("tokens", [20, 80])  # fla takes its recurrent path up to 64 tokens, its chunked one above
@pytest.mark.parametrize("model", LINEAR_MODELS)
def test_logits_are_those_of_the_definition(model, tokens):
    network, prompt = build(model), draw_tokens(1, tokens)
    with torch.no_grad():
        expected = model_logits(network, prompt)
        assert relative_error(network(prompt).logits, expected) < 2e-5
        assert relative_error(network.double()(prompt).logits, expected) < 1e-10


@pytest.mark.parametrize(
    "model",
    [
        "gated_deltanet, grouped value heads",
        "gated_deltanet, no gate",
        "gated_deltaproduct, three keys",
        "kda",
        "delta_net, elu",
    ],
)
def test_gradients_are_those_of_the_definition(model):
    network, prompt = build(model).double(), draw_tokens(1, 70)
    names, parameters = zip(*network.named_parameters(), strict=True)

    def gradients(logits: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(F.cross_entropy(logits[0, :-1], prompt[0, 1:]), parameters)

    actual, expected = gradients(network(prompt).logits), gradients(model_logits(network, prompt))
    for name, a, b in zip(names, actual, expected, strict=True):
        assert relative_error(a, b) < 1e-9, name


@pytest.mark.parametrize("model", ALL_MODELS)
def test_every_parameter_gets_a_gradient(model):
    network = build(model)
    network(draw_tokens(2, 70)).logits.square().mean().backward()
    # Over a single residual there is nothing to attend to: the first layer does not use its weights.
    unused = {"model.layers.0.attn_res_proj.weight", "model.layers.0.attn_res_norm.weight"}
    for name, parameter in network.named_parameters():
        if name in unused:
            continue
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


@pytest.mark.parametrize("model", ALL_MODELS)
def test_prompt_then_single_tokens_equal_one_pass(model):
    network, tokens = build(model).double(), draw_tokens(2, 76)
    with torch.no_grad():
        expected = network(tokens, use_cache=False).logits
        outputs = network(tokens[:, :68], use_cache=True)
        parts, cache = [outputs.logits], outputs.past_key_values
        for t in range(68, 76):
            outputs = network(tokens[:, t : t + 1], past_key_values=cache, use_cache=True)
            parts.append(outputs.logits)
            cache = outputs.past_key_values
    assert relative_error(torch.cat(parts, dim=1), expected) < 1e-9


@pytest.mark.parametrize("padding_side", ["left", "right"])
@pytest.mark.parametrize("model", ALL_MODELS)
def test_padding_changes_nothing(model, padding_side):
    network, lengths = build(model).double(), [75, 66, 3]
    sequences = [draw_tokens(len(lengths), max(lengths))[i, :n] for i, n in enumerate(lengths)]
    tokens = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    mask = torch.zeros_like(tokens)
    for row, sequence in enumerate(sequences):
        part = slice(0, len(sequence)) if padding_side == "right" else slice(max(lengths) - len(sequence), None)
        tokens[row, part], mask[row, part] = sequence, 1
    # The angles of rotary embeddings come from float32 positions, which the padding shifts.
    tolerance = 1e-5 if "hybrid" in model else 1e-10
    with torch.no_grad():
        # With a cache, fla's softmax layer takes all padding to be on the left.
        padded = network(tokens, attention_mask=mask, use_cache=padding_side == "left").logits
        for row, sequence in enumerate(sequences):
            alone = network(sequence[None]).logits[0]
            assert relative_error(padded[row][mask[row].bool()], alone) < tolerance


@pytest.mark.parametrize("model", ALL_MODELS)
def test_greedy_generation_of_a_padded_batch(model):
    network, prompt = build(model).double(), draw_tokens(2, 70)
    mask = torch.ones_like(prompt)
    mask[1, :9] = 0
    generated = network.generate(
        prompt.masked_fill(mask == 0, 0),
        attention_mask=mask,
        max_new_tokens=6,
        min_new_tokens=6,
        do_sample=False,
        pad_token_id=0,
    )
    for row, tokens in enumerate((prompt[:1], prompt[1:, 9:])):
        for _ in range(6):
            with torch.no_grad():
                logits = network(tokens, use_cache=False).logits[:, -1]
            logits[:, network.config.eos_token_id] = float("-inf")
            tokens = torch.cat([tokens, logits.argmax(-1, keepdim=True)], dim=1)
        assert torch.equal(generated[row, 70:], tokens[0, -6:])


@pytest.mark.parametrize("model", ["gated_deltanet", "delta_net", "gated_deltanet hybrid"])
def test_bfloat16_model(model):
    network, tokens = build(model), draw_tokens(2, 80)
    with torch.no_grad():
        expected = network(tokens).logits
        logits = network.bfloat16()(tokens).logits
    assert logits.dtype == torch.bfloat16
    assert relative_error(logits, expected) < 0.05


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("layer_name", ["GatedDeltaNet", "DeltaNet"])
def test_fused_and_separate_convolutions_agree(layer_name, bias):
    """Only the layers, not the models, can have a bias in the convolution."""
    import fla.layers

    layer_class = vars(fla.layers)[layer_name]
    width = {"head_dim": 16, "expand_v": 1.0} if layer_name == "GatedDeltaNet" else {}
    layer = layer_class(hidden_size=32, num_heads=2, conv_bias=bias, layer_idx=0, **width).double().eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, dtype=torch.float64, generator=generator))
        hidden = torch.randn(2, 70, 32, dtype=torch.float64, generator=generator)
        without_cache, with_cache = layer(hidden)[0], layer(hidden, use_cache=True)[0]
    assert relative_error(without_cache, with_cache) < 1e-12
    if bias:
        assert layer.q_conv1d.bias.abs().min() > 0


def held_out_tokens(demo_model: Path, count: int) -> Tensor:
    from tokenizers import Tokenizer

    text = (demo_model.parent / "held_out.txt").read_text(encoding="utf-8")
    ids = (
        Tokenizer.from_file(str(demo_model / "tokenizer.json")).encode(text[: 8 * count], add_special_tokens=False).ids
    )
    return torch.tensor([ids[:count]])


def test_trained_model_predicts_text(demo_model):
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32)
    tokens = held_out_tokens(demo_model, 512)
    with torch.no_grad():
        logits = network(tokens).logits
        assert relative_error(logits[:, :150], model_logits(network, tokens[:, :150])) < 2e-5
    perplexity = float(F.cross_entropy(logits[0, :-1], tokens[0, 1:]).exp())
    assert 20 < perplexity < 70
