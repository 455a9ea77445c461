"""What the probe found of the states of one model, small enough to read: medians and ranges over documents."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from compressor.architectures.base import Mixer
from compressor.probe.horizons import HorizonSummary, summarise_horizons
from compressor.probe.spectra import FIGURES
from compressor.probe.states import StateFigures

SIGNIFICANT_DIGITS = 6


@dataclass(frozen=True, slots=True)
class Range:
    """Over documents; None is an infinite value."""

    median: float | None
    minimum: float | None
    maximum: float | None


@dataclass(frozen=True, slots=True)
class HeadSummary:
    """One value head at the end of the texts.

    Attributes:
        end: a range for each of FIGURES.
        condition_bound: 1 / sqrt(utilisation), which no condition number is below.
        singular_values: over the largest, descending, mean over documents.
        horizon: decay horizon in tokens; None is infinite, a head without decay.
        mean_key_norm, rank_in_horizon, rank_decayed: see `keys`.
    """

    layer: int
    head: int
    end: dict[str, Range]
    condition_bound: float | None
    singular_values: tuple[float, ...]
    horizon: float | None
    mean_key_norm: float
    rank_in_horizon: float
    rank_decayed: float


@dataclass(frozen=True, slots=True)
class Curve:
    """One figure along the text: lists [boundaries][heads], over the documents that reach a boundary."""

    median: tuple[tuple[float | None, ...], ...]
    minimum: tuple[tuple[float | None, ...], ...]
    maximum: tuple[tuple[float | None, ...], ...]


@dataclass(frozen=True, slots=True)
class StateSummary:
    """`tokens` of the boundaries and how many `documents` reach each; `heads` in the order of the curves' columns."""

    tokens: tuple[int, ...]
    documents: tuple[int, ...]
    heads: tuple[HeadSummary, ...]
    curves: dict[str, Curve]
    horizons: HorizonSummary


def summarise_states(mixers: Sequence[Mixer], figures: StateFigures) -> StateSummary:
    """Of `figures` of the value heads of `mixers`, in order."""
    places = [(mixer.layer, head) for mixer in mixers for head in range(mixer.num_v_heads)]
    ranks = figures.end[:, :, FIGURES.index("entropy_effective_rank")].quantile(0.5, dim=0)
    heads = tuple(_head(place, number, figures) for number, place in enumerate(places))
    return StateSummary(
        tokens=figures.tokens,
        documents=tuple(int(count) for count in (~figures.along[:, :, 0, 0].isnan()).sum(0)),
        heads=heads,
        curves={name: _curve(figures.along[..., index]) for index, name in enumerate(FIGURES)},
        horizons=summarise_horizons(figures.keys.horizon, ranks, places),
    )


def _head(place: tuple[int, int], number: int, figures: StateFigures) -> HeadSummary:
    end = {name: _range(figures.end[:, number, index]) for index, name in enumerate(FIGURES)}
    utilisation, keys = end["utilisation"].median, figures.keys
    return HeadSummary(
        layer=place[0],
        head=place[1],
        end=end,
        condition_bound=plain(utilisation**-0.5) if utilisation else None,
        singular_values=tuple(_rounded(value) for value in figures.singular_values[number].tolist()),
        horizon=plain(float(keys.horizon[number])),
        mean_key_norm=_rounded(float(keys.mean_key_norm[number])),
        rank_in_horizon=_rounded(float(keys.rank_in_horizon[number])),
        rank_decayed=_rounded(float(keys.rank_decayed[number])),
    )


def _range(values: Tensor) -> Range:
    """Of float64 [documents]."""
    return Range(*(plain(float(value)) for value in (np.median(values.numpy()), values.min(), values.max())))


def _curve(values: Tensor) -> Curve:
    """Of float64 [documents, boundaries, heads], NaN behind the end of a document."""
    array = values.numpy()
    return Curve(*(_rows(each(array, axis=0)) for each in (np.nanmedian, np.nanmin, np.nanmax)))


def _rows(array: np.ndarray) -> tuple[tuple[float | None, ...], ...]:
    return tuple(tuple(plain(value) for value in row) for row in array.tolist())


def plain(value: float) -> float | None:
    """For JSON, which has no infinity: to six digits, None where it is infinite."""
    return _rounded(value) if math.isfinite(value) else None


def _rounded(value: float) -> float:
    return float(f"{value:.{SIGNIFICANT_DIGITS}g}")


def column(summary: StateSummary, name: str) -> Tensor:
    """Medians of one figure at the end, float64 [heads]; infinite where the summary has None."""
    medians = (head.end[name].median for head in summary.heads)
    return torch.tensor([math.inf if value is None else value for value in medians], dtype=torch.float64)
