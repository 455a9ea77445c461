"""fla's rotary embedding and attention on CPU tensors, against the definitions in float64; values and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.reference.comparison import assert_same, draw
from tests.reference.formulas import relative_error, rms_norm

pytestmark = pytest.mark.usefixtures("fla_on_cpu")


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
