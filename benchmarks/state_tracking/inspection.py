"""What a trained model uses: its betas, the head that solves the task, the width of that head's keys.

Notation used for tensor shapes:
    L  layers        H  heads of a layer        d  key channels of a head        B, T  sequences, tokens
    n  Householder steps a token
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.state_tracking.models import ModelSettings, mixer_modules, tapped
from compressor.architectures.base import RecurrenceTap
from compressor.architectures.masking import MaskedChannels
from compressor.selection.rrqr import strong_rrqr

BETA_BINS = 20
RRQR_F = 2.0


class HeadSilenced(RecurrenceTap):
    """Replaces the output of one head of a layer by zeros, or that of all its others."""

    def __init__(self, layer: int, head: int, others: bool) -> None:
        self._layer, self._head, self._others = layer, head, others

    def on_output(self, layer: int, output: Tensor) -> Tensor:
        if layer != self._layer:
            return output
        is_head = torch.arange(output.shape[2], device=output.device) == self._head
        return output * (is_head if self._others else ~is_head)[:, None]


class ActivationRecorder(RecurrenceTap):
    """Sums, a layer: Gram matrices of queries and keys as they are, moments of the keys as the recurrence uses them."""

    def __init__(self) -> None:
        self.gram_q: dict[int, Tensor] = {}
        self.gram_k: dict[int, Tensor] = {}
        self.direction_sum: dict[int, Tensor] = {}
        self.direction_gram: dict[int, Tensor] = {}
        self.keys = 0

    def on_query(self, layer: int, query: Tensor) -> Tensor:
        _add(self.gram_q, layer, _gram(query))
        return query

    def on_key(self, layer: int, key: Tensor) -> Tensor:
        _add(self.gram_k, layer, _gram(key))
        directions = torch.nn.functional.normalize(key.double(), dim=-1)
        _add(self.direction_sum, layer, directions.sum((0, 1)))
        _add(self.direction_gram, layer, _gram(directions))
        self.keys += key.shape[0] * key.shape[1] if layer == 0 else 0
        return key

    def principal_components(self, layer: int, head: int) -> dict[str, list[float]]:
        """Of the normalised keys of all n steps, descending: shares of the variance about their mean, and of the
        squared norm about zero (the span, which the reflections I - beta k k^T act in)."""
        moment = self.direction_gram[layer][head] / self.keys
        mean = self.direction_sum[layer][head] / self.keys
        return {
            "variance_share": _spectrum(moment - torch.outer(mean, mean)),
            "energy_share": _spectrum(moment),
        }


def _gram(x: Tensor) -> Tensor:
    """[H, d, d] float64 of x [B, T, H, d]."""
    rows = x.detach().double().flatten(0, 1).transpose(0, 1)
    return (rows.mT @ rows).cpu()


def _add(sums: dict[int, Tensor], layer: int, value: Tensor) -> None:
    value = value.cpu()
    sums[layer] = sums[layer] + value if layer in sums else value


def _spectrum(matrix: Tensor) -> list[float]:
    eigenvalues = torch.linalg.eigvalsh(matrix).flip(0).clamp(min=0)
    return [round(share, 5) for share in (eigenvalues / eigenvalues.sum()).tolist()]


@torch.no_grad()
def record_activations(model: PreTrainedModel, settings: ModelSettings, tokens: Tensor) -> ActivationRecorder:
    """One pass over tokens int64 [B, T]."""
    recorder = ActivationRecorder()
    with tapped(model, settings, recorder):
        model(input_ids=tokens.to(model.device), use_cache=False)
    return recorder


@dataclass(frozen=True)
class BetaDistribution:
    """Of one layer, step and head: quantiles, shares near the three values that matter, a histogram over 0 .. 2.

    A step I - beta k k^T keeps the state at beta 0, erases the key's component at 1 and reflects it at 2.
    """

    layer: int
    step: int
    head: int
    quantiles: list[float]
    near_zero: float
    near_one: float
    near_two: float
    histogram: list[float]


@torch.no_grad()
def beta_distributions(model: PreTrainedModel, settings: ModelSettings, tokens: Tensor) -> list[BetaDistribution]:
    """Of every layer, Householder step and head; "near" is within 0.1."""
    logits: list[Tensor] = []
    handles = [
        mixer.b_proj.register_forward_hook(lambda module, inputs, output: logits.append(output))
        for mixer in mixer_modules(model, settings)
    ]
    try:
        model(input_ids=tokens.to(model.device), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    betas = [
        settings.largest_beta * output.float().sigmoid().cpu().unflatten(-1, (-1, settings.num_heads))
        for output in logits
    ]
    return [
        _distribution(layer, step, head, of_layer[:, :, step, head].flatten())
        for layer, of_layer in enumerate(betas)
        for step in range(settings.num_householder)
        for head in range(settings.num_heads)
    ]


def _distribution(layer: int, step: int, head: int, values: Tensor) -> BetaDistribution:
    """values [B T]."""
    levels = torch.tensor([0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0])
    # torch.quantile takes 2^24 values at most.
    quantiles = values[:: max(1, len(values) // 2**20)].quantile(levels)
    histogram = torch.histc(values, BETA_BINS, 0.0, 2.0) / len(values)
    return BetaDistribution(
        layer=layer,
        step=step,
        head=head,
        quantiles=_rounded(quantiles),
        near_zero=_share_near(values, 0.0),
        near_one=_share_near(values, 1.0),
        near_two=_share_near(values, 2.0),
        histogram=_rounded(histogram),
    )


def _share_near(values: Tensor, target: float) -> float:
    return round(float(((values - target).abs() < 0.1).float().mean()), 4)


def _rounded(values: Tensor) -> list[float]:
    return [round(value, 4) for value in values.tolist()]


def choose_channels(recorder: ActivationRecorder, method: str, keep: int, seed: int) -> dict[int, Tensor]:
    """Kept key/query channels of every layer, int64 [H, keep], ascending.

    method: "rrqr" (strong rank-revealing QR of the stacked keys and queries), "energy" (largest sums of squares
    of the two) or "random".
    """
    generator = torch.Generator().manual_seed(seed)
    kept = {}
    for layer, gram_k in recorder.gram_k.items():
        gram = gram_k + recorder.gram_q[layer]
        if method == "rrqr":
            kept[layer] = strong_rrqr(gram, keep, RRQR_F).indices
            continue
        diagonal = gram.diagonal(dim1=1, dim2=2)
        score = diagonal if method == "energy" else torch.rand(diagonal.shape, generator=generator)
        kept[layer] = score.topk(keep, dim=1).indices.sort(1).values
    return kept


def masked(model: PreTrainedModel, settings: ModelSettings, kept: dict[int, Tensor]) -> Any:
    """While active, the model computes as if cut to the kept channels, its output norm's epsilon scaled along."""
    return tapped(model, settings, MaskedChannels(kept, settings.head_dim, output_scale=1.0))
