"""The channels with the largest scores: what every method does that judges each channel by itself."""

from __future__ import annotations

from compressor.selection.base import ChannelChoice, HeadStatistics
from compressor.selection.diagnostics import diagnose
from compressor.selection.request import Scoring, Statistic, check_keep


def keep_largest(statistics: HeadStatistics, statistic: Statistic, scoring: Scoring, keep: int) -> ChannelChoice:
    """The `keep` channels of each head with the largest `statistic`; ties go to the lowest channel.

    Raises RequestError when keep is outside [1, d], or the statistic was not collected.
    """
    check_keep(keep, statistics.width)
    order = statistics.channel_scores(statistic, scoring).argsort(dim=1, descending=True, stable=True)
    indices = order[:, :keep].sort(dim=1).values
    return ChannelChoice(indices, diagnose(statistics.gram(scoring), indices))
