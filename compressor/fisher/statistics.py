"""Gradient of KL(dense || masked) and Fisher matrices of the masks, streamed over batches of tokens.

    g = 1/N sum_n dKL_n/dm        F = 1/N sum_s u_s u_s^T,  u_s = sum_n d(-log q_n[y_n]) / dm_s,  y_n drawn from q_n

in nats a token, over N tokens and segments s, with m the masks of `masks`. Expectations over y of scores are 0, so that
F is the Fisher matrix of the masked model wherever a token's loss depends on the masks of its own segment alone.

Source: Martens, "New insights and perspectives on the natural gradient method" (arXiv:1412.1193), section 5, for labels
drawn from the model. Memory does not grow with the number of tokens; sums over them are float64.

Notation used for tensor shapes:
    B   sequences      T   tokens of a sequence      S   segments of a sequence
    L   mixers         P, G, D   see `selection.fisher`      H_k, d_k   see `architectures.base`
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from compressor.architectures.base import Architecture, Mixer
from compressor.architectures.masking import MaskedChannels
from compressor.errors import NOT_FINITE_REMEDY, RunError
from compressor.fisher.logits import divergence, hidden_gradients
from compressor.fisher.masks import SegmentMasks, segment_variables
from compressor.fisher.settings import Removal, Scope
from compressor.recovery.objective import head_weight, recomputed_layers
from compressor.selection.fisher import kept_indices

AllReduce = Callable[[Tensor], None]
"""Replaces a tensor, in place, by its sum over all processes."""

BACKWARD_PASSES = 2.0
"""Forward passes that one backward pass counts as."""


@dataclass(frozen=True, slots=True)
class MaskedModel:
    """A model to be masked. The mixers must agree in H_k and d_k; the model stays as it is."""

    architecture: Architecture
    model: PreTrainedModel
    mixers: Sequence[Mixer]

    @property
    def shape(self) -> tuple[int, int, int]:
        """(L, H_k, d_k)"""
        return len(self.mixers), self.mixers[0].num_k_heads, self.mixers[0].head_k_dim


@dataclass(frozen=True, slots=True, eq=False)
class MaskStatistics:
    """Means over the tokens, on the CPU.

    Attributes:
        kl: KL(dense || masked) in nats a token.
        gradient: float64 [P, G, d_k], of `kl` to the masks.
        fisher: float64 [P, D, D].
        passes: cost, in bare forward passes over the batches.
    """

    kl: float
    gradient: Tensor
    fisher: Tensor
    passes: float


@dataclass(frozen=True, slots=True)
class Sampling:
    """How gradients are taken; see `FisherSettings`, whose `segment` 0 is longer than any sequence here.

    `residual` is the mask of dropped channels: 0, or a little, so that what bringing them back would do can be seen.
    """

    segment: int
    sequence_share: float
    scope: Scope
    gradient_checkpointing: bool
    residual: float = 0.0
    removal: Removal = "tangent"


def mask_statistics(
    masked: MaskedModel,
    batches: Sequence[Tensor],
    kept: Tensor,
    output_scale: float,
    sampling: Sampling,
    generator: torch.Generator,
    all_reduce: AllReduce,
    on_passes: Callable[[float], None],
) -> MaskStatistics:
    """Statistics of the model with the masks `kept` (bool [L, H_k, d_k]) and mixer outputs times `output_scale`.

    Args:
        batches: int64 [B, T] each, without padding, of this process; labels are drawn with its `generator`.
        on_passes: gets the cost of the batch just done, in bare forward passes over `batches`.

    Raises:
        RequestError: the stock class has no gradient checkpointing where it is asked for, or the head is no plain one.
        RunError: a mask was not reached, or gradients are NaN or infinite (layer and head are named).
    """
    layers, heads, width = masked.shape
    device = masked.model.device
    problem = heads if sampling.scope == "layer" else 1
    sums = _Sums(
        torch.zeros(2, dtype=torch.float64, device=device),
        torch.zeros(layers, heads, width, dtype=torch.float64, device=device),
        torch.zeros(layers * heads // problem, problem * width, problem * width, dtype=torch.float64, device=device),
    )
    # With nothing changed the divergence is 0, where it is least, and so is its gradient.
    is_dense = bool(kept.all()) and output_scale == 1
    passes = (0.0 if is_dense else 1.0) + 1.0
    passes += (1 if is_dense else 2) * (BACKWARD_PASSES + sampling.gradient_checkpointing)
    total = sum(batch.numel() for batch in batches)
    with prepared(masked, sampling.gradient_checkpointing):
        for batch in batches:
            uniforms = torch.rand(batch.numel(), generator=generator, device=generator.device)
            _add_batch(masked, sums, batch.to(device), kept, output_scale, sampling, uniforms.to(device), is_dense)
            on_passes(passes * batch.numel() / total)
    for tensor in (sums.counted, sums.gradient, sums.fisher):
        all_reduce(tensor)
    _refuse_infinite(masked.mixers, sums)
    tokens = float(sums.counted[1])
    return MaskStatistics(
        float(sums.counted[0]) / tokens,
        (sums.gradient / tokens).cpu().view(-1, problem, width),
        (sums.fisher / tokens).cpu(),
        passes,
    )


@torch.no_grad()
def masked_divergence(
    masked: MaskedModel, batches: Sequence[Tensor], kept: Tensor, output_scale: float, all_reduce: AllReduce
) -> float:
    """KL(dense || masked) in nats a token, from two forward passes over `batches`.

    `kept`: bool [L, H_k, d_k], as many true in every head of a layer.
    """
    decoder, head = masked.architecture.decoder(masked.model), head_weight(masked.model, masked.architecture)
    by_layer = {mixer.layer: kept_indices(kept[position]) for position, mixer in enumerate(masked.mixers)}
    tap = MaskedChannels(by_layer, kept.shape[-1], output_scale)
    counted = torch.zeros(2, dtype=torch.float64, device=head.device)
    for batch in batches:
        dense = _hidden(decoder, batch.to(head.device))
        with masked.architecture.tapped(masked.model, masked.mixers, tap):
            hidden = _hidden(decoder, batch.to(head.device))
        counted[0] += divergence(hidden.flatten(0, 1), head, dense.flatten(0, 1))
        counted[1] += batch.numel()
    all_reduce(counted)
    return float(counted[0] / counted[1])


@contextmanager
def prepared(masked: MaskedModel, gradient_checkpointing: bool) -> Iterator[None]:
    """Inside, gradients reach masks and no parameter, and mixers take the path that has a backward pass.

    Kernels of short sequences, and recomputation, look at the training mode of blocks and mixers; dropout, at that of
    other modules, which stays off.
    """
    decoder = masked.architecture.decoder(masked.model)
    modules: list[nn.Module] = [
        module for module in decoder.modules() if isinstance(module, GradientCheckpointingLayer)
    ]
    modules += [masked.model.get_submodule(mixer.module) for mixer in masked.mixers]
    modes = [(module, module.training) for module in masked.model.modules()]
    parameters = [(parameter, parameter.requires_grad) for parameter in masked.model.parameters()]
    with ExitStack() as stack:
        if gradient_checkpointing:
            stack.enter_context(recomputed_layers(decoder))
        try:
            masked.model.eval()
            masked.model.requires_grad_(False)
            for module in modules:
                module.training = True
            yield
        finally:
            for module, training in modes:
                module.training = training
            for parameter, requires_grad in parameters:
                parameter.requires_grad_(requires_grad)


@dataclass(frozen=True, slots=True, eq=False)
class _Sums:
    """counted: divergence and tokens; gradient [L, H_k, d_k]; fisher [P, D, D]; all float64, sums over tokens."""

    counted: Tensor
    gradient: Tensor
    fisher: Tensor


def _add_batch(
    masked: MaskedModel,
    sums: _Sums,
    ids: Tensor,
    kept: Tensor,
    output_scale: float,
    sampling: Sampling,
    uniforms: Tensor,
    is_dense: bool,
) -> None:
    decoder, head = masked.architecture.decoder(masked.model), head_weight(masked.model, masked.architecture)
    dense = None
    if not is_dense:
        with torch.no_grad():
            dense = _hidden(decoder, ids).flatten(0, 1)
    segment = min(sampling.segment, ids.shape[1])
    mask = torch.where(kept, 1.0, sampling.residual).to(head.device)
    variables = segment_variables(masked.mixers, mask, (len(ids), ids.shape[1]), segment, head.dtype)
    removal = sampling.removal if masked.architecture.normalizes_keys else "tangent"
    tap = SegmentMasks(variables, segment, output_scale, removal)
    with masked.architecture.tapped(masked.model, masked.mixers, tap), torch.enable_grad():
        hidden = _hidden(decoder, ids)
        outward = hidden_gradients(hidden.detach().flatten(0, 1), head, dense, uniforms)
        if outward.divergence is not None:
            sums.gradient.add_(_to_masks(masked.mixers, hidden, outward.divergence, variables, True).sum((1, 2)))
        scores = _to_masks(masked.mixers, hidden, outward.score, variables, False)  # [L, B, S, H_k, d_k]
    samples = scores.flatten(1, 2)
    if sampling.sequence_share:
        share = sampling.sequence_share
        samples = torch.cat([samples * (1 - share) ** 0.5, scores.sum(2) * share**0.5], dim=1)
    by_problem = samples.flatten(2)[:, :, None] if sampling.scope == "layer" else samples
    vectors = by_problem.transpose(1, 2).flatten(0, 1)  # [P, samples, D]
    sums.fisher.add_(vectors.mT @ vectors)
    sums.counted[0] += outward.kl
    sums.counted[1] += ids.numel()


def _to_masks(
    mixers: Sequence[Mixer], hidden: Tensor, outward: Tensor, variables: dict[int, Tensor], again: bool
) -> Tensor:
    """float64 [L, B, S, H_k, d_k]; `again` keeps what another backward pass needs."""
    leaves = list(variables.values())
    gradients = torch.autograd.grad(
        hidden, leaves, outward.view_as(hidden), retain_graph=again, allow_unused=True, materialize_grads=False
    )
    for mixer, gradient in zip(mixers, gradients, strict=True):
        if gradient is None:
            raise RunError(
                f"layer {mixer.layer}: no gradient reaches the masks of its keys and queries; the installed library "
                "calls its recurrence in a way this version does not know."
            )
    return torch.stack([gradient.double() for gradient in gradients])


def _refuse_infinite(mixers: Sequence[Mixer], sums: _Sums) -> None:
    per_head = sums.gradient.shape[:2]
    diagonal = sums.fisher.diagonal(dim1=1, dim2=2).reshape(sums.gradient.shape)
    finite = (sums.gradient.isfinite() & diagonal.isfinite()).all(-1).view(per_head)
    if not bool(finite.all()):
        position, head = (int(index) for index in (~finite).nonzero()[0])
        raise RunError(
            f"layer {mixers[position].layer}, head {head}: gradients of the masks are NaN or infinite; "
            f"{NOT_FINITE_REMEDY}."
        )


def _hidden(decoder: nn.Module, ids: Tensor) -> Tensor:
    """[B, T, hidden size], after the final norm."""
    states: Tensor = decoder(input_ids=ids, use_cache=False).last_hidden_state
    return states
