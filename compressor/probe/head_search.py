"""Which heads carry what a model does: states of one layer, then of one head, are cut, and the loss is taken.

Coarse to fine: every layer alone; then, in the layers that matter, every head alone. The effect of one head can be
hidden by another that does the same: the figures say what the model loses without it, not what it knows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from compressor.evaluation.results import Score, score_of
from compressor.probe.states import Probed
from compressor.probe.truncation import Cut

SHARE_OF_LARGEST = 0.05
"""A layer is searched whose effect is at least this share of the largest, and two standard errors above nothing,
where there is an error: of one prompt or document there is none."""

Measure = Callable[[Cut | None], Tensor]
"""Losses float64 [items] under a cut, of prompts or documents; None is the model as it is."""


@dataclass(frozen=True, slots=True)
class Effect:
    """Rise of the loss, in nats a token, where the states of one layer (`head` None) or one head are cut."""

    layer: int
    head: int | None
    rise: Score


@dataclass(frozen=True, slots=True)
class HeadSearch:
    """What was found on one task or text.

    `whole` is the rise with all states cut; `layers` in order; `heads` of the layers that were searched, those with
    the largest rise first.
    """

    name: str
    rank: int
    loss: Score
    whole: Score
    layers: tuple[Effect, ...]
    heads: tuple[Effect, ...]


def measurements(probed: Probed) -> int:
    """The most passes that a search takes."""
    return 2 + len(probed.mixers) + len(probed.heads)


def search_heads(probed: Probed, name: str, measure: Measure, rank: int) -> HeadSearch:
    """Rank the heads of a model by what is lost when their states are cut to `rank` directions.

    Raises:
        RunError: whatever `measure` raises.
    """
    dense = measure(None)

    def rise(cut: Cut) -> Score:
        return score_of((measure(cut) - dense).tolist())

    whole = rise(Cut(rank))
    layers = tuple(
        Effect(mixer.layer, None, rise(Cut(rank, {mixer.layer: tuple(range(mixer.num_v_heads))})))
        for mixer in probed.mixers
    )
    largest = max(effect.rise.mean for effect in layers)
    searched = {effect.layer for effect in layers if _matters(effect.rise, largest)}
    heads = [
        Effect(layer, head, rise(Cut(rank, {layer: (head,)}))) for layer, head in probed.heads if layer in searched
    ]
    heads.sort(key=lambda effect: -effect.rise.mean)
    return HeadSearch(name, rank, score_of(dense.tolist()), whole, layers, tuple(heads))


def _matters(rise: Score, largest: float) -> bool:
    clear = rise.standard_error is None or rise.mean > 2 * rise.standard_error
    return rise.mean > 0 and rise.mean >= SHARE_OF_LARGEST * largest and clear
