"""DRRQR: strong rank-revealing QR of the stacked key and query activations of each head."""

from __future__ import annotations

from typing import final

import torch

from compressor.selection.base import ChannelChoice, HeadStatistics, Selector
from compressor.selection.rrqr import strong_rrqr


@final
class DrrqrSelector(Selector):
    """Keeps well-conditioned columns that span the activations (Nazari & Rusch 2026, arXiv:2602.04852).

    The Gram matrix is G_KK + G_QQ, G_KK or G_QQ by scoring. The generator is not used.
    """

    def select(self, statistics: HeadStatistics, keep: int, generator: torch.Generator) -> ChannelChoice:
        """Raises RequestError when keep is outside [1, d] or f < 1, RunError when a head cannot be certified."""
        return strong_rrqr(statistics.gram(self.scoring), keep, self.f)
