from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from compressor.reference.recurrence import chunked_gated_delta_rule, recurrent_gated_delta_rule
from tests.reference.formulas import delta_rule, l2_normalize, relative_error

RECURRENCES = [recurrent_gated_delta_rule, chunked_gated_delta_rule]
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}


@dataclass(frozen=True)
class Inputs:
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None
    beta: Tensor

    def to(self, dtype: torch.dtype) -> Inputs:
        g = None if self.g is None else self.g.to(dtype)
        return Inputs(self.q.to(dtype), self.k.to(dtype), self.v.to(dtype), g, self.beta.to(dtype))


def draw(tokens: int, heads: int = 2, value_heads: int = 2, batch: int = 1, seed: int = 0) -> Inputs:
    """Normalised keys and queries of 12 channels, values of 10; decays and steps all over their ranges."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        # Rounded to float32, so that the same numbers reach both precisions.
        return torch.randn(*shape, generator=generator).double()

    q, k = l2_normalize(normal(batch, tokens, heads, 12)), l2_normalize(normal(batch, tokens, heads, 12))
    v = normal(batch, tokens, value_heads, 10)
    g, beta = -normal(batch, tokens, value_heads).exp(), torch.sigmoid(2 * normal(batch, tokens, value_heads))
    return Inputs(q, k, v, g, beta).to(torch.float32).to(torch.float64)


def _gates_of_minus_50(inputs: Inputs) -> Inputs:
    g = -0.01 * torch.ones_like(inputs.beta)
    g[:, 3::17] = -50
    return replace(inputs, g=g.float().double())


def _correlated_keys_full_steps(inputs: Inputs) -> Inputs:
    k = l2_normalize(inputs.k + 3 * inputs.k[:, :1])
    return replace(inputs, k=k.float().double(), beta=torch.ones_like(inputs.beta), g=0.01 * inputs.g)


def _reflections(inputs: Inputs) -> Inputs:
    """beta = 2 turns the state's component along the key around; without decay nothing ever shrinks."""
    return replace(inputs, beta=torch.full_like(inputs.beta, 2.0), g=None)


CASES = {
    "several chunks": draw(150),
    "whole chunks": draw(128),
    "one token": draw(1),
    "less than a chunk": draw(37),
    "batch of two": draw(70, batch=2),
    "grouped value heads": draw(70, heads=2, value_heads=6),
    "no gate": replace(draw(130), g=None),
    "gates of -50": _gates_of_minus_50(draw(150)),
    "correlated keys, beta 1": _correlated_keys_full_steps(draw(150)),
    "reflections, beta 2": _reflections(draw(150)),
    "no decay in the gate": replace(draw(70), g=torch.zeros_like(draw(70).beta)),
}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("recurrence", RECURRENCES)
@pytest.mark.parametrize("case", CASES)
def test_agrees_with_float64_loop(case, recurrence, dtype):
    inputs = CASES[case]
    expected, state = delta_rule(inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta, scale=12**-0.5)
    x = inputs.to(dtype)
    output, final = recurrence(x.q, x.k, x.v, x.g, x.beta)
    assert output.dtype == final.dtype == dtype
    assert relative_error(output, expected) < TOLERANCE[dtype]
    assert relative_error(final, state.transpose(-1, -2)) < TOLERANCE[dtype]


