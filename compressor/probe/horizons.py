"""How far back a head remembers, and how figures of heads go together: pure mathematics in float64.

A head that multiplies its state by alpha_t keeps a share exp(sum log alpha) of what it wrote; its decay horizon is the
number of tokens after which 1/e is left at the mean rate,

    tau = -1 / mean(log alpha)

which is infinite for a head that never forgets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SHORT_HORIZON = 256
"""Tokens within which a head counts as forgetting."""
LONG_HORIZON = 4096
"""Tokens beyond which a head counts as keeping."""


@dataclass(frozen=True, slots=True)
class HorizonSummary:
    """Horizons of all heads of a model, together.

    `spearman` is the rank correlation of horizon and entropy effective rank at the end, None where there is none to
    take; `share_short` the share of heads with a horizon of at most SHORT_HORIZON; `long_heads` the (layer, head) whose
    horizon is above LONG_HORIZON.
    """

    spearman: float | None
    share_short: float
    long_heads: tuple[tuple[int, int], ...]


def decay_horizon(mean_log_decay: Tensor) -> Tensor:
    """Tokens, float64 [...], from the mean of log alpha (at most 0); infinite for 0."""
    mean = mean_log_decay.double()
    return torch.where(mean < 0, -1 / torch.where(mean < 0, mean, -1.0), torch.inf)


def summarise_horizons(horizons: Tensor, effective_ranks: Tensor, heads: Sequence[tuple[int, int]]) -> HorizonSummary:
    """Of horizons and ranks [heads], with the (layer, head) of each."""
    return HorizonSummary(
        spearman=spearman(horizons, effective_ranks),
        share_short=float((horizons <= SHORT_HORIZON).double().mean()),
        long_heads=tuple(head for head, tau in zip(heads, horizons.tolist(), strict=True) if tau > LONG_HORIZON),
    )


def spearman(x: Tensor, y: Tensor) -> float | None:
    """Spearman's rank correlation of x and y [N], equal values sharing their mean rank.

    None below three values, and where all values of one are equal.
    """
    if len(x) < 3:
        return None
    return pearson(mean_ranks(x), mean_ranks(y))


def pearson(x: Tensor, y: Tensor) -> float | None:
    """Pearson's correlation of x and y [N]; None below two values, and where all values of one are equal."""
    x, y = x.double(), y.double()
    if len(x) < 2 or bool((x == x[0]).all()) or bool((y == y[0]).all()):
        return None
    x, y = x - x.mean(), y - y.mean()
    return float((x @ y / (x.norm() * y.norm())).clamp(-1, 1))


def mean_ranks(values: Tensor) -> Tensor:
    """Ranks from 1, float64 [N]; equal values share the mean of theirs."""
    _, places, counts = values.double().unique(sorted=True, return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    return (last - (counts.double() - 1) / 2)[places]
