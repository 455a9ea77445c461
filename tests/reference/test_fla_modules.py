"""fla's own modules on CPU tensors, against the definitions in float64; values and gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.reference.formulas import convolve, relative_error, rms_norm

pytestmark = pytest.mark.usefixtures("fla_on_cpu")

Function = Callable[..., Tensor | tuple[Tensor, ...]]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def randomized(module: nn.Module, seed: int = 9) -> nn.Module:
    """In float64, with every parameter drawn anew."""
    with torch.no_grad():
        for offset, parameter in enumerate(module.parameters()):
            parameter.copy_(draw(*parameter.shape, seed=seed + offset))
    return module.double()


def assert_same(actual: Function, expected: Function, inputs: Sequence[Tensor]) -> None:
    """Outputs and gradients of both, for random output gradients, in float64."""
    results = []
    for function in (actual, expected):
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        outputs = function(*leaves)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        weights = [draw(*output.shape, seed=5 + i) for i, output in enumerate(outputs)]
        results.append([*outputs, *torch.autograd.grad(outputs, leaves, weights)])
    assert len(results[0]) == len(results[1])
    for index, (a, b) in enumerate(zip(*results, strict=True)):
        assert relative_error(a, b) < 1e-12, f"output or gradient {index}"


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return rms_norm(centred, weight, eps) + bias


def test_rms_norm_with_residual_and_prenorm():
    from fla.modules.norm.layernorm import rms_norm as fla_rms_norm

    def expected(x: Tensor, weight: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return rms_norm(x + residual, weight, 1e-3), x + residual

    def actual(x: Tensor, weight: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return fla_rms_norm(x, weight, None, residual=residual, eps=1e-3, prenorm=True)

    assert_same(actual, expected, [draw(2, 7, 16), draw(16, seed=1), draw(2, 7, 16, seed=2)])


def test_rms_norm_and_layer_norm_and_group_norm():
    from fla.modules.norm import layernorm

    inputs = [draw(3, 5, 12), draw(12, seed=1), draw(12, seed=2)]
    assert_same(lambda x, w, b: layernorm.rms_norm(x, w, b, eps=1e-3), lambda x, w, b: rms_norm(x, w, 1e-3) + b, inputs)
    assert_same(
        lambda x, w, b: layernorm.layer_norm(x, w, b, eps=1e-3), lambda x, w, b: layer_norm(x, w, b, 1e-3), inputs
    )

    def grouped(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return rms_norm(x.unflatten(-1, (3, 4)), w.view(3, 4), 1e-3).flatten(-2) + b

    assert_same(
        lambda x, w, b: layernorm.group_norm(x, w, b, eps=1e-3, is_rms_norm=True, num_groups=3), grouped, inputs
    )


def test_rms_norm_rounds_as_bfloat16_modules_do():
    from fla.modules import RMSNorm

    norm = randomized(RMSNorm(16, eps=1e-3)).bfloat16()
    x, residual = draw(4, 16).bfloat16(), draw(4, 16, seed=1).bfloat16()
    y, summed = norm(x, residual=residual, prenorm=True)
    assert y.dtype == summed.dtype == torch.bfloat16
    # The norm is taken of the exact sum; only what is handed on is rounded.
    exact = x.double() + residual.double()
    assert torch.equal(summed, exact.bfloat16())
    torch.testing.assert_close(y, rms_norm(exact, norm.weight.double(), 1e-3).bfloat16(), rtol=2**-7, atol=0)
    in_float32 = norm(x, residual=None, prenorm=True, residual_in_fp32=True)[1]
    assert in_float32.dtype == torch.float32
    assert torch.equal(in_float32, x.float())


@pytest.mark.parametrize("activation", ["swish", "silu", "sigmoid"])
@pytest.mark.parametrize("is_rms_norm", [True, False])
def test_gated_norm(activation, is_rms_norm):
    from fla.modules.norm import fused_norm_gate

    def expected(x: Tensor, g: Tensor, w: Tensor, b: Tensor) -> Tensor:
        normalized = rms_norm(x, w, 1e-3) + b if is_rms_norm else layer_norm(x, w, b, 1e-3)
        return normalized * (torch.sigmoid(g) if activation == "sigmoid" else silu(g))

    def actual(x: Tensor, g: Tensor, w: Tensor, b: Tensor) -> Tensor:
        function = fused_norm_gate.rms_norm_gated if is_rms_norm else fused_norm_gate.layer_norm_gated
        return function(x, g, w, b, activation=activation, eps=1e-3)

    assert_same(actual, expected, [draw(2, 5, 3, 8), draw(2, 5, 3, 8, seed=1), draw(8, seed=2), draw(8, seed=3)])


def test_unknown_activations_are_refused():
    from fla.modules.causal_conv1d.ops import causal_conv1d

    with pytest.raises(ValueError, match="activation 'gelu' is unknown; known are silu, swish, sigmoid and None"):
        causal_conv1d(draw(1, 3, 2), draw(2, 4), activation="gelu")


def test_gated_norm_with_residual():
    from fla.modules.norm import fused_norm_gate

    def expected(x: Tensor, g: Tensor, w: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return rms_norm(x + residual, w, 1e-6) * silu(g), x + residual

    def actual(x: Tensor, g: Tensor, w: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return fused_norm_gate.rms_norm_gated(x, g, w, None, residual=residual, prenorm=True)

    assert_same(actual, expected, [draw(6, 8), draw(6, 8, seed=1), draw(8, seed=2), draw(6, 8, seed=3)])


@pytest.mark.parametrize("tokens", [1, 2, 3, 9])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_convolution_with_bias_residual_and_state(tokens, activation):
    from fla.modules.causal_conv1d.ops import causal_conv1d

    x, weight, bias = draw(2, tokens, 6), draw(6, 4, seed=1), draw(6, seed=2)
    residual, state = draw(2, tokens, 6, seed=3), draw(2, 6, 4, seed=4)

    def actual(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return causal_conv1d(x, weight, bias, residual, state, output_final_state=True, activation=activation)

    def expected(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        y = convolve(x, weight, bias, state[..., 1:].transpose(1, 2))
        final = torch.cat([state.transpose(1, 2), x], dim=1)[:, -4:].transpose(1, 2)
        return (silu(y) if activation else y) + residual, final

    assert_same(actual, expected, [x, weight, bias, residual, state])


def test_convolution_without_state():
    from fla.modules.causal_conv1d.ops import causal_conv1d

    assert_same(lambda x, weight: causal_conv1d(x, weight)[0], convolve, [draw(2, 9, 6), draw(6, 4, seed=1)])


def test_convolution_of_a_strided_view():
    """fla's layers hand over slices of a wider projection."""
    from fla.modules.causal_conv1d.ops import causal_conv1d

    x, weight = draw(2, 9, 10)[..., 2:8], draw(6, 4, seed=1)
    assert relative_error(causal_conv1d(x, weight)[0], convolve(x, weight)) < 1e-12


