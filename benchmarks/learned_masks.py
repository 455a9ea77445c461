"""Soft top-k masks trained against the dense model by gradient descent: what Fisher selection is compared with.

Scores theta of a head's channels give the masks s = sigmoid((theta - tau) / temperature), tau such that they add up to
the kept width. Adam lowers KL(dense || masked) over batches in turn while the temperature falls, after which the
channels with the largest scores are kept. Never a product path: it takes several times the passes of Fisher selection.

Notation used for tensor shapes:
    B   sequences      T   tokens of a sequence      L   mixers      H_k, d_k   see `architectures.base`
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compressor.fisher.logits import hidden_gradients
from compressor.fisher.masks import SegmentMasks
from compressor.fisher.memory import fitting_checkpointing, free_bytes, sizes_of
from compressor.fisher.settings import FisherSettings
from compressor.fisher.statistics import BACKWARD_PASSES, MaskedModel, prepared
from compressor.recovery.objective import HiddenStates, head_weight

_LEAST_MASK = 2.0**-20
"""The gradient of a mask's root is infinite at 0."""


@dataclass(frozen=True, slots=True)
class LearnedSettings:
    """`temperature` falls geometrically from the first to the last value; scores begin as log energies."""

    steps: int = 200
    learning_rate: float = 0.1
    temperature: tuple[float, float] = (1.0, 0.03)


@dataclass(frozen=True, slots=True, eq=False)
class LearnedMasks:
    """`kept` bool [L, H_k, d_k]; `divergences` of the soft masks at each step, in nats a token; cost in passes."""

    kept: Tensor
    divergences: tuple[float, ...]
    passes: float


def learned_masks(
    masked: MaskedModel,
    batches: Sequence[Tensor],
    keep: int,
    output_scale: float,
    energy: Tensor,
    settings: LearnedSettings,
    generator: torch.Generator,
) -> LearnedMasks:
    """Train the masks of `keep` channels a head.

    Args:
        batches: int64 [B, T] each, without padding; their order is drawn with `generator`, again for every round.
        energy: float64 [L, H_k, d_k], of the channels.

    Raises:
        RequestError: too little memory, see `fitting_checkpointing`.
    """
    device = masked.model.device
    sizes = sizes_of(masked.model, masked.shape, max(batches, key=Tensor.numel))
    checkpointing = fitting_checkpointing(sizes, FisherSettings(segment=0), free_bytes(device), device)
    scores = (energy / energy.mean(-1, keepdim=True)).clamp_min(_LEAST_MASK).log().float().to(device).requires_grad_()
    optimiser = torch.optim.Adam([scores], lr=settings.learning_rate)
    first, last = settings.temperature
    divergences, tokens = [], 0
    with prepared(masked, checkpointing):
        for step, batch in zip(range(settings.steps), in_turn(batches, generator), strict=False):
            temperature = first * (last / first) ** (step / max(1, settings.steps - 1))
            optimiser.zero_grad()
            soft = soft_top_k(scores, keep, temperature)
            divergences.append(backward(masked, batch.to(device), soft, output_scale))
            optimiser.step()
            tokens += batch.numel()
    kept = torch.zeros(masked.shape, dtype=torch.bool).scatter_(-1, scores.detach().cpu().topk(keep).indices, True)
    share = tokens / sum(batch.numel() for batch in batches)
    return LearnedMasks(kept, tuple(divergences), share * (2 + BACKWARD_PASSES + checkpointing))


def in_turn(batches: Sequence[Tensor], generator: torch.Generator) -> itertools.chain[Tensor]:
    """All batches in a drawn order, without end."""
    return itertools.chain.from_iterable(
        [batches[place] for place in torch.randperm(len(batches), generator=generator).tolist()]
        for _ in itertools.count()
    )


def soft_top_k(scores: Tensor, keep: int, temperature: float) -> Tensor:
    """Masks in (0, 1) of [..., d] that add up to `keep`, differentiable in the scores: the threshold moves with them.

    The threshold is found by bisection; a Newton step from there has its gradient, by the implicit function theorem.
    """
    with torch.no_grad():
        least, most = scores.aminmax(dim=-1, keepdim=True)
        low, high = least - 40 * temperature, most + 40 * temperature
        for _ in range(60):
            middle = (low + high) / 2
            too_many = ((scores - middle) / temperature).sigmoid().sum(-1, keepdim=True) > keep
            low, high = torch.where(too_many, middle, low), torch.where(too_many, high, middle)
    masks = ((scores - low) / temperature).sigmoid()
    slopes = (masks * (1 - masks)).sum(-1, keepdim=True).detach().clamp_min(_LEAST_MASK) / temperature
    threshold = low + (masks.sum(-1, keepdim=True) - keep) / slopes
    return ((scores - threshold) / temperature).sigmoid().clamp_min(_LEAST_MASK)


def backward(masked: MaskedModel, ids: Tensor, soft: Tensor, output_scale: float) -> float:
    """KL(dense || masked) of one batch in nats a token, its gradient added to what `soft` [L, H_k, d_k] came from."""
    architecture = masked.architecture
    decoder, head = HiddenStates(architecture.decoder(masked.model)), head_weight(masked.model, architecture)
    with torch.no_grad():
        dense = decoder(ids).flatten(0, 1)
    variables = {mixer.layer: soft[place].expand(len(ids), 1, -1, -1) for place, mixer in enumerate(masked.mixers)}
    tap = SegmentMasks(variables, ids.shape[1], output_scale)
    with masked.architecture.tapped(masked.model, masked.mixers, tap), torch.enable_grad():
        hidden = decoder(ids)
        outward = hidden_gradients(
            hidden.detach().flatten(0, 1), head, dense, torch.zeros(ids.numel(), device=ids.device)
        )
        if outward.divergence is None:
            raise ValueError("dense hidden states were given, so there is a divergence")
        hidden.backward((outward.divergence / ids.numel()).view_as(hidden))
    return float(outward.kl) / ids.numel()
