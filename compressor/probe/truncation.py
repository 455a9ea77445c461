"""Whether a model needs the small directions of its states: they are cut at every boundary, and the loss is taken.

At the end of each segment the states of the chosen heads are replaced by U_r U_r^T S, with U_r the r left singular
directions of most energy: the matrix of rank r that is nearest to S.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compressor.evaluation.forward import TokenFigures
from compressor.probe.segments import Boundary, read_in_segments
from compressor.probe.states import Probed
from compressor.probe.top_directions import project, top_directions

RANKS = (128, 48, 24, 12, 4, 1)
"""Ranks that are tried where none are named, as far as they are below those of a whole state."""


@dataclass(frozen=True, slots=True)
class Cut:
    """`rank` directions are kept of the states of `heads`, by layer; None stands for all heads of all layers."""

    rank: int
    heads: Mapping[int, tuple[int, ...]] | None = None


@dataclass(frozen=True, slots=True)
class Reading:
    """How sequences are read: tokens between two boundaries, sequences at once, and a seed for the first directions.

    With `window`, softmax layers see that many tokens before each segment, so that only states reach further back.
    """

    segment: int
    batch_size: int
    seed: int
    window: int | None = None


class StateTruncation:
    """Cuts states at boundaries; keeps the last subspaces of a batch as the start of the next search.

    `exact` counts the states that took an SVD, of `total`.
    """

    def __init__(self, probed: Probed, cut: Cut, seed: int) -> None:
        self._probed = probed
        self._cut = cut
        self._generator = torch.Generator().manual_seed(seed)
        self._rows: tuple[int, ...] = ()
        self._subspaces: dict[tuple[int, int], Tensor | None] = {}
        self.exact = 0
        self.total = 0

    def __call__(self, boundary: Boundary) -> None:
        if boundary.last:
            return  # nothing reads these states any more
        if boundary.rows != self._rows:
            self._rows, self._subspaces = boundary.rows, {}
        groups: dict[tuple[int, int], list[tuple[int, tuple[int, ...]]]] = {}
        for index, mixer in enumerate(self._probed.mixers):
            heads = tuple(range(mixer.num_v_heads)) if self._cut.heads is None else self._cut.heads.get(mixer.layer, ())
            if heads and self._cut.rank < min(mixer.head_v_dim, mixer.head_k_dim):
                groups.setdefault((mixer.head_v_dim, mixer.head_k_dim), []).append((index, heads))
        for shape, members in groups.items():
            self._truncate(boundary, shape, members)

    def _truncate(self, boundary: Boundary, shape: tuple[int, int], members: list[tuple[int, tuple[int, ...]]]) -> None:
        """All states of one shape at once."""
        layout, mixers = self._probed.layout, self._probed.mixers
        views = [layout.read(boundary.cache, mixers[index]) for index, _ in members]
        chosen = [view[:, list(heads)] for view, (_, heads) in zip(views, members, strict=True)]
        states = torch.cat([part.flatten(0, 1) for part in chosen])
        found = top_directions(states, self._cut.rank, self._generator, self._subspaces.get(shape))
        self._subspaces[shape] = found.subspace
        self.exact += int(found.exact.sum())
        self.total += len(states)
        cut = project(states, found.basis).split([len(part.flatten(0, 1)) for part in chosen])
        for (index, heads), view, part, piece in zip(members, views, chosen, cut, strict=True):
            replaced = view.clone()
            replaced[:, list(heads)] = piece.view_as(part)
            layout.write(boundary.cache, mixers[index], replaced)


@dataclass(frozen=True, slots=True, eq=False)
class CutLosses:
    """Losses of all sequences under one cut; None is the model as it is. `exact` is the share of SVDs among states."""

    cut: Cut | None
    figures: tuple[TokenFigures, ...]
    exact: float


def measure_cut(
    probed: Probed, sequences: Sequence[Tensor], cut: Cut | None, reading: Reading, on_tokens: Callable[[int], None]
) -> CutLosses:
    """Losses of `sequences` (int64 [T], T >= 2) with states cut after every segment.

    Raises:
        RunError: a state or a loss is NaN or infinite.
    """
    truncation = None if cut is None else StateTruncation(probed, cut, reading.seed)

    def on_boundary(boundary: Boundary) -> None:
        if truncation is not None:
            truncation(boundary)
        if reading.window is not None:
            probed.layout.forget_keys(boundary.cache, reading.window)

    give_positions = reading.window is not None and probed.layout.owner == "transformers"
    figures = read_in_segments(
        probed.model, sequences, reading.segment, reading.batch_size, on_boundary, on_tokens, give_positions
    )
    exact = 0.0 if truncation is None else truncation.exact / max(1, truncation.total)
    return CutLosses(cut, tuple(figures), exact)
