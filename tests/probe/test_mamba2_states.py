"""Mamba-2's states, decays and scans, against the state-space model written out in float64 from the mixers' weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from compressor.architectures.base import Mixer
from compressor.architectures.cached_forward import forward_from_cache
from compressor.architectures.decay import decays_seen
from compressor.architectures.family import family_of
from compressor.architectures.recurrent_state import state_layout
from compressor.probe.horizons import decay_horizon
from compressor.probe.spectra import spectrum
from compressor.probe.states import Probed, measure_states
from tests.families import WITHOUT_SCALE, TinyCheckpoint, tiny_checkpoint, tiny_tokens


@contextmanager
def inputs_and_outputs(tiny: TinyCheckpoint) -> Iterator[dict[int, tuple[Tensor, Tensor]]]:
    """What each mixer reads and gives in a pass, float64 [B, T, hidden]."""
    seen: dict[int, tuple[Tensor, Tensor]] = {}
    handles = []
    for mixer in tiny.mixers:

        def hook(_: object, args: object, kwargs: object, output: object, layer: int = mixer.layer) -> None:
            first = args[0] if args else kwargs["hidden_states"]  # type: ignore[index]
            seen[layer] = first.double(), (output[0] if isinstance(output, tuple) else output).double()

        module = tiny.model.get_submodule(mixer.module)
        handles.append(module.register_forward_hook(hook, with_kwargs=True))
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def weights_of(tiny: TinyCheckpoint, mixer: Mixer) -> dict[str, Tensor]:
    return {name: value.double() for name, value in tiny.model.get_submodule(mixer.module).state_dict().items()}


def scanned(
    mixer: Mixer, projected: Tensor, weights: dict[str, Tensor], least: Tensor | float = 0.0, most: float = torch.inf
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs [B, T, H, P], last state [B, H, P, N] and log decays [B, T, H] from in_proj's rows, token by token.

    Group g serves the heads g H / G to (g + 1) H / G - 1, as in the kernels and in every single step. Step sizes are
    at least `least`, one for all tokens or one each [T], and at most `most`.
    """
    heads, width, groups, size = mixer.num_v_heads, mixer.head_v_dim, mixer.num_k_heads, mixer.head_k_dim
    inner = heads * width
    _, convolved, dt = projected.split([inner, inner + 2 * groups * size, heads], -1)
    taps = weights["conv1d.weight"]
    padded = F.pad(convolved.transpose(1, 2), (taps.shape[-1] - 1, 0))
    convolved = F.silu(F.conv1d(padded, taps, weights.get("conv1d.bias"), groups=len(taps))).transpose(1, 2)
    x, key, query = convolved.split([inner, groups * size, groups * size], -1)
    x = x.unflatten(-1, (heads, width))
    owners = [head * groups // heads for head in range(heads)]
    key, query = (each.unflatten(-1, (groups, size))[:, :, owners] for each in (key, query))
    bounds = torch.as_tensor(least, dtype=torch.float64).expand(dt.shape[1])
    step = torch.maximum(F.softplus(dt + weights["dt_bias"]), bounds[:, None]).clamp(max=most)
    log_decay = -weights["A_log"].exp() * step
    skip = weights["D"].view(heads, -1)
    state = x.new_zeros(len(x), heads, width, size)
    outputs = []
    for t in range(x.shape[1]):
        added = step[:, t, :, None, None] * x[:, t, :, :, None] * key[:, t, :, None, :]
        state = log_decay[:, t, :, None, None].exp() * state + added
        outputs.append((state * query[:, t, :, None]).sum(-1) + skip * x[:, t])
    return torch.stack(outputs, dim=1), state, log_decay


def written_out(
    tiny: TinyCheckpoint, mixer: Mixer, hidden: Tensor, weights: dict[str, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Output [B, T, hidden] of a mixer, with its last state and its log decays as `scanned` gives them."""
    projected = F.linear(hidden, weights["in_proj.weight"], weights.get("in_proj.bias"))
    y, state, log_decay = scanned(mixer, projected, weights)
    gate = projected[..., : mixer.num_v_heads * mixer.head_v_dim]
    normed = gated_norm(tiny, y.flatten(2), gate, weights.get("norm.weight"), mixer.num_k_heads)
    return F.linear(normed, weights["out_proj.weight"], weights.get("out_proj.bias")), state, log_decay


def gated_norm(tiny: TinyCheckpoint, y: Tensor, gate: Tensor, weight: Tensor | None, groups: int) -> Tensor:
    if weight is None:
        return y * F.silu(gate)
    before = tiny.raw_config.get("norm_before_gate", False)
    grouped = (y if before else y * F.silu(gate)).unflatten(-1, (groups, -1))
    epsilon = tiny.architecture.norm_epsilon(tiny.config)
    normed = (grouped / (grouped.square().mean(-1, keepdim=True) + epsilon).sqrt()).flatten(-2) * weight
    return normed * F.silu(gate) if before else normed


@pytest.mark.parametrize("name", WITHOUT_SCALE)
@pytest.mark.parametrize("length", [3, 300])
def test_mixers_compute_the_state_space_model(name: str, length: int, tmp_path: Path) -> None:
    """More than one chunk of every implementation; the state is that of the stock cache."""
    tiny = tiny_checkpoint(name, tmp_path)
    ids = torch.stack([tiny_tokens(length, seed) for seed in range(2)])
    layout = state_layout(family_of(tiny.raw_config))
    decays: dict[int, Tensor] = {}
    with (
        torch.no_grad(),
        inputs_and_outputs(tiny) as seen,
        decays_seen(tiny.model, tiny.mixers, family_of(tiny.raw_config), decays.__setitem__),
    ):
        _, cache = forward_from_cache(tiny.model, None, input_ids=ids)
    for mixer in tiny.mixers:
        hidden, actual = seen[mixer.layer]
        output, state, log_decay = written_out(tiny, mixer, hidden, weights_of(tiny, mixer))
        torch.testing.assert_close(actual, output, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(layout.read(cache, mixer).double(), state, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(decays[mixer.layer].double(), log_decay, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", WITHOUT_SCALE)
def test_steps_go_on_from_the_cache(name: str, tmp_path: Path) -> None:
    tiny = tiny_checkpoint(name, tmp_path)
    ids = tiny_tokens(75)[None]
    with torch.no_grad():
        whole = tiny.model(input_ids=ids, use_cache=False).logits
        output, cache = forward_from_cache(tiny.model, None, input_ids=ids[:, :70])
        parts = [output.logits]
        for position in range(70, 75):
            output, cache = forward_from_cache(tiny.model, cache, input_ids=ids[:, position, None])
            parts.append(output.logits)
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-4, atol=1e-5)


def test_training_computes_the_same_with_gradients(tmp_path: Path) -> None:
    """In training mode stock layers look for a fused kernel; the gradients are those of the written-out model."""
    for name in ("m2", "m2_fla"):
        tiny = tiny_checkpoint(name, tmp_path / name)
        ids = tiny_tokens(140)[None]
        mixer = tiny.mixers[-1]
        module = tiny.model.get_submodule(mixer.module)
        weight = module.get_parameter("in_proj.weight")
        with inputs_and_outputs(tiny) as seen:
            tiny.model.train()(input_ids=ids, use_cache=False)
        hidden, output = seen[mixer.layer]
        (actual,) = torch.autograd.grad(output.square().sum(), weight)
        leaf = weight.detach().double().requires_grad_()
        weights = weights_of(tiny, mixer) | {"in_proj.weight": leaf}
        output, _, _ = written_out(tiny, mixer, hidden.detach(), weights)
        (expected,) = torch.autograd.grad(output.square().sum(), leaf)
        torch.testing.assert_close(actual.double(), expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("name", ["m2", "m2_fla"])
def test_probing_measures_these_states(name: str, tmp_path: Path) -> None:
    """fla's class reads one token at a time behind its first segment; the figures are those of one pass."""
    tiny = tiny_checkpoint(name, tmp_path)
    documents = [tiny_tokens(120, seed) for seed in range(2)]
    probed = Probed(tiny.model, tiny.architecture, tiny.mixers, family_of(tiny.raw_config))
    figures = measure_states(probed, documents, 60, 2, lambda tokens: None)
    with torch.no_grad(), inputs_and_outputs(tiny) as seen:
        logits = tiny.model(input_ids=torch.stack(documents), use_cache=False).logits[:, :-1].double()
    losses = F.cross_entropy(logits.transpose(1, 2), torch.stack(documents)[:, 1:], reduction="none")
    measured = torch.stack([each.losses for each in figures.losses]).double()
    torch.testing.assert_close(measured, losses, rtol=1e-4, atol=1e-4)
    horizons, first = [], 0
    for mixer in tiny.mixers:
        _, state, log_decay = written_out(tiny, mixer, seen[mixer.layer][0], weights_of(tiny, mixer))
        expected, heads = spectrum(state.float()).figures, slice(first, first + mixer.num_v_heads)
        torch.testing.assert_close(figures.end[:, heads, :4], expected[..., :4].double(), rtol=1e-3, atol=1e-4)
        horizons.append(decay_horizon(log_decay.mean((0, 1))))
        first += mixer.num_v_heads
    torch.testing.assert_close(figures.keys.horizon, torch.cat(horizons), rtol=1e-4, atol=1e-6)
