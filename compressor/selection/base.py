"""What a selector reads and what it answers.

Notation used for tensor shapes:
    N     key heads, all heads of all layers stacked
    d     key/query channels of one head
    keep  channels that are kept of d
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from compressor.errors import RequestError, RunError
from compressor.selection.request import Scoring, Statistic

__all__ = ["ChannelChoice", "HeadDiagnostics", "HeadStatistics", "Scoring", "Selector"]


@dataclass(frozen=True)
class HeadStatistics:
    """Statistics of N key heads of width d; memory does not depend on the number of tokens.

    gram_q, gram_k: [N, d, d] float64, the sum over tokens of x x^T of the query and key activations.
    weight_l1_q, weight_l1_k: [N, d] float64, the sum of |W| over the rows that make a channel.
    tokens: how many tokens the Gram matrices sum over.

    What not every method reads is None where it was not collected; each is [N, d] float64, of queries and of keys:
    energy_q, energy_k: the sum over tokens of the squared activations of a head that is scaled to an L2 norm of 1.
    wanda_q, wanda_k: the sum over the weights W_j that make a channel of |W_j| times the L2 norm, over all tokens,
        of the input that W_j multiplies.
    gradient_q, gradient_k: the sum over the weights W_j that make a channel of |W_j dL/dW_j|, with L the loss of
        next-token prediction.

    Raises RunError when a shape or dtype is another, or when a number is not finite.
    """

    gram_q: Tensor
    gram_k: Tensor
    weight_l1_q: Tensor
    weight_l1_k: Tensor
    tokens: int
    energy_q: Tensor | None = None
    energy_k: Tensor | None = None
    wanda_q: Tensor | None = None
    wanda_k: Tensor | None = None
    gradient_q: Tensor | None = None
    gradient_k: Tensor | None = None

    def __post_init__(self) -> None:
        if self.gram_q.ndim != 3 or self.gram_q.shape[1] != self.gram_q.shape[2] or self.gram_q.numel() == 0:
            raise RunError(f"gram_q has shape {list(self.gram_q.shape)}; give one square matrix per head, [N, d, d].")
        if self.tokens < 1:
            raise RunError(f"The statistics count {self.tokens} tokens; give calibration data with at least 1.")
        _check("gram_q", self.gram_q, [self.heads, self.width, self.width])
        _check("gram_k", self.gram_k, [self.heads, self.width, self.width])
        for name, pair in self._channel_statistics().items():
            for suffix, tensor in zip("qk", pair, strict=True):
                if tensor is not None:
                    _check(f"{name}_{suffix}", tensor, [self.heads, self.width])

    @property
    def heads(self) -> int:
        """N."""
        return self.gram_q.shape[0]

    @property
    def width(self) -> int:
        """d."""
        return self.gram_q.shape[1]

    def gram(self, scoring: Scoring) -> Tensor:
        """Gram matrix [N, d, d] of the activations that are scored; `qk` stacks keys on queries."""
        match scoring:
            case "qk":
                return self.gram_k + self.gram_q
            case "k":
                return self.gram_k
            case "q":
                return self.gram_q

    def channel_scores(self, statistic: Statistic, scoring: Scoring) -> Tensor:
        """One statistic of each channel [N, d] of what is scored; `qk` adds that of keys to that of queries.

        Raises RequestError when it was not collected.
        """
        of_queries, of_keys = self._channel_statistics()[statistic]
        if of_queries is None or of_keys is None:
            raise RequestError(
                f"The statistics hold no {statistic} of the channels, which the chosen method scores by; calibrate "
                "again for that method, or choose one that reads activations alone, such as drrqr."
            )
        match scoring:
            case "qk":
                return of_keys + of_queries
            case "k":
                return of_keys
            case "q":
                return of_queries

    def _channel_statistics(self) -> dict[Statistic, tuple[Tensor | None, Tensor | None]]:
        return {
            "weight_l1": (self.weight_l1_q, self.weight_l1_k),
            "energy": (self.energy_q, self.energy_k),
            "wanda": (self.wanda_q, self.wanda_k),
            "gradient": (self.gradient_q, self.gradient_k),
        }


@dataclass(frozen=True)
class HeadDiagnostics:
    """How well the kept columns M_I stand for all columns M of the scored activations. Each tensor is [N].

    max_rho: float64, the largest factor by which exchanging one kept for one dropped channel would multiply
        the volume of M_I; at most f after a strong rank-revealing QR; 0 when nothing can be exchanged;
        infinite when the kept columns are numerically dependent.
    swaps: int64, exchanges the selector made.
    numerical_rank: int64, independent columns of M_I: as many as strong rank-revealing QR found in M, at most keep;
        for any other selector the singular values of M_I that are at least 1e-6 of its largest.
    rank_deficient: bool, numerical_rank < keep.
    sigma_min, sigma_max, condition_number: float64, of M_I. A Gram matrix in float64 shows no singular value below
        sqrt(keep 2^-52), about 1e-7, of the largest: it counts as 0, and the condition number as infinite.
    retained_energy: float64, share of the squared activations that lies in kept channels; 1 when there is none.
    """

    max_rho: Tensor
    swaps: Tensor
    numerical_rank: Tensor
    rank_deficient: Tensor
    sigma_min: Tensor
    sigma_max: Tensor
    condition_number: Tensor
    retained_energy: Tensor


@dataclass(frozen=True)
class ChannelChoice:
    """The kept channels: indices [N, keep] int64, ascending and unique in each row. Raises RunError otherwise."""

    indices: Tensor
    diagnostics: HeadDiagnostics

    def __post_init__(self) -> None:
        if self.indices.ndim != 2 or self.indices.dtype != torch.int64:
            raise RunError(
                f"Kept channels have shape {list(self.indices.shape)} and {self.indices.dtype}; "
                "give [N, keep] of torch.int64."
            )
        unordered = (self.indices.diff(dim=1) <= 0).any(dim=1)
        if unordered.any():
            head = int(unordered.nonzero()[0])
            raise RunError(f"Kept channels of stacked head {head} are not ascending and unique; sort them first.")


class Selector(ABC):
    """A rule that picks `keep` channels of every head. Subclasses are final."""

    def __init__(self, scoring: Scoring, f: float) -> None:
        self.scoring = scoring
        self.f = f

    @abstractmethod
    def select(self, statistics: HeadStatistics, keep: int, generator: torch.Generator) -> ChannelChoice:
        """Pick exactly `keep` channels of each head; the same arguments give the same choice.

        Raises RequestError when keep is outside [1, d].
        """


def _check(name: str, tensor: Tensor, shape: list[int]) -> None:
    if list(tensor.shape) != shape or tensor.dtype != torch.float64:
        raise RunError(
            f"{name} has shape {list(tensor.shape)} and {tensor.dtype}; give {shape} of torch.float64, "
            "the shape of gram_q's heads and channels."
        )
    bad = ~tensor.isfinite().flatten(1).all(dim=1)
    if bad.any():
        head = int(bad.nonzero()[0])
        raise RunError(f"{name} of stacked head {head} is not finite; check the activations and weights of that head.")
