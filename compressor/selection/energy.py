"""Energy: the channels that carry most of the normalised key and query activations."""

from __future__ import annotations

from typing import final

import torch

from compressor.selection.base import ChannelChoice, HeadStatistics, Selector
from compressor.selection.largest import keep_largest


@final
class EnergySelector(Selector):
    """Keeps the largest sums over tokens of squared activations, of keys and queries, of keys or of queries by scoring.

    Each token's activations of a head are scaled to an L2 norm of 1 first, as the delta rule does: loud tokens count
    no more than others. The mean squared activation as a criterion is that of Molchanov et al. 2017
    (arXiv:1611.06440), section 2.2. Ties go to the lowest channel. Neither f nor the generator is used.
    """

    def select(self, statistics: HeadStatistics, keep: int, generator: torch.Generator) -> ChannelChoice:
        """Raises RequestError when keep is outside [1, d], or no energy was collected."""
        return keep_largest(statistics, "energy", self.scoring, keep)
