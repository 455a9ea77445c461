"""Ridge least squares of one linear map that shrinks towards old weights, from sums over tokens.

Notation: N tokens, n inputs, m outputs. Inputs X [N, n] and targets Y [N, m] meet the old weights
W0 [m, n]; E = Y - X W0^T is what those miss. The new weights W0 + D minimise, with G = X^T X,

    |E - X D^T|^2 + ridge * mean(diag G) * |D|^2,

so that D = C (G + ridge * mean(diag G) * I)^-1 with C = E^T X (Hoerl & Kennard 1970, with the old
weights in the place of zero). The squared error of any D on tokens of which only the sums are known
is |E|^2 - 2 <D, C> + <D G, D>, exactly. Sums are float64 and do not grow with N.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

RIDGES: tuple[float, ...] = tuple(10.0 ** (exponent / 2) for exponent in range(-12, 5))
"""Strengths from 1e-6 to 100, half a decade apart, relative to the mean square of an input."""

TOKENS_PER_PRODUCT = 512
"""Rows of one low-precision product: tensor cores lose digits in proportion to the rows they sum."""


class NormalEquations:
    """Sums over tokens of one linear map with the old weights `weight` [m, n].

    Attributes:
        gram: G, float64 [n, n].
        cross: C, float64 [m, n].
        error: |E|^2, float64 scalar tensor.
        energy: |Y|^2, float64 scalar tensor.
        tokens: N.
    """

    def __init__(self, weight: Tensor) -> None:
        outputs, inputs = weight.shape
        self.weight = weight.detach()
        self.gram = torch.zeros(inputs, inputs, dtype=torch.float64, device=weight.device)
        self.cross = torch.zeros(outputs, inputs, dtype=torch.float64, device=weight.device)
        self.error = torch.zeros((), dtype=torch.float64, device=weight.device)
        self.energy = torch.zeros_like(self.error)
        self.tokens = 0

    def add(self, inputs: Tensor, targets: Tensor) -> None:
        """Count the tokens of `inputs` [N, n] and `targets` [N, m], both on the device of the weights.

        float64 throughout on a CPU. On a GPU, blocks of 512 rows are multiplied in float32 and summed
        in float64; products of half-precision activations are exact there.
        """
        wide = torch.float64 if self.weight.device.type == "cpu" else torch.float32
        weight = self.weight.to(wide)
        blocks = zip(inputs.split(TOKENS_PER_PRODUCT), targets.split(TOKENS_PER_PRODUCT), strict=True)
        for x, y in blocks:
            error = y.to(wide) - x.to(wide) @ weight.mT
            self.gram += _gram(x, wide)
            self.cross += error.mT @ x.to(wide)
            self.error += error.square().sum(dtype=torch.float64)
            self.energy += y.to(wide).square().sum(dtype=torch.float64)
        self.tokens += len(inputs)

    @property
    def finite(self) -> bool:
        """Whether no activation was NaN or infinite."""
        sums = (self.gram.diagonal().sum(), self.error, self.energy)
        return all(bool(torch.isfinite(total)) for total in sums)

    def error_with(self, change: Tensor) -> float:
        """Squared error of the weights W0 + `change`, float64 [m, n], over the counted tokens."""
        explained = (change * (2 * self.cross - change @ self.gram)).sum()
        return float(self.error - explained)


def _gram(x: Tensor, wide: torch.dtype) -> Tensor:
    """X^T X [n, n] of one block [N, n]."""
    if x.is_cuda and x.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(x.mT, x, out_dtype=wide)
    return x.to(wide).mT @ x.to(wide)


@dataclass(frozen=True, slots=True, eq=False)
class RidgeFit:
    """New weights [m, n] in the dtype asked for; None, with `ridge`, where the old ones stay.

    The errors are squared and summed over the held-out tokens, with the old and the new weights.
    """

    weight: Tensor | None
    ridge: float | None
    error_before: float
    error_after: float


def fit(
    train: NormalEquations, held_out: NormalEquations, dtype: torch.dtype, ridges: Sequence[float] = RIDGES
) -> RidgeFit:
    """The weights of `train`, rounded to `dtype`, with the ridge that errs least on `held_out`.

    Both sums are taken with the same old weights. What is judged is the rounded weights; where none of
    them errs less than the old ones, those stay. One eigendecomposition serves all ridges.
    """
    before = float(held_out.error)
    best = RidgeFit(None, None, before, before)
    if not bool(train.gram.any()):
        return best
    old = train.weight.double()
    eigenvalues, vectors = torch.linalg.eigh(train.gram)
    rotated = train.cross @ vectors
    scale = train.gram.diagonal().mean()
    for ridge in ridges:
        change = (rotated / (eigenvalues.clamp_min(0) + ridge * scale)) @ vectors.mT
        weight = (old + change).to(dtype)
        error = held_out.error_with(weight.double() - old)
        if error < best.error_after:
            best = RidgeFit(weight, ridge, before, error)
    return best