def test_convolution_of_packed_sequences_with_states():
    from fla.modules.causal_conv1d.ops import causal_conv1d, causal_conv1d_update_states

    x, weight, states = draw(1, 15, 6), draw(6, 4, seed=1), draw(4, 6, 4, seed=2)
    boundaries = [0, 2, 9, 10, 15]  # one shorter than the kernel, one of a single token
    cu_seqlens = torch.tensor(boundaries)
    y, finals = causal_conv1d(
        x, weight, initial_state=states, output_final_state=True, activation="silu", cu_seqlens=cu_seqlens
    )
    for n, (start, end) in enumerate(pairwise(boundaries)):
        before = states[n : n + 1].transpose(1, 2)
        part = x[:, start:end]
        assert relative_error(y[:, start:end], silu(convolve(part, weight, None, before[:, 1:]))) < 1e-12
        assert torch.equal(finals[n], torch.cat([before, part], dim=1)[0, -4:].T)
    updated = causal_conv1d_update_states(x[0], 4, states, cu_seqlens)
    assert torch.equal(updated, finals)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_convolution_steps_equal_one_pass_and_update_the_cache_in_place(packed, dtype):
    from fla.modules import ShortConvolution

    module = randomized(ShortConvolution(6, 4, bias=True, activation="silu")).to(dtype)
    x = draw(3, 7, 6).to(dtype)
    with torch.no_grad():
        whole, final = module(x, output_final_state=True)
        _, cache = module(x[:, :3], output_final_state=True)
        kept = cache
        for t in range(3, 7):
            token = x[:, t : t + 1].transpose(0, 1) if packed else x[:, t : t + 1]
            cu_seqlens = torch.arange(4) if packed else None
            y, cache = module(token, cache=cache, output_final_state=True, cu_seqlens=cu_seqlens)
            assert y.shape == token.shape
            torch.testing.assert_close(y.flatten(0, 1), whole[:, t])
    assert cache is kept
    assert torch.equal(cache, final)


