"""How many directions a matrix uses: pure mathematics on singular values, in float64.

With the singular values s_1 >= ... >= s_n of a d_v x d_k state S, n = min(d_v, d_k), and p_i = s_i / sum s:

    numerical rank          how many s_i exceed s_1 * 128 * eps, with eps of the dtype that the state is held in
    entropy effective rank  exp(-sum p_i log p_i)            (Roy and Vetterli 2007, EUSIPCO, definition 1)
    stable rank             ||S||_F^2 / ||S||_2^2            (Rudelson and Vershynin 2007, section 1)
    utilisation u           stable rank / n, in (0, 1]
    condition number        s_1 / s_n, at least 1 / sqrt(u): s_n^2 is at most the mean of s_i^2, which is u s_1^2

A zero state has rank 0 by all of these and, as every singular matrix, an infinite condition number.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

RANK_FACTOR = 128
"""Times eps and the largest singular value: what a direction has to exceed to count for the numerical rank."""

FIGURES = ("numerical_rank", "entropy_effective_rank", "stable_rank", "utilisation", "condition_number")
"""Names of the figures, in the order in which `spectrum_figures` stacks them."""


@dataclass(frozen=True, slots=True, eq=False)
class Spectrum:
    """Singular values float64 [..., n], descending, and the figures of each matrix float64 [..., len(FIGURES)]."""

    singular_values: Tensor
    figures: Tensor


def spectrum(states: Tensor) -> Spectrum:
    """Of states [..., d_v, d_k]; eps is that of their dtype."""
    values = torch.linalg.svdvals(states.double())
    return Spectrum(values, spectrum_figures(values, torch.finfo(states.dtype).eps))


def spectrum_figures(singular_values: Tensor, eps: float) -> Tensor:
    """The figures of `singular_values` [..., n], descending: float64 [..., len(FIGURES)], in the order of FIGURES."""
    values = singular_values.double()
    largest = values[..., 0]
    stable = stable_rank(values)
    return torch.stack(
        [
            numerical_rank(values, eps).double(),
            entropy_effective_rank(values),
            stable,
            stable / values.shape[-1],
            torch.where(largest > 0, largest / values[..., -1], torch.inf),
        ],
        dim=-1,
    )


def numerical_rank(singular_values: Tensor, eps: float) -> Tensor:
    """int64 [...] for descending values [..., n]."""
    return (singular_values > singular_values[..., :1] * (RANK_FACTOR * eps)).sum(-1)


def entropy_effective_rank(singular_values: Tensor) -> Tensor:
    """float64 [...] for values [..., n] of at least 0; between 1 and n, or 0 where all are zero."""
    values = singular_values.double()
    total = values.sum(-1)
    shares = values / torch.where(total > 0, total, 1.0)[..., None]
    return torch.where(total > 0, torch.special.entr(shares).sum(-1).exp(), 0.0)


def stable_rank(singular_values: Tensor) -> Tensor:
    """float64 [...] for descending values [..., n]; between 1 and n, or 0 where all are zero."""
    values = singular_values.double()
    largest = values[..., 0]
    # Relative to the largest, so that squares of small values do not vanish.
    relative = values / torch.where(largest > 0, largest, 1.0)[..., None]
    return relative.square().sum(-1)
