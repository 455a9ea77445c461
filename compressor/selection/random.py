"""Random baseline: channels drawn without replacement, each head on its own."""

from __future__ import annotations

from typing import final

import torch

from compressor.selection.base import ChannelChoice, HeadStatistics, Selector
from compressor.selection.diagnostics import diagnose
from compressor.selection.request import check_keep


@final
class RandomSelector(Selector):
    """Keeps channels that the given generator draws. Neither scoring nor f is used."""

    def select(self, statistics: HeadStatistics, keep: int, generator: torch.Generator) -> ChannelChoice:
        """Raises RequestError when keep is outside [1, d]."""
        check_keep(keep, statistics.width)
        draws = [
            torch.randperm(statistics.width, generator=generator, device=generator.device)[:keep]
            for _ in range(statistics.heads)
        ]
        indices = torch.stack(draws).sort(dim=1).values.to(statistics.gram_k.device)
        return ChannelChoice(indices, diagnose(statistics.gram("qk"), indices))
