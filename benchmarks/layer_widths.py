"""Widths of each layer: what removals cost it, which widths share a total best, and the channels at them.

Notation used for tensor shapes:
    L   mixers      H_k, d_k   see `architectures.base`      W   widths of a grid, the whole width first
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compressor.errors import RequestError
from compressor.fisher.memory import fitting_checkpointing, free_bytes, sizes_of
from compressor.fisher.progressive import alone
from compressor.fisher.settings import FisherSettings
from compressor.fisher.statistics import MaskedModel, Sampling, mask_statistics, masked_divergence
from compressor.selection.fisher import mask_model, removed, shrunk

LARGEST_STEP = 0.2
"""Share of its channels that a head loses before gradients and Fisher matrices are taken anew."""
_OF_ROOTS = 4.0
"""The quadratic model in the roots of the masks says so many times what that in the masks does, and is nearer."""


@dataclass(frozen=True, slots=True, eq=False)
class Descent:
    """Progressive Fisher selection through a list of widths.

    Attributes:
        widths: of the list, one tuple [L] an entry.
        kept: bool [L, H_k, d_k] at each entry; those of a later one are among those of an earlier one.
        curves: float64 [L, W], W one more than there are entries: what the removals so far cost in each layer, in nats
            a token by the quadratic models; 0 at the whole width.
        passes: cost, in bare forward passes.
    """

    widths: tuple[tuple[int, ...], ...]
    kept: tuple[Tensor, ...]
    curves: Tensor
    passes: float


def grid_widths(width: int, step: int) -> tuple[int, ...]:
    """The multiples of `step` below `width`, falling. Raises RequestError where there is none."""
    widths = tuple(range((width - 1) // step * step, 0, -step)) if step > 0 else ()
    if not widths:
        raise RequestError(f"--step {step} has no multiple below the width {width}; give 1 to {width - 1}.")
    return widths


def stages_to(widths: Sequence[int], width: int, stages: int) -> list[tuple[int, ...]]:
    """From `width` down to the `widths` [L] of the layers, each of which loses the same share in every stage."""
    return [
        tuple(round(width * (least / width) ** (stage / stages)) for least in widths) for stage in range(1, stages + 1)
    ]


def descend(
    masked: MaskedModel,
    batches: Sequence[Tensor],
    widths: Sequence[Sequence[int]],
    settings: FisherSettings,
    seed: int,
) -> Descent:
    """Remove channels by `settings`, the output scale undone, through each entry of `widths` [L]; none may rise.

    Raises:
        RequestError, RunError: as `progressive_fisher`.
    """
    generator = torch.Generator().manual_seed(seed)
    sizes = sizes_of(masked.model, masked.shape, max(batches, key=Tensor.numel))
    device = masked.model.device
    checkpointing = fitting_checkpointing(sizes, settings, free_bytes(device), device)
    segment = settings.segment or max(batch.shape[1] for batch in batches)
    sampling = Sampling(segment, settings.sequence_share, "head", checkpointing, removal=settings.removal)
    kept, cost, passes = torch.ones(masked.shape, dtype=torch.bool), torch.zeros(masked.shape[0]).double(), 0.0
    found, curves = [], [cost]
    for target in widths:
        for between in _between(kept[:, 0].sum(-1).tolist(), target):
            statistics = mask_statistics(
                masked, batches, kept, 1.0, sampling, generator, alone, lambda passes_of_batch: None
            )
            fisher = shrunk(statistics.fisher, settings.shrinkage)
            kept, added = _narrowed(kept, between, settings.linear_weight * statistics.gradient, fisher)
            # Less than nothing is noise, or a gradient that is trusted too far.
            cost, passes = cost + _OF_ROOTS * added.clamp_min(0), passes + statistics.passes
        found.append(kept)
        curves.append(cost)
    return Descent(tuple(map(tuple, widths)), tuple(found), torch.stack(curves, dim=1), passes)


def _between(before: Sequence[int], after: Sequence[int]) -> list[tuple[int, ...]]:
    """Steps from one list of widths to the other, none of which takes more than `LARGEST_STEP` of a head."""
    narrowest = min(new / old for old, new in zip(before, after, strict=True))
    steps = max(1, math.ceil(math.log(narrowest) / math.log(1 - LARGEST_STEP) - 1e-9))
    return [
        tuple(round(old * (new / old) ** (step / steps)) for old, new in zip(before, after, strict=True))
        for step in range(1, steps + 1)
    ]


def _narrowed(kept: Tensor, widths: Sequence[int], gradient: Tensor, fisher: Tensor) -> tuple[Tensor, Tensor]:
    """Masks [L, H_k, d_k] after greedy removals, and float64 [L] of what they cost by the quadratic model."""
    heads = kept.shape[1]
    masks, costs = [], []
    for layer, width in enumerate(widths):
        own = slice(layer * heads, (layer + 1) * heads)
        model = removed(mask_model(gradient[own], fisher[own], kept[layer][:, None]), width)
        masks.append(model.kept[:, 0])
        costs.append(model.change.sum())
    return torch.stack(masks), torch.stack(costs)


def measured_curves(masked: MaskedModel, batches: Sequence[Tensor], descent: Descent) -> Tensor:
    """float64 [L, W] beside `Descent.curves`: KL(dense || masked) with one layer alone where the descent had it."""
    whole = torch.ones(masked.shape, dtype=torch.bool)
    curves = torch.zeros_like(descent.curves)
    for entry, kept in enumerate(descent.kept):
        for layer in range(len(curves)):
            alone_masked = whole.clone()
            alone_masked[layer] = kept[layer]
            curves[layer, entry + 1] = masked_divergence(masked, batches, alone_masked, 1.0, alone)
    return curves


def allocate(curves: Tensor, widths: Sequence[int], total: int) -> tuple[int, ...]:
    """One of the W `widths` for each layer, adding up to at most `total`, with the least sum of `curves` [L, W].

    Exact, by dynamic programming over the total. Raises RequestError when not even the least widths fit.
    """
    if len(curves) * min(widths) > total:
        raise RequestError(
            f"{len(curves)} layers of at least {min(widths)} channels do not fit into {total}; give a smaller --step."
        )
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for curve in curves.tolist():
        reached: dict[int, tuple[float, tuple[int, ...]]] = {}
        for used, (cost, chosen) in best.items():
            for width, added in zip(widths, curve, strict=True):
                now = (cost + added, (*chosen, width))
                if used + width <= total and (used + width not in reached or now < reached[used + width]):
                    reached[used + width] = now
        best = reached
    return min(best.values())[1]


def masks_at(descent: Descent, widths: Sequence[int]) -> Tensor:
    """bool [L, H_k, d_k]: each layer where the descent had it at its width; ones where that is the whole width.

    Raises RequestError for a width that it did not pass.
    """
    masks = []
    for layer, width in enumerate(widths):
        stages = [torch.ones_like(descent.kept[0][layer]), *(kept[layer] for kept in descent.kept)]
        fitting = [mask for mask in stages if int(mask[0].sum()) == width]
        if not fitting:
            raise RequestError(f"the width {width} is not on the way of the descent; give a --step that divides it.")
        masks.append(fitting[0])
    return torch.stack(masks)
