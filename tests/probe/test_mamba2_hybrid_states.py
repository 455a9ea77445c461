"""States and decays of the Mamba-2 hybrids, against the recurrence written out in float64; limits of step sizes."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
from tests.families import MAMBA2_HYBRIDS, TinyCheckpoint, open_tiny, tiny_checkpoint, tiny_tokens
from tests.probe.test_mamba2_states import inputs_and_outputs, scanned, weights_of
from tests.tiny_models import save_tiny


def projected_rows(tiny: TinyCheckpoint, mixer: Mixer, hidden: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
    """What reaches gate, convolution and step sizes; Falcon-H1 multiplies input and rows by factors of its config."""
    fields = tiny.config.to_dict()
    hidden = hidden * fields.get("ssm_in_multiplier", 1.0)
    rows = F.linear(hidden, weights["in_proj.weight"], weights.get("in_proj.bias"))
    values, keys = mixer.num_v_heads * mixer.head_v_dim, mixer.num_k_heads * mixer.head_k_dim
    parts = rows.split([values, values, keys, keys, mixer.num_v_heads], -1)
    factors = fields.get("ssm_multipliers", [1.0] * 5)
    return torch.cat([part * factor for part, factor in zip(parts, factors, strict=True)], -1)


def written_out(
    tiny: TinyCheckpoint, mixer: Mixer, hidden: Tensor, least: Tensor | float = 0.0, most: float = torch.inf
) -> tuple[Tensor, Tensor]:
    """Last state [B, H, P, N] and log decays [B, T, H]."""
    weights = weights_of(tiny, mixer)
    _, state, log_decay = scanned(mixer, projected_rows(tiny, mixer, hidden, weights), weights, least, most)
    return state, log_decay


def read(tiny: TinyCheckpoint, ids: Tensor, *lengths: int) -> tuple[Any, dict[int, Tensor], dict[int, Tensor]]:
    """The cache after passes over parts of ids [B, T], and of each mixer its inputs and log decays, all tokens."""
    family = family_of(tiny.raw_config)
    inputs: dict[int, list[Tensor]] = {mixer.layer: [] for mixer in tiny.mixers}
    decays: dict[int, list[Tensor]] = {mixer.layer: [] for mixer in tiny.mixers}
    cache = None
    with (
        torch.no_grad(),
        inputs_and_outputs(tiny) as seen,
        decays_seen(tiny.model, tiny.mixers, family, lambda layer, decay: decays[layer].append(decay)),
    ):
        for part in ids.split(list(lengths), dim=1):
            _, cache = forward_from_cache(tiny.model, cache, input_ids=part)
            for layer, parts in inputs.items():
                parts.append(seen[layer][0])
    joined = ({layer: torch.cat(parts, dim=1) for layer, parts in each.items()} for each in (inputs, decays))
    return cache, *joined


def check(tiny: TinyCheckpoint, lengths: tuple[int, ...], least: Tensor | float = 0.0, most: float = torch.inf) -> None:
    """States in the cache and decays, of passes over so many tokens, two sequences."""
    ids = torch.stack([tiny_tokens(sum(lengths), seed) for seed in range(2)])
    cache, inputs, decays = read(tiny, ids, *lengths)
    layout = state_layout(family_of(tiny.raw_config))
    for mixer in tiny.mixers:
        state, log_decay = written_out(tiny, mixer, inputs[mixer.layer], least, most)
        found = layout.read(cache, mixer)
        assert tuple(found.shape) == (2, mixer.num_v_heads, mixer.head_v_dim, mixer.head_k_dim)
        torch.testing.assert_close(found.double(), state, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(decays[mixer.layer].double(), log_decay, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", MAMBA2_HYBRIDS)
@pytest.mark.parametrize("lengths", [(3,), (150,), (70, 1, 1, 50)])
def test_states_and_decays_are_those_of_the_recurrence(name: str, lengths: tuple[int, ...], tmp_path: Path) -> None:
    """Heads of 24 value channels beside 16 key channels, so that a transposed state has another shape."""
    check(tiny_checkpoint(name, tmp_path / "square"), lengths)
    fields = {"nh": {"mamba_head_dim": 24}, "zamba2": {"mamba_expand": 3, "mamba_headdim": 24}}
    other = {"mamba_d_head": 24, "mamba_expand": 3} | ({"mamba_d_ssm": 96} if name == "falcon_h1" else {})
    check(open_tiny(save_tiny(name, tmp_path / "oblong", overrides=fields.get(name, other))), lengths)


LIMITS: Mapping[str, tuple[str, float, float]] = {
    "m2": ("time_step_limit", 0.02, 0.4),
    "m2_fla": ("dt_limit", 0.02, 0.4),
    "bamba": ("time_step_limit", 0.4, 1.2),
    "falcon_h1": ("time_step_limit", 0.4, 1.2),
    "granite": ("time_step_limit", 0.4, 1.2),
    "nh": ("time_step_min", 0.4, torch.inf),
    "zamba2": ("time_step_min", 0.4, torch.inf),
}


def limited(name: str, folder: Path) -> TinyCheckpoint:
    """Nemotron-H and Zamba2 have a least step size alone; their `time_step_max` is of the initialisation."""
    field, least, most = LIMITS[name]
    limit = {field: least, "time_step_max": 1.2} if field == "time_step_min" else {field: (least, most)}
    return open_tiny(save_tiny(name, folder, overrides=limit))


@pytest.mark.parametrize("name", LIMITS)
def test_limits_of_step_sizes_hold_in_longer_passes(name: str, tmp_path: Path) -> None:
    tiny, limits = limited(name, tmp_path), LIMITS[name][1:]
    check(tiny, (90,), *limits)
    _, inputs, _ = read(tiny, tiny_tokens(90)[None], 90)
    free, held = (
        torch.cat([written_out(tiny, mixer, inputs[mixer.layer], *each)[1] for mixer in tiny.mixers])
        for each in ((), limits)
    )
    assert 0.1 < float((free != held).double().mean()) < 0.9


@pytest.mark.parametrize("name", ["nh", "zamba2"])
def test_single_steps_know_no_limit(name: str, tmp_path: Path) -> None:
    tiny = limited(name, tmp_path)
    lengths = (20, 1, 1, 1, 10)
    least = torch.tensor([0.4 if length > 1 else 0.0 for length in lengths for _ in range(length)])
    check(tiny, lengths, least)


@pytest.mark.parametrize("name", ["falcon_h1", "zamba2"])
def test_probing_measures_these_states(name: str, tmp_path: Path) -> None:
    """In segments, of which the figures are those of one pass."""
    tiny = tiny_checkpoint(name, tmp_path)
    documents = [tiny_tokens(120, seed) for seed in range(2)]
    probed = Probed(tiny.model, tiny.architecture, tiny.mixers, family_of(tiny.raw_config))
    figures = measure_states(probed, documents, 60, 2, lambda tokens: None)
    _, inputs, _ = read(tiny, torch.stack(documents), 120)
    ends = list(itertools.accumulate((mixer.num_v_heads for mixer in tiny.mixers), initial=0))
    for mixer, first, last in zip(tiny.mixers, ends[:-1], ends[1:], strict=True):
        state, log_decay = written_out(tiny, mixer, inputs[mixer.layer])
        expected = spectrum(state.float()).figures[..., :4].double()
        torch.testing.assert_close(figures.end[:, first:last, :4], expected, rtol=1e-3, atol=1e-4)
        horizon = decay_horizon(log_decay.mean((0, 1)))
        torch.testing.assert_close(figures.keys.horizon[first:last], horizon, rtol=1e-4, atol=1e-6)
