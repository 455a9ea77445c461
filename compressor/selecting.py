"""From calibration statistics to kept channels: all heads of all layers at once."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from compressor.architectures.base import Mixer, Stream
from compressor.architectures.projections import projections, sum_by_channel
from compressor.artifacts import CalibrationStatistics, Selection
from compressor.checkpoint.headers import read_tensor
from compressor.preparation import Source
from compressor.recipe import SelectionSection
from compressor.report import LayerReport
from compressor.selection.base import ChannelChoice, HeadDiagnostics, HeadStatistics
from compressor.selection.registry import build_selector


def select_channels(
    source: Source, statistics: CalibrationStatistics, request: SelectionSection, keep: int, seed: int
) -> tuple[Selection, list[LayerReport]]:
    """Choose `keep` channels of every head by the requested method, with diagnostics a layer.

    Raises:
        RequestError: the method reads statistics that were not collected.
        RunError: the method could not certify its result (the head is named).
    """
    head_statistics = stacked_heads(source, statistics)
    selector = build_selector(request.method, request.scoring, request.f)
    return selection_of(source, selector.select(head_statistics, keep, torch.Generator().manual_seed(seed)))


def selection_of(source: Source, choice: ChannelChoice) -> tuple[Selection, list[LayerReport]]:
    """The choice for the heads of all layers stacked, layer by layer."""
    heads = source.mixers[0].num_k_heads
    kept = {
        mixer.layer: choice.indices[position * heads : (position + 1) * heads]
        for position, mixer in enumerate(source.mixers)
    }
    return Selection(source.mixers[0].head_k_dim, kept), _layer_reports(source.mixers, choice.diagnostics)


def stacked_heads(source: Source, statistics: CalibrationStatistics) -> HeadStatistics:
    """The statistics as selectors read them: the heads of all layers stacked, N = L * H_k."""
    weight_l1_q, wanda_q = projection_scores(source, "query", statistics.input_squares_q)
    weight_l1_k, wanda_k = projection_scores(source, "key", statistics.input_squares_k)
    return HeadStatistics(
        gram_q=statistics.gram_q.flatten(0, 1),
        gram_k=statistics.gram_k.flatten(0, 1),
        weight_l1_q=weight_l1_q,
        weight_l1_k=weight_l1_k,
        tokens=statistics.tokens,
        energy_q=_stacked(statistics.energy_q),
        energy_k=_stacked(statistics.energy_k),
        wanda_q=wanda_q,
        wanda_k=wanda_k,
        gradient_q=_stacked(statistics.gradient_q),
        gradient_k=_stacked(statistics.gradient_k),
    )


def projection_scores(source: Source, stream: Stream, input_squares: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Sums over the weights W_j that make a channel of |W_j|, and of |W_j| times the norm of what W_j multiplies.

    `input_squares`: float64 [L, inputs], sums over tokens; None leaves the second out. Both are float64 [L * H_k, d_k].
    """
    sums, weighted = [], []
    for position, mixer in enumerate(source.mixers):
        total = torch.zeros(2, mixer.num_k_heads, mixer.head_k_dim, dtype=torch.float64)
        for projection in projections(source.architecture, mixer):
            if projection.stream == stream:
                weight = read_tensor(source.checkpoint.index.entries[projection.tensor]).abs()
                total[0] += sum_by_channel(weight.sum(dim=1, dtype=torch.float64), projection.rows)
                if input_squares is not None:
                    total[1] += sum_by_channel(weight.double() @ input_squares[position].sqrt(), projection.rows)
        sums.append(total[0])
        weighted.append(total[1])
    return torch.cat(sums), None if input_squares is None else torch.cat(weighted)


def _stacked(statistic: Tensor | None) -> Tensor | None:
    """[L, H_k, d_k] -> [N, d_k]"""
    return None if statistic is None else statistic.flatten(0, 1)


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
