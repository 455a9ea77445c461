"""Why states have the rank they have: what the keys span, over as much of the past as a head remembers.

With the L2-normalised keys k_s of one key head and the decays alpha of a value head that it serves:

    mean key          norm of the mean of all k_s: near 1, all keys are alike
    keys in horizon   entropy effective rank of sum k_s k_s^T over the last tau tokens of a text (<= KEY_WINDOW keys)
    decayed keys      entropy effective rank of sum (alpha_{s+1} ... alpha_t) k_s k_s^T over all tokens of a text

Neither sum is centred, as the state's is not. tau is the head's horizon in that text. All n keys of a token count; its
decay comes before the first of them.

Notation as in `architectures.base`; L mixers, D documents, W = KEY_WINDOW, n keys of a token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from compressor.architectures.base import Mixer, RecurrenceTap
from compressor.probe.horizons import decay_horizon
from compressor.probe.spectra import entropy_effective_rank

KEY_WINDOW = 1024
"""Keys of a text that are kept for the covariance inside the horizon: four times the width of any head."""


@dataclass(frozen=True, slots=True, eq=False)
class KeyFigures:
    """Of every value head, float64 [heads], all layers after one another; medians over documents but for the first two.

    `horizon` is infinite without decay.
    """

    horizon: Tensor
    mean_key_norm: Tensor
    rank_in_horizon: Tensor
    rank_decayed: Tensor


@dataclass(slots=True, eq=False)
class _Layer:
    """Sums over all documents, and what is known of the documents that are being read."""

    group: int
    keys_per_token: int
    unit_keys: list[Tensor] = field(default_factory=list)
    key_sum: Tensor | None = None
    key_count: int = 0
    decay_sum: Tensor | None = None
    log_decay: Tensor | None = None
    recent: Tensor | None = None
    covariance: Tensor | None = None
    document_decay: Tensor | None = None
    document_tokens: int = 0
    ranks: list[tuple[Tensor, Tensor]] = field(default_factory=list)


class KeyStatistics(RecurrenceTap):
    """Collects while texts run through a model; `end_documents` after each batch of them, `figures` at the end.

    Memory does not grow with the tokens of a text.
    """

    def __init__(self, mixers: Sequence[Mixer]) -> None:
        self._layers = {
            mixer.layer: _Layer(mixer.num_v_heads // mixer.num_k_heads, mixer.keys_per_token) for mixer in mixers
        }

    def on_log_decay(self, layer: int, log_decay: Tensor) -> None:
        """log alpha [B, T, H_v] of the tokens whose keys come next."""
        self._layers[layer].log_decay = log_decay.double()

    def on_key(self, layer: int, key: Tensor) -> Tensor:
        held = self._layers[layer]
        held.unit_keys.append(F.normalize(key.float(), dim=-1))
        if len(held.unit_keys) == held.keys_per_token:
            self._add(held, torch.stack(held.unit_keys, dim=2).flatten(1, 2))
            held.unit_keys.clear()
        return key

    def _add(self, held: _Layer, unit: Tensor) -> None:
        """Take the keys [B, T n, H_k, d_k] of the tokens whose decays came last."""
        summed = unit.double().sum((0, 1))
        held.key_sum = summed if held.key_sum is None else held.key_sum + summed
        held.key_count += unit.shape[0] * unit.shape[1]
        held.recent = (unit if held.recent is None else torch.cat([held.recent, unit], dim=1))[:, -KEY_WINDOW:]
        self._decay(held, unit)

    def end_documents(self) -> None:
        """The texts of a batch have ended: take the ranks of each, and forget them."""
        for held in self._layers.values():
            if held.recent is None or held.covariance is None or held.document_decay is None:
                continue
            decay = held.document_decay
            held.decay_sum = decay.sum(0) if held.decay_sum is None else held.decay_sum + decay.sum(0)
            horizon = decay_horizon(decay / held.document_tokens)
            window = _window_covariance(held.recent, horizon, held.group, held.keys_per_token)
            held.ranks.append((_rank(window), _rank(held.covariance)))
            held.recent = held.covariance = held.document_decay = held.log_decay = None
            held.document_tokens = 0

    def figures(self) -> KeyFigures:
        """Of all texts that have ended.

        Raises:
            ValueError: none has.
        """
        parts: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        for held in self._layers.values():
            if held.key_sum is None or held.decay_sum is None:
                raise ValueError("no text has ended")
            norm = (held.key_sum / held.key_count).norm(dim=-1).repeat_interleave(held.group)
            ranks = (torch.cat(list(each)).quantile(0.5, dim=0) for each in zip(*held.ranks, strict=True))
            tokens = held.key_count // held.keys_per_token
            parts.append((decay_horizon(held.decay_sum / tokens), norm, *ranks))
        return KeyFigures(*(torch.cat(list(each)).cpu() for each in zip(*parts, strict=True)))

    def _decay(self, held: _Layer, unit: Tensor) -> None:
        """Take the decayed covariance [B, H_v, d_k, d_k] over the keys `unit` [B, T n, H_k, d_k]."""
        batch, keys_seen, heads, _ = unit.shape
        tokens = keys_seen // held.keys_per_token
        decay = held.log_decay
        if decay is None:
            decay = unit.new_zeros(batch, tokens, heads * held.group, dtype=torch.float64)
        held.log_decay = None
        total = decay.sum(1)  # [B, H_v]
        weights = (total[:, None] - decay.cumsum(1)).exp().repeat_interleave(held.keys_per_token, dim=1)
        keys = unit.double().repeat_interleave(held.group, dim=2)
        added = torch.einsum("bthi,bthj->bhij", keys * weights[..., None], keys)
        if held.covariance is None or held.document_decay is None:
            held.covariance, held.document_decay = added, total
        else:
            held.covariance = held.covariance * total.exp()[..., None, None] + added
            held.document_decay = held.document_decay + total
        held.document_tokens += tokens


def _window_covariance(recent: Tensor, horizon: Tensor, group: int, keys_per_token: int) -> Tensor:
    """Sum of k k^T over the keys of the last `horizon` [B, H_v] tokens in `recent` [B, W, H_k, d_k]."""
    window = recent.shape[1]
    counted = (horizon.clamp(1, window).ceil() * keys_per_token).clamp(max=window)
    age = torch.arange(window, 0, -1, device=recent.device)[None, :, None]
    inside = (age <= counted[:, None]).double()
    keys = recent.double().repeat_interleave(group, dim=2)
    return torch.einsum("bthi,bthj->bhij", keys * inside[..., None], keys)


def _rank(covariance: Tensor) -> Tensor:
    return entropy_effective_rank(torch.linalg.eigvalsh(covariance).clamp(min=0))


def finite_horizon(horizon: float) -> float | None:
    """For JSON, which has no infinity."""
    return horizon if math.isfinite(horizon) else None
