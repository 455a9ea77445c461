"""GHOST-style scores: how strongly a state channel is written, times how strongly it is read (arXiv 2602.11408)."""

from __future__ import annotations

from typing import final

import torch

from compressor.selection.base import ChannelChoice, HeadStatistics, Selector
from compressor.selection.diagnostics import diagnose
from compressor.selection.request import check_keep


@final
class GhostSelector(Selector):
    """Keeps the largest products of controllability and observability, each from forward passes alone.

    Menezes & Kyrillidis 2026 (arXiv:2602.11408) approximate balanced truncation of Mamba-2's states by diagonal
    Gramians. Every channel of a head decays alike, so what tells the channels apart is how much of it is written and
    read: here sum_t k_t[n]^2 times sum_t q_t[n]^2, of the activations before any normalisation. Their Gramian of the
    states weighs the writes by step sizes, values and decays as well; that is left out. Ties go to the lowest channel.
    Neither scoring, f nor the generator is used.
    """

    def select(self, statistics: HeadStatistics, keep: int, generator: torch.Generator) -> ChannelChoice:
        """Raises RequestError when keep is outside [1, d]."""
        check_keep(keep, statistics.width)
        written, read = (gram.diagonal(dim1=1, dim2=2) for gram in (statistics.gram_k, statistics.gram_q))
        order = (written * read).argsort(dim=1, descending=True, stable=True)
        indices = order[:, :keep].sort(dim=1).values
        return ChannelChoice(indices, diagnose(statistics.gram("qk"), indices))
