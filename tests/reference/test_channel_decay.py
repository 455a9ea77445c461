"""The delta rule with a decay a channel against its definition in float64; in fla's stock model: test_fla_models."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from compressor.reference.channel_decay import chunked_channel_decay_delta_rule
from compressor.reference.recurrence import chunked_gated_delta_rule, recurrent_gated_delta_rule
from tests.reference.comparison import assert_same, draw
from tests.reference.formulas import delta_rule, l2_normalize, relative_error

RECURRENCES = [recurrent_gated_delta_rule, chunked_channel_decay_delta_rule]


def draw_inputs(tokens: int, heads: int = 1, value_heads: int = 2, batch: int = 2) -> list[Tensor]:
    """q, k, v, g, beta, states; steps up to 2, where a key's component is turned around."""
    return [
        l2_normalize(draw(batch, tokens, heads, 6, seed=1)),
        l2_normalize(draw(batch, tokens, heads, 6, seed=2)),
        draw(batch, tokens, value_heads, 5, seed=3),
        -draw(batch, tokens, value_heads, 6, seed=4).exp(),
        2 * torch.sigmoid(2 * draw(batch, tokens, value_heads, seed=5)),
        draw(batch, value_heads, 5, 6, seed=6),
    ]


@pytest.mark.parametrize("recurrence", RECURRENCES)
@pytest.mark.parametrize(("tokens", "heads", "value_heads"), [(1, 1, 2), (20, 2, 4), (37, 2, 2)])
def test_values_and_gradients_are_those_of_the_definition(recurrence, tokens, heads, value_heads):
    def reference(q, k, v, g, beta, states):
        return recurrence(q, k, v, g, beta, initial_state=states, state_v_first=True)

    def definition(q, k, v, g, beta, states):
        return delta_rule(q, k, v, g, beta, 6**-0.5, states)

    assert_same(reference, definition, draw_inputs(tokens, heads, value_heads))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_several_pieces_and_channels_that_forget_everything(dtype):
    """Over two pieces of 128 tokens; exp(50) has no place in float32."""
    q, k, v, g, beta, _ = draw_inputs(150, batch=1)
    g = 0.01 * g
    g[:, 3::17, :, ::2] = -50
    q, k = 3 * q, 0.01 * k  # short keys, where the epsilon of the norm counts
    inputs = [x.to(dtype) for x in (q, k, v, g, beta)]
    output, state = chunked_channel_decay_delta_rule(*inputs, use_qk_l2norm=True)
    q, k, v, g, beta = (x.double() for x in inputs)
    expected, expected_state = delta_rule(l2_normalize(q), l2_normalize(k), v, g, beta, 6**-0.5)
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-12}[dtype]
    assert relative_error(output, expected) < tolerance
    assert relative_error(state.transpose(2, 3), expected_state) < tolerance


def test_equal_decays_are_one_decay_a_head():
    q, k, v, g, beta, _ = draw_inputs(70)
    expected, _ = chunked_gated_delta_rule(q, k, v, g[..., 0], beta)
    output, _ = chunked_channel_decay_delta_rule(q, k, v, g[..., :1].expand_as(g), beta)
    assert relative_error(output, expected) < 1e-12


@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_packed_sequences_are_kept_apart(recurrence):
    inputs = draw_inputs(40, batch=1)[:-1]
    bounds = [0, 17, 18, 40]
    output, finals = recurrence(*inputs, cu_seqlens=torch.tensor(bounds))
    for number, (start, end) in enumerate(pairwise(bounds)):
        expected, final = delta_rule(*(x[:, start:end] for x in inputs), 6**-0.5)
        assert relative_error(output[:, start:end], expected) < 1e-12
        assert relative_error(finals[number : number + 1].transpose(-1, -2), final) < 1e-12


def test_no_decay_is_refused():
    q, k, v, _, beta, _ = draw_inputs(5)
    with pytest.raises(ValueError, match="needs the decays g"):
        chunked_channel_decay_delta_rule(q, k, v, None, beta)


@pytest.mark.parametrize("lower_bound", [None, -5.0])
@pytest.mark.parametrize("name", ["chunk_kda", "fused_recurrent_kda"])
@pytest.mark.usefixtures("fla_on_cpu")
def test_what_fla_calls_is_what_fla_defines(name, lower_bound):
    """Gates and recurrence of fla's own plain versions, which are float32."""
    import fla.layers.kda
    from fla.ops.kda.gate import naive_kda_gate, naive_kda_lowerbound_gate
    from fla.ops.kda.naive import naive_recurrent_kda

    q, k, v, raw, beta, states = (x.float() for x in draw_inputs(40, heads=2, value_heads=4))
    rate, bias = draw(4, seed=7).float(), draw(24, seed=8).float()
    if lower_bound is None:
        g = naive_kda_gate(raw, rate, bias)
    else:
        g = naive_kda_lowerbound_gate(raw, rate, bias, lower_bound)
    initial = states.transpose(2, 3)
    expected = naive_recurrent_kda(q, k, v, g, 2 * beta.sigmoid(), initial_state=initial, output_final_state=True)
    output, state = vars(fla.layers.kda)[name](
        q=q,
        k=k,
        v=v,
        g=raw,
        beta=beta,
        A_log=rate,
        dt_bias=bias,
        initial_state=states,
        output_final_state=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        allow_neg_eigval=True,
        lower_bound=lower_bound,
        state_v_first=True,
    )
    assert relative_error(output, expected[0]) < 1e-5
    assert relative_error(state.transpose(2, 3), expected[1]) < 1e-5
