"""Spectra, decays and key covariances along texts, against what one pass over all recorded activations gives."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compressor.architectures.base import RecurrenceTap
from compressor.architectures.family import family_of
from compressor.architectures.recurrent_state import state_layout
from compressor.probe import keys
from compressor.probe.segments import Boundary, read_in_segments
from compressor.probe.spectra import FIGURES, spectrum
from compressor.probe.states import Probed, measure_states
from tests.families import TinyCheckpoint, tiny_checkpoint, tiny_tokens
from tests.probe.test_states import log_decay, record_calls, written_out

FAMILIES = [
    "gated_deltanet_grouped",
    "gated_deltanet_wide_values",
    "gated_deltaproduct_three_keys",
    "gated_deltaproduct_no_gates",
    "kda",
    "delta_net",
    "delta_net_sum_norm",
    "q35",
    "qn",
]


def probed(tiny: TinyCheckpoint) -> Probed:
    return Probed(tiny.model, tiny.architecture, tiny.mixers, family_of(tiny.raw_config))


class _Keys(RecurrenceTap):
    def __init__(self) -> None:
        self.seen: dict[int, list[Tensor]] = {}

    def on_key(self, layer: int, key: Tensor) -> Tensor:
        self.seen.setdefault(layer, []).append(key.double())
        return key


@pytest.mark.parametrize("name", FAMILIES)
def test_figures_along_and_at_the_end(name: str, tmp_path: Path) -> None:
    """Documents of two lengths: each boundary has the figures of a fresh pass over the text so far."""
    tiny = tiny_checkpoint(name, tmp_path)
    documents = [tiny_tokens(length, length) for length in (128, 256, 255 + 1)]
    found = measure_states(probed(tiny), documents, 64, 2, lambda tokens: None)
    assert found.tokens == (64, 128, 192, 256)
    assert found.along.shape == (3, 4, sum(mixer.num_v_heads for mixer in tiny.mixers), len(FIGURES))
    assert bool(found.along[0, 2:].isnan().all())
    layout = state_layout(tiny.raw_config["model_type"])
    for number, document in enumerate(documents):
        for boundary in range(len(document) // 64):
            with torch.inference_mode():
                cache = tiny.model(input_ids=document[None, : 64 * (boundary + 1)], use_cache=True).past_key_values
            fresh = torch.cat([spectrum(layout.read(cache, mixer)).figures for mixer in tiny.mixers], dim=1)[0]
            expected, measured = fresh[:, :4], found.along[number, boundary, :, :4]
            torch.testing.assert_close(measured, expected, rtol=1e-3, atol=1e-3)
        assert torch.equal(found.end[number], found.along[number, len(document) // 64 - 1])
    assert len(found.losses) == 3
    assert all(float(values[0]) == pytest.approx(1) for values in found.singular_values)


@pytest.mark.parametrize("name", FAMILIES)
def test_horizons_and_key_covariances(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "KEY_WINDOW", 100)
    tiny = tiny_checkpoint(name, tmp_path)
    documents = [tiny_tokens(192, seed) for seed in range(3)]
    found = measure_states(probed(tiny), documents, 64, 3, lambda tokens: None).keys
    tap, calls = _Keys(), record_calls(tiny, monkeypatch)
    with tiny.architecture.tapped(tiny.model, tiny.mixers, tap):
        read_in_segments(tiny.model, documents, 192, 3, lambda boundary: None)
    place = 0
    for number, mixer in enumerate(tiny.mixers):
        seen = torch.stack(tap.seen[mixer.layer], dim=2)  # [3, 192, n, H_k, d_k]
        unit = seen / seen.norm(dim=-1, keepdim=True)
        decay = log_decay(calls[number])
        decay = decay.mean(-1) if decay is not None and decay.ndim == 4 else decay
        for head in range(mixer.num_v_heads):
            own = unit[:, :, :, head // (mixer.num_v_heads // mixer.num_k_heads)]
            alpha = torch.zeros(3, 192, dtype=torch.float64) if decay is None else decay[:, :, head]
            horizon = torch.inf if decay is None else float(-1 / alpha.mean())
            assert float(found.horizon[place]) == pytest.approx(horizon, rel=1e-4)
            assert float(found.mean_key_norm[place]) == pytest.approx(float(own.mean((0, 1, 2)).norm()), rel=1e-4)
            ranks = [_brute_force_ranks(own[row], alpha[row]) for row in range(3)]
            expected = [sorted(values)[1] for values in zip(*ranks, strict=True)]
            assert float(found.rank_in_horizon[place]) == pytest.approx(expected[0], rel=1e-3)
            assert float(found.rank_decayed[place]) == pytest.approx(expected[1], rel=1e-3)
            place += 1
    assert place == len(found.horizon)


def _brute_force_ranks(unit: Tensor, log_alpha: Tensor) -> tuple[float, float]:
    """Of keys [T, n, d_k] and log alpha [T] of one head in one document."""
    mean = float(log_alpha.mean())
    inside = 100 if mean == 0 else min(100, max(1, int(torch.tensor(-1 / mean).ceil())) * unit.shape[1])
    recent = unit.flatten(0, 1)[-inside:]
    decayed = torch.zeros(unit.shape[-1], unit.shape[-1], dtype=torch.float64)
    for keys_of_token, decay in zip(unit, log_alpha, strict=True):
        decayed = decay.exp() * decayed + sum(key[:, None] * key for key in keys_of_token)
    return _effective_rank(recent.mT @ recent), _effective_rank(decayed)


def _effective_rank(matrix: Tensor) -> float:
    shares = torch.linalg.svdvals(matrix)
    shares = shares / shares.sum()
    return float(torch.exp(-(shares * shares.clamp(min=1e-300).log()).sum()))


def test_recurrence_of_a_mask_is_not_taken_for_the_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """States under probing taps are those without: the probe changes nothing that it looks at."""
    tiny = tiny_checkpoint("q35", tmp_path)
    calls = record_calls(tiny, monkeypatch)
    seen: list[Tensor] = []

    def look(boundary: Boundary) -> None:
        seen.append(state_layout("qwen3_5_text").read(boundary.cache, tiny.mixers[1]).clone())

    read_in_segments(tiny.model, [tiny_tokens(64)], 64, 1, look)
    expected = written_out(calls[1], None)
    torch.testing.assert_close(seen[0].double(), expected, rtol=1e-4, atol=1e-5)
    figures = measure_states(probed(tiny), [tiny_tokens(64)], 64, 1, lambda tokens: None)
    first = sum(mixer.num_v_heads for mixer in tiny.mixers[:1])
    measured = figures.end[0, first : first + tiny.mixers[1].num_v_heads, 1:4]
    torch.testing.assert_close(measured, spectrum(expected.float()).figures[0, :, 1:4], rtol=1e-3, atol=1e-3)


def test_memory_does_not_grow_with_the_text(tmp_path: Path) -> None:
    """As many tensor elements are alive before the last of sixty segments as before the twentieth."""
    tiny = tiny_checkpoint("gated_deltanet", tmp_path)
    original, calls, alive = tiny.model.forward, 0, []

    def counting(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls in (20, 60):
            gc.collect()
            alive.append(sum(one.numel() for one in gc.get_objects() if type(one) is Tensor))
        return original(*args, **kwargs)

    tiny.model.forward = counting
    measure_states(probed(tiny), [tiny_tokens(64 * 60)], 64, 1, lambda tokens: None)
    assert calls == 60
    assert alive[0] == alive[1]