def test_swiglu_and_swiglu_linear():
    from fla.modules.activations import swiglu, swiglu_linear

    x, y, weight, bias = draw(2, 5, 8), draw(2, 5, 8, seed=1), draw(3, 8, seed=2), draw(3, seed=3)
    assert_same(swiglu, lambda x, y: silu(x) * y, [x, y])
    assert_same(swiglu_linear, lambda x, y, w, b: (silu(x) * y) @ w.T + b, [x, y, weight, bias])


def test_powglu_and_powglu_linear():
    from fla.modules.activations import powglu, powglu_linear

    def expected(x: Tensor, y: Tensor) -> Tensor:
        return torch.where(x > 0, x.clamp_min(1e-300) ** (2 / (x.abs().sqrt() + 1)) * torch.sigmoid(x), silu(x)) * y

    x, y, weight = draw(2, 5, 8), draw(2, 5, 8, seed=1), draw(3, 8, seed=2)
    assert_same(lambda x, y: powglu(x, y, 2.0), expected, [x, y])
    assert_same(lambda x, y, w: powglu_linear(x, y, w, None, 2.0), lambda x, y, w: expected(x, y) @ w.T, [x, y, weight])


def rotated(x: Tensor, positions: Tensor, interleaved: bool, rotary_channels: int) -> Tensor:
    """Each pair of channels as a complex number, turned by position * 10000^(-2i / channels); positions [B, T]."""
    frequencies = 10000.0 ** (-torch.arange(0, rotary_channels, 2, dtype=torch.float64) / rotary_channels)
    turn = torch.polar(torch.ones(()).double(), positions[..., None, None].double() * frequencies)
    part = x[..., :rotary_channels]
    pairs = part.unflatten(-1, (-1, 2)) if interleaved else torch.stack(part.chunk(2, dim=-1), dim=-1)
    product = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
    flat = product.flatten(-2) if interleaved else torch.cat(product.unbind(-1), dim=-1)
    return torch.cat([flat, x[..., rotary_channels:]], dim=-1)


def tables(positions: int, rotary_channels: int) -> tuple[Tensor, Tensor]:
    frequencies = 10000.0 ** (-torch.arange(0, rotary_channels, 2, dtype=torch.float64) / rotary_channels)
    angles = torch.arange(positions)[:, None] * frequencies
    return angles.cos(), angles.sin()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_channels", [8, 6])
def test_rotary_embedding_with_offsets(interleaved, rotary_channels):
    from fla.modules.rotary.ops import rotary_embedding

    cos, sin = tables(20, rotary_channels)
    offsets = torch.tensor([3, 11])

    def actual(x: Tensor) -> Tensor:
        return rotary_embedding(x, cos, sin, interleaved=interleaved, seqlen_offsets=offsets)

    def expected(x: Tensor) -> Tensor:
        return rotated(x, offsets[:, None] + torch.arange(5), interleaved, rotary_channels)

    assert_same(actual, expected, [draw(2, 5, 3, 8)])
    assert_same(
        lambda x: rotary_embedding(x, cos, sin, interleaved=interleaved, seqlen_offsets=4),
        lambda x: rotated(x, 4 + torch.arange(5).expand(2, 5), interleaved, rotary_channels),
        [draw(2, 5, 3, 8)],
    )


def test_rotary_embedding_of_packed_sequences_and_in_place():
    from fla.modules.rotary.ops import rotary_embedding

    (cos, sin), x = tables(20, 8), draw(1, 9, 2, 8)
    positions = torch.tensor([[0, 1, 2, 3, 5, 6, 7, 8, 9]])
    expected = rotated(x, positions, False, 8)
    packed = {"seqlen_offsets": torch.tensor([0, 5]), "cu_seqlens": torch.tensor([0, 4, 9])}
    assert relative_error(rotary_embedding(x, cos, sin, **packed), expected) < 1e-12
    changed = x.clone()
    assert rotary_embedding(changed, cos, sin, inplace=True, **packed).data_ptr() == changed.data_ptr()
    assert relative_error(changed, expected) < 1e-12


