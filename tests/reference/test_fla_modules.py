"""fla's own modules on CPU tensors, against the definitions in float64; values and gradients."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from tests.reference.comparison import assert_same, draw, randomized
from tests.reference.formulas import convolve, relative_error, rms_norm

pytestmark = pytest.mark.usefixtures("fla_on_cpu")


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
