"""Mask gradients and Fisher matrices of all families against finite differences and a backward pass a segment."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from compressor.architectures.base import RecurrenceTap
from compressor.errors import RunError
from compressor.fisher.statistics import (
    MaskedModel,
    MaskStatistics,
    Sampling,
    mask_statistics,
    masked_divergence,
)
from tests.families import tiny_checkpoint

# The stock norm of Qwen3.5 computes in float32 whatever the model's dtype is: small steps drown in its rounding.
ROUNDED = {"q35", "qw"}
FAMILIES = ("gated_deltanet", "gated_deltanet_grouped", "gated_deltaproduct", "delta_net")
FAMILIES += ("delta_net_sum_norm", "q35", "qw")
SEGMENT = 32
SCALE = 1.3
RESIDUAL = 0.01
PLAIN = Sampling(SEGMENT, 0.0, "head", False, RESIDUAL)


class GivenMasks(RecurrenceTap):
    """Multiplies queries and keys by the root of one mask a token, [T, H_k, d_k] of each layer."""

    def __init__(self, masks: Mapping[int, Tensor], scale: float) -> None:
        self._masks = masks
        self._scale = scale

    def on_query(self, layer: int, query: Tensor) -> Tensor:
        return query * self._masks[layer].sqrt()

    def on_key(self, layer: int, key: Tensor) -> Tensor:
        return key * self._masks[layer].sqrt()

    def on_output(self, layer: int, output: Tensor) -> Tensor:
        return self._scale * output


def tiny(name: str, folder: Path) -> MaskedModel:
    """A tiny model in float64."""
    checkpoint = tiny_checkpoint(name, folder)
    return MaskedModel(checkpoint.architecture, checkpoint.model.double(), checkpoint.mixers)


def tokens(batch: int, length: int) -> Tensor:
    return torch.randint(0, 64, (batch, length), generator=torch.Generator().manual_seed(5))


def some_channels(masked: MaskedModel, keep: int = 11) -> Tensor:
    order = torch.rand(masked.shape, generator=torch.Generator().manual_seed(1)).argsort(-1)
    return order < keep


def values(kept: Tensor) -> Tensor:
    """The masks that `PLAIN` makes of it."""
    return torch.where(kept, 1.0, RESIDUAL).double()


def statistics(
    masked: MaskedModel,
    batches: list[Tensor],
    kept: Tensor,
    sampling: Sampling = PLAIN,
    scale: float = SCALE,
    seed: int = 0,
) -> MaskStatistics:
    generator = torch.Generator().manual_seed(seed)
    return mask_statistics(masked, batches, kept, scale, sampling, generator, lambda tensor: None, lambda passes: None)


def log_probabilities(masked: MaskedModel, ids: Tensor, masks: Mapping[int, Tensor] | None) -> Tensor:
    """[B * T, V]"""
    if masks is None:
        logits = masked.model(input_ids=ids, use_cache=False).logits
    else:
        with masked.architecture.tapped(masked.model, masked.mixers, GivenMasks(masks, SCALE)):
            logits = masked.model(input_ids=ids, use_cache=False).logits
    return logits.flatten(0, 1).log_softmax(-1)


@torch.no_grad()
def divergence_at(masked: MaskedModel, ids: Tensor, mask: Tensor) -> float:
    masks = {mixer.layer: mask[position][None] for position, mixer in enumerate(masked.mixers)}
    dense, changed = log_probabilities(masked, ids, None), log_probabilities(masked, ids, masks)
    return float((dense.exp() * (dense - changed)).sum() / ids.numel())


@pytest.mark.parametrize("name", FAMILIES)
def test_the_gradient_is_that_of_finite_differences(name: str, tmp_path: Path) -> None:
    masked = tiny(name, tmp_path)
    ids, kept = tokens(2, 70), some_channels(masked)
    result = statistics(masked, [ids], kept)
    assert result.kl == pytest.approx(divergence_at(masked, ids, values(kept)), rel=1e-9)
    gradient = result.gradient.view(masked.shape)
    step, tolerance, rounding = (3e-4, 2e-2, 2e-5) if name in ROUNDED else (1e-4, 1e-4, 1e-8)
    layers, heads, _ = masked.shape
    for layer, head, channel in [(0, 0, 3), (layers - 1, heads - 1, 15), (0, heads - 1, 8), (layers - 1, 0, 0)]:
        ends = []
        for sign in (1, -1):
            mask = values(kept)
            mask[layer, head, channel] += sign * step
            ends.append(divergence_at(masked, ids, mask))
        expected = (ends[0] - ends[1]) / (2 * step)
        assert float(gradient[layer, head, channel]) == pytest.approx(expected, rel=tolerance, abs=rounding)


def brute_force_samples(masked: MaskedModel, ids: Tensor, kept: Tensor, uniforms: Tensor) -> Tensor:
    """[S, L, H_k, d_k] of one sequence int64 [1, T]: masks of one segment at a time vary, a backward pass for each."""
    samples = []
    for start in range(0, ids.shape[1], SEGMENT):
        variables = [mask.clone().requires_grad_() for mask in values(kept)]
        masks = {}
        for mixer, variable in zip(masked.mixers, variables, strict=True):
            fixed = variable.detach()
            masks[mixer.layer] = torch.stack(
                [variable if start <= token < start + SEGMENT else fixed for token in range(ids.shape[1])]
            )
        changed = log_probabilities(masked, ids, masks)
        cumulative = changed.detach().exp().cumsum(-1)
        labels = (cumulative < uniforms[:, None]).sum(-1)
        loss = -changed.gather(1, labels[:, None]).sum()
        samples.append(torch.stack(torch.autograd.grad(loss, variables)))
    return torch.stack(samples)


@pytest.mark.parametrize("name", ["gated_deltanet", "delta_net", "q35"])
@pytest.mark.parametrize("scope", ["head", "layer"])
def test_the_fisher_matrix_is_that_of_a_backward_pass_for_every_segment(name: str, scope: str, tmp_path: Path) -> None:
    masked = tiny(name, tmp_path)
    ids, kept, share = tokens(2, 70), some_channels(masked), 0.25
    result = statistics(
        masked, [ids], kept, Sampling(SEGMENT, share, "layer" if scope == "layer" else "head", False, RESIDUAL)
    )
    uniforms = torch.rand(ids.numel(), generator=torch.Generator().manual_seed(0)).double().view(ids.shape)
    layers, heads, width = masked.shape
    per_sequence = [brute_force_samples(masked, ids[row][None], kept, uniforms[row]) for row in range(len(ids))]
    shape = (layers, heads * width) if scope == "layer" else (layers * heads, width)
    expected = torch.zeros(shape[0], shape[1], shape[1], dtype=torch.float64)
    for samples in per_sequence:
        for vector, weight in [(samples, 1 - share), (samples.sum(0, keepdim=True), share)]:
            rows = vector.reshape(len(vector), *shape)
            expected += weight * torch.einsum("spi,spj->pij", rows, rows)
    torch.testing.assert_close(result.fisher, expected / ids.numel(), rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize("name", ["gated_deltanet", "delta_net", "q35"])
def test_recomputed_layers_give_the_same_numbers(name: str, tmp_path: Path) -> None:
    masked = tiny(name, tmp_path)
    ids, kept = tokens(2, 70), some_channels(masked)
    runs: list[int] = []
    module = masked.model.get_submodule(masked.mixers[0].module)
    with module.register_forward_hook(lambda *_: runs.append(1), always_call=True):
        plain = statistics(masked, [ids], kept)
        assert len(runs) == 2
        recomputed = statistics(masked, [ids], kept, replace(PLAIN, gradient_checkpointing=True))
    assert len(runs) == 2 + 4
    assert (plain.passes, recomputed.passes) == (6.0, 8.0)
    assert torch.equal(plain.gradient, recomputed.gradient)
    assert torch.equal(plain.fisher, recomputed.fisher)


def test_sums_do_not_depend_on_how_sequences_are_batched_or_shared(tmp_path: Path) -> None:
    masked = tiny("gated_deltanet", tmp_path)
    ids, kept = tokens(4, 70), some_channels(masked)
    whole = statistics(masked, [ids], kept)
    streamed = statistics(masked, list(ids.split(1)), kept)
    torch.testing.assert_close(streamed.gradient, whole.gradient)
    torch.testing.assert_close(streamed.fisher, whole.fisher)

    generator = torch.Generator().manual_seed(0)
    left: list[Tensor] = []  # what the other process has
    arguments = (kept, SCALE, PLAIN, generator)
    mask_statistics(masked, [ids[:1]], *arguments, lambda sums: left.append(sums.clone()), lambda passes: None)

    def add_the_other(sums: Tensor) -> None:
        sums.add_(left.pop(0))

    reduced = mask_statistics(masked, [ids[1:]], *arguments, add_the_other, lambda passes: None)
    assert left == []
    assert reduced.kl == pytest.approx(whole.kl)
    torch.testing.assert_close(reduced.gradient, whole.gradient)
    torch.testing.assert_close(reduced.fisher, whole.fisher)


def test_labels_come_from_the_generator_alone(tmp_path: Path) -> None:
    masked = tiny("gated_deltanet", tmp_path)
    ids, kept = tokens(1, 70), some_channels(masked)
    first, again, other = (statistics(masked, [ids], kept, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(first.fisher, again.fisher)
    assert not torch.allclose(first.fisher, other.fisher)
    assert torch.equal(first.gradient, other.gradient)


def test_at_the_dense_point_the_gradient_is_zero_without_its_cost(tmp_path: Path) -> None:
    masked = tiny("gated_deltanet", tmp_path)
    ids, all_kept = tokens(1, 70), torch.ones(masked.shape, dtype=torch.bool)
    dense = statistics(masked, [ids], all_kept, scale=1.0)
    assert dense.kl == 0
    assert not dense.gradient.any()
    assert dense.passes == 3.0
    almost = statistics(masked, [ids], all_kept, scale=1.0 + 1e-12)
    assert almost.passes == 6.0
    assert float(almost.gradient.abs().max()) < 1e-9
    torch.testing.assert_close(almost.fisher, dense.fisher)
    scaled = statistics(masked, [ids], all_kept, scale=2.0)
    assert scaled.kl > 1e-4
    assert float(scaled.gradient.abs().max()) > 1e-6


def test_the_fisher_matrix_is_the_curvature_of_the_divergence(tmp_path: Path) -> None:
    """At the dense point the Hessian of the divergence to the masks is the Fisher matrix: here of whole sequences."""
    masked = tiny("gated_deltanet", tmp_path)
    ids, all_kept = tokens(2, 40), torch.ones(masked.shape, dtype=torch.bool)
    sampling, fisher = Sampling(40, 0.0, "head", False), torch.zeros(())
    repeats = 60
    for seed in range(repeats):
        fisher = fisher + statistics(masked, [ids], all_kept, sampling, scale=1.0, seed=seed).fisher / repeats
    mask, step = all_kept.double(), 0.02
    mask[0, 0, :8] -= step  # the divergence of a small step along eight channels of a head together
    curvature = 2 * divergence_at_scale_one(masked, ids, mask) / step**2
    assert float(fisher[0, :8, :8].sum()) == pytest.approx(curvature, rel=0.25)


@torch.no_grad()
def divergence_at_scale_one(masked: MaskedModel, ids: Tensor, mask: Tensor) -> float:
    masks = {mixer.layer: mask[position][None] for position, mixer in enumerate(masked.mixers)}
    dense = log_probabilities(masked, ids, None)
    with masked.architecture.tapped(masked.model, masked.mixers, GivenMasks(masks, 1.0)):
        changed = masked.model(input_ids=ids, use_cache=False).logits.flatten(0, 1).log_softmax(-1)
    return float((dense.exp() * (dense - changed)).sum() / ids.numel())


@pytest.mark.parametrize("name", ["gated_deltanet_grouped", "delta_net", "q35"])
def test_forward_passes_measure_the_same_divergence(name: str, tmp_path: Path) -> None:
    masked = tiny(name, tmp_path)
    ids, kept = tokens(2, 70), some_channels(masked)
    measured = masked_divergence(masked, [ids[:1], ids[1:]], kept, SCALE, lambda tensor: None)
    assert measured == pytest.approx(statistics(masked, [ids], kept, replace(PLAIN, residual=0.0)).kl, rel=1e-9)


def test_dropped_channels_have_a_gradient_where_something_is_left_of_them(tmp_path: Path) -> None:
    masked = tiny("gated_deltanet", tmp_path)
    ids, kept = tokens(1, 70), some_channels(masked)
    nothing_left = statistics(masked, [ids], kept, replace(PLAIN, residual=0.0)).gradient.view(masked.shape)
    assert not nothing_left[~kept].any()
    assert nothing_left[kept].all()
    little = statistics(masked, [ids], kept, replace(PLAIN, residual=1e-6)).gradient.view(masked.shape)
    torch.testing.assert_close(little[kept], nothing_left[kept], rtol=1e-3, atol=1e-6)
    mask = torch.where(kept, 1.0, 0.0).double()
    layer, head, channel = (int(index) for index in (~kept).nonzero()[0])
    mask[layer, head, channel] = 1e-4
    expected = (divergence_at(masked, ids, mask) - divergence_at(masked, ids, kept.double())) / 1e-4
    assert float(little[layer, head, channel]) == pytest.approx(expected, rel=1e-2)


def test_the_model_is_left_as_it_was_also_after_a_failure(tmp_path: Path) -> None:
    masked = tiny("q35", tmp_path)
    ids, kept = tokens(1, 70), some_channels(masked)
    frozen = next(iter(masked.model.parameters()))
    frozen.requires_grad_(False)
    before = [(p.requires_grad, p.detach().clone()) for p in masked.model.parameters()]
    statistics(masked, [ids], kept, replace(PLAIN, gradient_checkpointing=True))
    with pytest.raises(RunError):
        statistics(masked, [ids], kept, scale=math.inf)
    assert not any(module.training for module in masked.model.modules())
    for parameter, (required, value) in zip(masked.model.parameters(), before, strict=True):
        assert parameter.requires_grad == required
        assert torch.equal(parameter, value)
        assert parameter.grad is None


def test_infinite_gradients_name_their_layer_and_head(tmp_path: Path) -> None:
    masked = tiny("gated_deltanet", tmp_path)
    with pytest.raises(RunError, match=r"layer 0, head 0: gradients of the masks are NaN or infinite; look for such"):
        statistics(masked, [tokens(1, 70)], some_channels(masked), scale=math.inf)


def test_a_mixer_that_is_never_called_is_named(tmp_path: Path) -> None:
    masked = tiny("gated_deltanet", tmp_path)
    elsewhere = replace(masked.mixers[1], layer=7, module="model.layers.1.mlp")
    lost = MaskedModel(masked.architecture, masked.model, [masked.mixers[0], elsewhere])
    with pytest.raises(RunError, match="layer 7: no gradient reaches the masks"):
        statistics(lost, [tokens(1, 70)], some_channels(masked))