@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_small_outputs_after_a_large_gate_keep_their_precision(recurrence):
    """Each token by itself: a norm over all of them would hide tokens whose outputs are small."""
    x = CASES["gates of -50"]
    expected, _ = delta_rule(x.q, x.k, x.v, x.g, x.beta, scale=12**-0.5)
    single = x.to(torch.float32)
    output, _ = recurrence(single.q, single.k, single.v, single.g, single.beta)
    errors = (output.double() - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert errors.max() < 1e-4


@pytest.mark.parametrize("state_v_first", [False, True])
@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_initial_state_scale_and_layout(recurrence, state_v_first):
    x = draw(100, heads=1, value_heads=2, batch=2)
    states = torch.randn(2, 2, 10, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected, expected_final = delta_rule(x.q, x.k, x.v, x.g, x.beta, scale=0.3, states=states)
    given = states if state_v_first else states.transpose(-1, -2)
    output, final = recurrence(x.q, x.k, x.v, x.g, x.beta, scale=0.3, initial_state=given, state_v_first=state_v_first)
    assert relative_error(output, expected) < 1e-12
    assert relative_error(final if state_v_first else final.transpose(-1, -2), expected_final) < 1e-12


@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_continuing_from_the_state_equals_one_run(recurrence):
    x = draw(130)
    whole, final = recurrence(x.q, x.k, x.v, x.g, x.beta)
    _, state = recurrence(x.q[:, :71], x.k[:, :71], x.v[:, :71], x.g[:, :71], x.beta[:, :71])
    rest, continued = recurrence(
        x.q[:, 71:], x.k[:, 71:], x.v[:, 71:], x.g[:, 71:], x.beta[:, 71:], initial_state=state
    )
    assert relative_error(rest, whole[:, 71:]) < 1e-12
    assert relative_error(continued, final) < 1e-12


@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_l2_normalization(recurrence):
    x = draw(70)
    q, k = 5 * x.q, 0.001 * x.k  # short keys, where the epsilon counts
    expected, _ = delta_rule(l2_normalize(q), l2_normalize(k), x.v, x.g, x.beta, scale=12**-0.5)
    output, _ = recurrence(q, k, x.v, x.g, x.beta, use_qk_l2norm=True)
    assert relative_error(output, expected) < 1e-12


@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_packed_sequences_are_kept_apart(recurrence):
    x, lengths = draw(176, value_heads=4), [70, 0, 1, 64, 41]
    states = torch.randn(5, 4, 12, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    cu_seqlens = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    output, finals = recurrence(x.q, x.k, x.v, x.g, x.beta, initial_state=states, cu_seqlens=cu_seqlens)
    for n, (start, end) in enumerate(zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True)):
        if start == end:
            assert torch.equal(finals[n], states[n])
            continue
        part = slice(start, end)
        expected, final = delta_rule(
            x.q[:, part],
            x.k[:, part],
            x.v[:, part],
            x.g[:, part],
            x.beta[:, part],
            scale=12**-0.5,
            states=states[n : n + 1].transpose(-1, -2),
        )
        assert relative_error(output[:, part], expected) < 1e-12
        assert relative_error(finals[n], final[0].transpose(-1, -2)) < 1e-12


@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_bfloat16_inputs_are_computed_in_float32(recurrence):
    x = draw(100).to(torch.bfloat16)
    expected, _ = delta_rule(x.q, x.k, x.v, x.g, x.beta, scale=12**-0.5)
    output, state = recurrence(x.q, x.k, x.v, x.g, x.beta)
    assert output.dtype == torch.bfloat16
    assert state.dtype == torch.float32
    assert relative_error(output, expected) < 2**-8  # the rounding of the output alone


@pytest.mark.parametrize("with_gate", [True, False])
@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_gradients_agree_with_those_of_the_loop(recurrence, with_gate):
    x = draw(67, heads=1, value_heads=2)
    state = torch.randn(1, 2, 12, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    inputs = [x.q, x.k, x.v, x.beta, state, *([x.g] if with_gate else [])]

    def loss(output: Tensor, final: Tensor) -> Tensor:
        return output.square().sum() + final.sin().sum()

    def gradients(run) -> tuple[Tensor, ...]:
        leaves = [tensor.clone().requires_grad_() for tensor in inputs]
        q, k, v, beta, initial, *gate = leaves
        output, final = run(q, k, v, gate[0] if gate else None, beta, initial)
        return torch.autograd.grad(loss(output, final), leaves)

    def loop(q, k, v, g, beta, initial):
        output, final = delta_rule(l2_normalize(q), l2_normalize(k), v, g, beta, 12**-0.5, initial.transpose(-1, -2))
        return output, final.transpose(-1, -2)

    def reference(q, k, v, g, beta, initial):
        return recurrence(q, k, v, g, beta, initial_state=initial, use_qk_l2norm=True)

    for actual, expected in zip(gradients(reference), gradients(loop), strict=True):
        assert relative_error(actual, expected) < 1e-11


@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_impossible_shapes_are_refused(recurrence):
    x = draw(5, heads=2, value_heads=3)
    with pytest.raises(ValueError, match="3 value heads are not a multiple of 2 key heads"):
        recurrence(x.q, x.k, x.v, x.g, x.beta)
    x = draw(5)
    with pytest.raises(ValueError, match=r"the initial state is \[1, 2, 10, 12\] as \[B, HV, K, V\], not"):
        recurrence(x.q, x.k, x.v, x.g, x.beta, initial_state=torch.zeros(1, 2, 10, 12))
    with pytest.raises(ValueError, match=r"a packed batch has shape \[1, 4, ...\] here, got \[1, 5, 2, 12\]"):
        recurrence(x.q, x.k, x.v, x.g, x.beta, cu_seqlens=torch.tensor([0, 4]))
