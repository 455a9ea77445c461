"""The gated delta product against its definition in float64, alone and inside fla's stock model."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from compressor.reference.delta_product import chunked_gated_delta_product
from tests.reference.comparison import assert_same, draw
from tests.reference.formulas import l2_normalize, relative_error
from tests.tiny_models import tiny_model


def delta_product(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
    """Token by token: S <- a S, n times S <- S (I - b_j k_j k_j^T) + b_j v_j k_j^T; S and value-first."""
    steps, channels = k.shape[1] // q.shape[1], q.shape[3]
    identity = torch.eye(channels, dtype=torch.float64)
    finals, outputs = [], []
    for b in range(q.shape[0]):
        for h in range(v.shape[2]):
            head, state, rows = h // (v.shape[2] // q.shape[2]), states[b, h], []
            for t in range(q.shape[1]):
                state = g[b, t, h].exp() * state
                for s in range(t * steps, (t + 1) * steps):
                    key, step = k[b, s, head], beta[b, s, h]
                    state = state @ (identity - step * torch.outer(key, key)) + step * torch.outer(v[b, s, h], key)
                rows.append(channels**-0.5 * state @ q[b, t, head])
            finals.append(state)
            outputs.append(torch.stack(rows))
    shape = (q.shape[0], v.shape[2])
    return torch.stack(outputs).unflatten(0, shape).transpose(1, 2), torch.stack(finals).unflatten(0, shape)


def draw_inputs(tokens: int, steps: int, heads: int = 1, value_heads: int = 2, batch: int = 2) -> list[Tensor]:
    """q, k, v, g, beta, states; steps up to 2, where a key's component is turned around."""
    return [
        l2_normalize(draw(batch, tokens, heads, 6, seed=1)),
        l2_normalize(draw(batch, tokens * steps, heads, 6, seed=2)),
        draw(batch, tokens * steps, value_heads, 5, seed=3),
        -draw(batch, tokens, value_heads, seed=4).exp(),
        2 * torch.sigmoid(2 * draw(batch, tokens * steps, value_heads, seed=5)),
        draw(batch, value_heads, 5, 6, seed=6),
    ]


@pytest.mark.parametrize("steps", [1, 2, 3, 4])
@pytest.mark.parametrize("tokens", [1, 40])
def test_values_and_gradients_are_those_of_the_definition(tokens, steps):
    def reference(q, k, v, g, beta, states):
        output, final = chunked_gated_delta_product(q, k, v, g, beta, steps, initial_state=states.transpose(-1, -2))
        return output, final.transpose(-1, -2)

    assert_same(reference, delta_product, draw_inputs(tokens, steps))


def test_without_decay_and_with_normalization():
    q, k, v, g, beta, states = draw_inputs(40, 2)
    q, k = 3 * q, 0.01 * k  # short keys, where the epsilon counts
    no_decay, empty = torch.zeros_like(g), torch.zeros_like(states)
    expected, _ = delta_product(l2_normalize(q), l2_normalize(k), v, no_decay, beta, empty)
    output, _ = chunked_gated_delta_product(q, k, v, None, beta, 2, use_qk_l2norm=True)
    assert relative_error(output, expected) < 1e-12


def test_packed_sequences_are_kept_apart():
    q, k, v, g, beta, states = draw_inputs(50, 3, batch=1)
    bounds = [0, 17, 18, 50]
    output, finals = chunked_gated_delta_product(q, k, v, g, beta, 3, cu_seqlens=torch.tensor(bounds))
    for n, (start, end) in enumerate(pairwise(bounds)):
        tokens, keys = slice(start, end), slice(3 * start, 3 * end)
        parts = (q[:, tokens], k[:, keys], v[:, keys], g[:, tokens], beta[:, keys], torch.zeros_like(states))
        expected, final = delta_product(*parts)
        assert relative_error(output[:, tokens], expected) < 1e-12
        assert relative_error(finals[n : n + 1].transpose(-1, -2), final) < 1e-12


def test_another_number_of_keys_is_refused():
    q, k, v, g, beta, _ = draw_inputs(5, 2)
    with pytest.raises(ValueError, match="10 keys are not 3 for each of 5 tokens"):
        chunked_gated_delta_product(q, k, v, g, beta, 3)


MODELS = {
    "two steps": {},
    "one step": {"num_householder": 1},
    "three steps, decay, negative eigenvalues": {
        "num_householder": 3,
        "use_forget_gate": True,
        "allow_neg_eigval": True,
    },
    "no short convolution, no output gate": {"use_short_conv": False, "use_output_gate": False},
}


def model(name: str) -> torch.nn.Module:
    return tiny_model("gated_deltaproduct", MODELS[name]).double()


def mixer_output(layer: torch.nn.Module, x: Tensor) -> Tensor:
    """fla's GatedDeltaProduct layer [B, T, hidden] by its definition, without short convolution and output gate."""
    q, k, v = (F.silu(projection(x)) for projection in (layer.q_proj, layer.k_proj, layer.v_proj))
    batch, tokens, steps = x.shape[0], x.shape[1], layer.num_householder
    q = l2_normalize(q.view(batch, tokens, layer.num_heads, -1))
    k = l2_normalize(k.view(batch, tokens * steps, layer.num_heads, -1))
    v = v.view(batch, tokens * steps, layer.num_heads, -1)
    beta = torch.sigmoid(layer.b_proj(x)).view(batch, tokens * steps, layer.num_heads)
    decay = torch.zeros(batch, tokens, layer.num_heads, dtype=torch.float64)
    states = torch.zeros(batch, layer.num_heads, v.shape[-1], k.shape[-1], dtype=torch.float64)
    output, _ = delta_product(q, k, v, decay, beta, states)
    norm = (output.square().mean(-1, keepdim=True) + layer.o_norm.eps).rsqrt()
    return layer.o_proj((output * norm * layer.o_norm.weight).flatten(2))


@pytest.mark.parametrize("tokens", [20, 80])  # fla's recurrent path without gradients, then its chunked one
@pytest.mark.usefixtures("fla_on_cpu")
def test_the_stock_layer_is_that_of_the_definition(tokens):
    layer = model("no short convolution, no output gate").model.layers[0].attn
    x = draw(2, tokens, 32)
    with torch.no_grad():
        assert relative_error(layer(x)[0], mixer_output(layer, x)) < 1e-10


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.usefixtures("fla_on_cpu")
def test_the_stock_model_runs_and_continues_from_its_cache(name):
    network, tokens = model(name), torch.randint(64, (2, 76), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = network(tokens, use_cache=False).logits
        outputs = network(tokens[:, :68], use_cache=True)
        parts = [outputs.logits]
        for t in range(68, 76):
            outputs = network(tokens[:, t : t + 1], past_key_values=outputs.past_key_values, use_cache=True)
            parts.append(outputs.logits)
    assert relative_error(torch.cat(parts, dim=1), expected) < 1e-9


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.usefixtures("fla_on_cpu")
def test_every_parameter_of_the_stock_model_gets_a_gradient(name):
    network = model(name)
    network(torch.arange(70)[None] % 64).logits.square().mean().backward()
    for parameter_name, parameter in network.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert parameter.grad.isfinite().all(), parameter_name
        assert parameter.grad.abs().sum() > 0, parameter_name