def test_rotary_embedding_of_padding_before_position_zero_is_zero():
    from fla.modules.rotary.ops import rotary_embedding

    (cos, sin), x = tables(20, 6), draw(2, 5, 2, 8)
    y = rotary_embedding(x, cos, sin, seqlen_offsets=torch.tensor([-2, 0]))
    assert torch.equal(y[0, :2, :, :6], torch.zeros(2, 2, 6).double())
    assert relative_error(y[0, 2:], rotated(x[:1, 2:], torch.arange(3)[None], False, 6)[0]) < 1e-12
    assert relative_error(y[1], rotated(x[1:], torch.arange(5)[None], False, 6)[0]) < 1e-12


def test_attention_over_residuals():
    from fla.ops.attnres import fused_attnres

    def expected(query: Tensor, weight: Tensor, output_weight: Tensor, *residuals: Tensor) -> tuple[Tensor, Tensor]:
        scores = [0.7 * (rms_norm(residual, weight, 1e-3) * query[0]).sum(-1) for residual in residuals]
        total = sum(score.exp() for score in scores)
        probabilities = [score.exp() / total for score in scores]
        mixture = sum(p[..., None] * residual for p, residual in zip(probabilities, residuals, strict=True))
        return rms_norm(mixture, output_weight, 1e-3), torch.stack(probabilities)

    def actual(query: Tensor, weight: Tensor, output_weight: Tensor, *residuals: Tensor) -> tuple[Tensor, Tensor]:
        return fused_attnres(
            query=query,
            residuals=residuals,
            rms_weight=weight,
            output_rms_weight=output_weight,
            rms_eps=1e-3,
            scale=0.7,
            return_weights=True,
        )

    residuals = [draw(2, 5, 8, seed=seed) for seed in (3, 4, 5)]
    assert_same(actual, expected, [draw(1, 8), draw(8, seed=1), draw(8, seed=2), *residuals])


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """One sequence: q [T, H, D], k and v [S, H_kv, D]; the last query stands at the last key."""
    queries, keys = q.shape[0], k.shape[0]
    rows = []
    for i in range(queries):
        position = i + keys - queries
        first = 0 if window is None else max(0, position - window + 1)
        heads = []
        for h in range(q.shape[1]):
            group = h * k.shape[1] // q.shape[1]
            seen = slice(first, position + 1)
            scores = k[seen, group] @ q[i, h] / q.shape[2] ** 0.5
            heads.append(F.softmax(scores, dim=0) @ v[seen, group])
        rows.append(torch.stack(heads))
    return torch.stack(rows)


@pytest.mark.parametrize("queries", [1, 4, 9])
@pytest.mark.parametrize("window", [None, 2, 5, 20])
def test_softmax_attention(queries, window):
    from fla.layers.attn import flash_attn_func, flash_attn_varlen_func

    bounds = (-1, -1) if window is None else (window - 1, 0)

    def expected(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.stack([softmax_attention(*sequence, window) for sequence in zip(q, k, v, strict=True)])

    inputs = [draw(2, queries, 4, 8), draw(2, 9, 2, 8, seed=1), draw(2, 9, 2, 8, seed=2)]
    assert_same(lambda q, k, v: flash_attn_func(q, k, v, causal=True, window_size=bounds), expected, inputs)

    def packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attn_varlen_func(
            q.flatten(0, 1),
            k.flatten(0, 1),
            v.flatten(0, 1),
            cu_seqlens_q=torch.tensor([0, queries, 2 * queries]),
            cu_seqlens_k=torch.tensor([0, 9, 18]),
            max_seqlen_q=queries,
            max_seqlen_k=9,
            causal=True,
            window_size=bounds,
        ).unflatten(0, (2, -1))

    assert_same(packed, expected, inputs)


def test_softmax_attention_that_is_not_causal():
    from fla.layers.attn import flash_attn_func

    q, k, v = draw(1, 6, 1, 8), draw(1, 6, 1, 8, seed=1), draw(1, 6, 1, 8, seed=2)
    scores = (q[0, :, 0] @ k[0, :, 0].T) / 8**0.5
    everything = scores.softmax(-1) @ v[0, :, 0]
    assert relative_error(flash_attn_func(q, k, v)[0, :, 0], everything) < 1e-12
    beyond = (torch.arange(6) - torch.arange(6)[:, None]) > 2
    right = scores.masked_fill(beyond, float("-inf")).softmax(-1) @ v[0, :, 0]
    assert relative_error(flash_attn_func(q, k, v, window_size=(-1, 2))[0, :, 0], right) < 1e-12
