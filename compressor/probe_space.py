"""How many bytes a probe writes, at most."""

from __future__ import annotations

from collections.abc import Sequence

from compressor.architectures.base import Mixer
from compressor.probe.segments import segments_of
from compressor.probe.spectra import FIGURES
from compressor.probe_plan import ProbePlan

_FIGURES_AND_PAGE = 6_000_000
"""Images, once as files and once in the page, and what does not grow with the model or the text."""

_JSON_NUMBER = 32
"""A number of six digits on a line of its own, with the spaces before it."""

_TABLE_ROW = 400


def expected_bytes(plan: ProbePlan, models: Sequence[Sequence[Mixer]]) -> int:
    """For the states of all heads of `models`, a median, a least and a greatest value of each figure at each boundary,
    and what the truncation experiment and the search add for each rank and head."""
    boundaries = max(segments_of(len(document), plan.section.every) for document in plan.documents)
    total = _FIGURES_AND_PAGE
    for mixers in models:
        for mixer in mixers:
            values = 3 * len(FIGURES) * (boundaries + 2) + min(mixer.head_k_dim, mixer.head_v_dim) + 20
            searches = 0 if plan.section.search_rank is None else 1 + len(plan.prompt_sets)
            total += mixer.num_v_heads * (_JSON_NUMBER * (values + 8 * searches) + _TABLE_ROW * (1 + searches))
    buckets = max(len(document) for document in plan.documents).bit_length()
    rows = 2 * (1 + len(plan.ranks)) * (1 + len(plan.prompt_sets))
    return total + rows * (_JSON_NUMBER * 12 * (buckets + 4) + _TABLE_ROW)
