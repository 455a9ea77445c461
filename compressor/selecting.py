"""From calibration statistics to kept channels: all heads of all layers at once."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from compressor.architectures.base import Mixer
from compressor.artifacts import CalibrationStatistics, Selection
from compressor.checkpoint.headers import read_tensor
from compressor.preparation import Source
from compressor.recipe import SelectionSection
from compressor.report import LayerReport
from compressor.selection.base import HeadDiagnostics, HeadStatistics
from compressor.selection.registry import build_selector
from compressor.surgery import present_maps


def select_channels(
    source: Source, statistics: CalibrationStatistics, request: SelectionSection, keep: int, seed: int
) -> tuple[Selection, list[LayerReport]]:
    """Choose `keep` channels of every head by the requested method, with diagnostics a layer.

    Raises:
        RunError: the method could not certify its result (the head is named).
    """
    head_statistics = HeadStatistics(
        gram_q=statistics.gram_q.flatten(0, 1),
        gram_k=statistics.gram_k.flatten(0, 1),
        weight_l1_q=projection_l1(source, "query"),
        weight_l1_k=projection_l1(source, "key"),
        tokens=statistics.tokens,
    )
    selector = build_selector(request.method, request.scoring, request.f)
    choice = selector.select(head_statistics, keep, torch.Generator().manual_seed(seed))
    heads = source.mixers[0].num_k_heads
    kept = {
        mixer.layer: choice.indices[position * heads : (position + 1) * heads]
        for position, mixer in enumerate(source.mixers)
    }
    return Selection(source.mixers[0].head_k_dim, kept), _layer_reports(source.mixers, choice.diagnostics)


def projection_l1(source: Source, stream: str) -> Tensor:
    """Sum of |W| over the rows that make a channel: float64 [L * H_k, d_k]."""
    entries = source.checkpoint.index.entries
    sums = []
    for mixer in source.mixers:
        total = torch.zeros(mixer.num_k_heads, mixer.head_k_dim, dtype=torch.float64)
        for channel_map in present_maps(source.architecture, mixer, entries):
            if channel_map.is_projection and channel_map.stream == stream:
                row_sums = read_tensor(entries[channel_map.tensor]).abs().sum(dim=1, dtype=torch.float64)
                total += row_sums[channel_map.rows].sum(-1)
        sums.append(total)
    return torch.cat(sums)


def _layer_reports(mixers: Sequence[Mixer], diagnostics: HeadDiagnostics) -> list[LayerReport]:
    reports = []
    for position, mixer in enumerate(mixers):
        heads = slice(position * mixer.num_k_heads, (position + 1) * mixer.num_k_heads)
        reports.append(
            LayerReport(
                layer=mixer.layer,
                max_rho=_finite(diagnostics.max_rho[heads]),
                swaps=diagnostics.swaps[heads].tolist(),
                numerical_rank=diagnostics.numerical_rank[heads].tolist(),
                rank_deficient=diagnostics.rank_deficient[heads].tolist(),
                sigma_min=_finite(diagnostics.sigma_min[heads]),
                sigma_max=_finite(diagnostics.sigma_max[heads]),
                condition_number=_finite(diagnostics.condition_number[heads]),
                retained_energy=_finite(diagnostics.retained_energy[heads]),
            )
        )
    return reports


def _finite(values: Tensor) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values.tolist()]
