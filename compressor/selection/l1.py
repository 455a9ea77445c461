"""Magnitude baseline: the channels whose projection weights have the largest L1 norm."""

from __future__ import annotations

from typing import final

import torch

from compressor.selection.base import ChannelChoice, HeadStatistics, Selector
from compressor.selection.largest import keep_largest


@final
class L1Selector(Selector):
    """Keeps the largest sums of |W_Q| + |W_K|, |W_K| or |W_Q| by scoring (Li et al. 2017, arXiv:1608.08710).

    Ties go to the lowest channel. Neither f nor the generator is used.
    """

    def select(self, statistics: HeadStatistics, keep: int, generator: torch.Generator) -> ChannelChoice:
        """Raises RequestError when keep is outside [1, d]."""
        return keep_largest(statistics, "weight_l1", self.scoring, keep)
