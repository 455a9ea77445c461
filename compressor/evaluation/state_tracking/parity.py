"""Parity: read bits, say whether the number of ones so far is odd.

Source: Grazzi et al., "Unlocking State-Tracking in Linear RNNs Through Negative Eigenvalues"
(arXiv:2411.12537): trained at lengths 3 to 40, tested at 40 to 256, two layers of width 128 with 4 heads,
batches of 256, learning rate 1e-3, 20,000 steps. There the last position alone is asked. Here every
position is, which trains faster; the accuracy at position t is that of a sequence of t bits all the same.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from compressor.evaluation.state_tracking.base import LabelledBatch, StateTrackingTask, ignore_padding


@final
class Parity(StateTrackingTask):
    """Tokens and classes are 0 and 1; padding is 0."""

    name = "parity"
    vocab_size = num_classes = 2
    minimum_length = 1

    def _draw(self, lengths: Tensor, longest: int, generator: torch.Generator) -> LabelledBatch:
        bits = torch.randint(2, (len(lengths), longest), generator=generator)
        bits = bits.masked_fill(torch.arange(longest) >= lengths[:, None], 0)
        return LabelledBatch(bits, ignore_padding(bits.cumsum(1) % 2, lengths))
