"""First-order Taylor baseline: the channels whose weights the loss is most sensitive to."""

from __future__ import annotations

from typing import final

import torch

from compressor.selection.base import ChannelChoice, HeadStatistics, Selector
from compressor.selection.largest import keep_largest


@final
class GradientSelector(Selector):
    """Keeps the largest sums of |W_ij dL/dW_ij| over the weights of a channel i, by scoring of W_Q, W_K or both.

    L is the loss of next-token prediction on the calibration set. The score of a weight is the first-order term of
    Ma et al. 2023 (arXiv:2305.11627), section 3.2. Ties go to the lowest channel. Neither f nor the generator is used.
    """

    def select(self, statistics: HeadStatistics, keep: int, generator: torch.Generator) -> ChannelChoice:
        """Raises RequestError when keep is outside [1, d], or no gradient was collected."""
        return keep_largest(statistics, "gradient", self.scoring, keep)
