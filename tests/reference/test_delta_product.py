"""The gated delta product against its definition in float64; inside fla's stock model: test_fla_models."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from compressor.reference.delta_product import chunked_gated_delta_product
from tests.reference.comparison import assert_same, draw
from tests.reference.formulas import delta_product, l2_normalize, relative_error


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
