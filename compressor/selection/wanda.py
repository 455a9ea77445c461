"""Structured Wanda: the channels whose weights, each times the norm of its input, sum to most."""

from __future__ import annotations

from typing import final

import torch

from compressor.selection.base import ChannelChoice, HeadStatistics, Selector
from compressor.selection.largest import keep_largest


@final
class StructuredWandaSelector(Selector):
    """Keeps the largest sums of |W_ij| ||X_j||_2 over the weights of a channel i, by scoring of W_Q, W_K or both.

    The score of a weight is that of Sun et al. 2024 (arXiv:2306.11695), equation 1; Nazari & Rusch 2026
    (arXiv:2602.04852) sum it over a channel. Ties go to the lowest channel. Neither f nor the generator is used.
    """

    def select(self, statistics: HeadStatistics, keep: int, generator: torch.Generator) -> ChannelChoice:
        """Raises RequestError when keep is outside [1, d], or no norms of the inputs were collected."""
        return keep_largest(statistics, "wanda", self.scoring, keep)
