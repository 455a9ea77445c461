"""Channels removed in stages: at each, the masked model's gradient and Fisher matrices say which go next.

At the output scale that is exported (see `MaskedChannels`): a choice made for another is worse than none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from compressor.architectures.base import Architecture, Mixer
from compressor.errors import RequestError
from compressor.fisher.memory import fitting_checkpointing, free_bytes, sizes_of
from compressor.fisher.settings import FisherSettings
from compressor.fisher.statistics import (
    AllReduce,
    MaskedModel,
    MaskStatistics,
    Sampling,
    mask_statistics,
    masked_divergence,
)
from compressor.selection.base import ChannelChoice
from compressor.selection.diagnostics import diagnose
from compressor.selection.fisher import (
    MaskModel,
    kept_indices,
    mask_model,
    removed,
    shrunk,
    stage_widths,
    swapped,
)
from compressor.selection.request import check_keep

OnProgress = Callable[[float], None]
"""Gets the work just done, in bare forward passes over the batches."""


_RESIDUAL = 2.0**-10
"""Mask of dropped channels where some may come back: a thousandth of their part of every inner product."""


def alone(_: Tensor) -> None:
    """The sum over the processes, where there is one."""


@dataclass(frozen=True, slots=True)
class Stage:
    """What one stage saw and did.

    Attributes:
        width: channels of a head after it.
        kl: KL(dense || masked) before it, in nats a token of its batches.
        predicted: what it adds by the quadratic model in the masks, all problems together; the model in their roots,
            of which `linear_weight` 0.5 makes the same choice, says four times as much, and is nearer to what happens.
        exchanges: swaps among its steps.
    """

    width: int
    kl: float
    predicted: float
    exchanges: int


@dataclass(frozen=True, slots=True)
class MeasuredRound:
    """Exchanges at the final width: KL before and after, change by the model, number; 0 where none lowers the KL."""

    kl: float
    kl_after: float
    predicted: float
    exchanges: int


@dataclass(frozen=True, slots=True, eq=False)
class FisherSelection:
    """The kept channels, on the CPU.

    Attributes:
        indices: int64 [N, keep], ascending; heads of all layers stacked.
        swaps: int64 [N], exchanges that changed a head.
        stages: one entry a stage.
        rounds: one entry a round of measured exchanges.
        passes: cost, in bare forward passes over the batches.
    """

    indices: Tensor
    swaps: Tensor
    stages: tuple[Stage, ...]
    rounds: tuple[MeasuredRound, ...]
    passes: float

    def choice(self, gram: Tensor) -> ChannelChoice:
        """With the diagnostics of every method, from `HeadStatistics.gram`: float64 [N, d, d]."""
        return ChannelChoice(self.indices, diagnose(gram, self.indices, swaps=self.swaps))


def progressive_fisher(
    architecture: Architecture,
    model: PreTrainedModel,
    mixers: Sequence[Mixer],
    batches: Sequence[Tensor],
    keep: int,
    settings: FisherSettings,
    generator: torch.Generator,
    on_progress: OnProgress,
    *,
    epsilon_scaled: bool,
    start: Tensor | None = None,
    all_reduce: AllReduce = alone,
) -> FisherSelection:
    """Choose `keep` channels of every head of `model`, which stays as it is.

    The same arguments give the same choice, on one machine. Memory does not grow with the number of batches.

    Args:
        batches: int64 [B, T] each, without padding: text and retrieval prompts. With several processes, the shares of
            this one.
        generator: draws labels; with several processes, each has its own.
        epsilon_scaled: whether the exported norm epsilon undoes the output scale of the cut.
        start: bool [N, d], channels to begin with instead of all: those of another method, to be improved by
            exchanges where they are `keep` a head.
        all_reduce: sums a tensor over the processes, in place.

    Raises:
        RequestError: `keep` is outside [1, d], there are no tokens, or memory does not suffice (the error's subclass).
        RunError: see `mask_statistics`.
    """
    masked = MaskedModel(architecture, model, mixers)
    check_keep(keep, masked.shape[2])
    if not sum(batch.numel() for batch in batches):
        raise RequestError("Fisher selection was given 0 tokens and needs at least 1; give calibration data.")
    sizes = sizes_of(model, masked.shape, max(batches, key=Tensor.numel))
    checkpointing = fitting_checkpointing(sizes, settings, free_bytes(model.device), model.device)
    run = _Run(masked, batches, keep, settings, checkpointing, generator, on_progress, epsilon_scaled, all_reduce)
    kept = torch.ones(masked.shape, dtype=torch.bool) if start is None else start.view(masked.shape).cpu()
    before = int(kept.flatten(0, 1)[0].sum())
    check_keep(keep, before)
    stages = []
    exchanged = torch.zeros(masked.shape[:2], dtype=torch.int64)
    for width in stage_widths(before, keep, settings.stages):
        stage, kept, swaps = run.stage(kept, width)
        stages.append(stage)
        exchanged += swaps
    rounds = []
    for _ in range(settings.measured_rounds):
        done, kept, swaps = run.measured_round(kept)
        rounds.append(done)
        exchanged += swaps
        if not done.exchanges:
            break
    return FisherSelection(kept_indices(kept), exchanged.flatten(), tuple(stages), tuple(rounds), run.passes)


class _Run:
    """What stages and rounds share, and the cost so far."""

    def __init__(
        self,
        masked: MaskedModel,
        batches: Sequence[Tensor],
        keep: int,
        settings: FisherSettings,
        gradient_checkpointing: bool,
        generator: torch.Generator,
        on_progress: OnProgress,
        epsilon_scaled: bool,
        all_reduce: AllReduce,
    ) -> None:
        self._masked = masked
        self._batches = batches
        self._keep = keep
        self._settings = settings
        self._sampling = Sampling(
            settings.segment or max(batch.shape[1] for batch in batches),
            settings.sequence_share,
            settings.scope,
            gradient_checkpointing,
            _RESIDUAL if settings.swaps or settings.measured_rounds else 0.0,
            settings.removal,
        )
        self._generator = generator
        self._on_progress = on_progress
        self._epsilon_scaled = epsilon_scaled
        self._all_reduce = all_reduce
        self._first_batch = 0
        self.passes = 0.0

    def stage(self, kept: Tensor, width: int) -> tuple[Stage, Tensor, Tensor]:
        """What was done, the masks [L, H_k, d_k] of `width` channels, and exchanges a head [L, H_k]."""
        statistics, model = self._model(kept, width, self._next_batches())
        fewer = removed(model, width)
        after = swapped(fewer, self._settings.swaps)
        masks = after.kept.view(kept.shape)
        exchanged = (masks & ~fewer.kept.view(kept.shape)).sum(-1)
        return Stage(width, statistics.kl, float(after.change.sum()), int(exchanged.sum())), masks, exchanged

    def measured_round(self, kept: Tensor) -> tuple[MeasuredRound, Tensor, Tensor]:
        """Of the exchanges that the model thinks pay, many or few a problem, what lowers the measured KL most."""
        _, model = self._model(kept, self._keep)
        before = least = self._measured(kept)
        best = model
        limit = self._settings.swaps or max(1, self._keep // 4)
        limits = dict.fromkeys(max(1, limit // 4**tried) for tried in range(self._settings.measured_tries))
        for limit in limits:
            tried = swapped(model, limit)
            if not tried.steps.any():
                break
            kl = self._measured(tried.kept.view(kept.shape))
            if kl < least:
                best, least = tried, kl
        masks = best.kept.view(kept.shape)
        exchanged = (masks & ~kept).sum(-1)
        return MeasuredRound(before, least, float(best.change.sum()), int(exchanged.sum())), masks, exchanged

    def _model(
        self, kept: Tensor, width: int, batches: Sequence[Tensor] | None = None
    ) -> tuple[MaskStatistics, MaskModel]:
        """Around the masks `kept`; `width` is that of the coming cut, whose scale it is taken at."""
        settings = self._settings
        used = self._batches if batches is None else batches
        share = sum(batch.numel() for batch in used) / sum(batch.numel() for batch in self._batches)
        statistics = mask_statistics(
            self._masked,
            used,
            kept,
            self._output_scale(settings.scale_width(self._keep, width)),
            self._sampling,
            self._generator,
            self._all_reduce,
            lambda passes: self._on_progress(passes * share),
        )
        self.passes += statistics.passes * share
        fisher = shrunk(statistics.fisher, settings.shrinkage)
        masks = kept.view(statistics.gradient.shape)
        gradient = torch.where(masks, settings.linear_weight, 1.0) * statistics.gradient
        return statistics, mask_model(gradient, fisher, masks)

    def _next_batches(self) -> list[Tensor]:
        """`stage_share` of the batches, in turn: those that follow the last stage's."""
        count = math.ceil(self._settings.stage_share * len(self._batches))
        first, self._first_batch = self._first_batch, (self._first_batch + count) % len(self._batches)
        return [self._batches[(first + offset) % len(self._batches)] for offset in range(count)]

    def _output_scale(self, width: int) -> float:
        """What a checkpoint of `width` multiplies mixer outputs by; see `MaskedChannels`."""
        if self._epsilon_scaled:
            return 1.0
        return self._masked.architecture.output_scale(self._masked.shape[2], width)

    def _measured(self, kept: Tensor) -> float:
        kl = masked_divergence(self._masked, self._batches, kept, self._output_scale(self._keep), self._all_reduce)
        self.passes += 2
        self._on_progress(2.0)
        return kl
