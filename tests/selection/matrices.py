"""Matrices [rows, d] float64 that are hard for a rank-revealing QR, and ordinary ones."""

from __future__ import annotations

import torch
from torch import Tensor


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def gaussian(rows: int, width: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, width, generator=generator(seed), dtype=torch.float64)


def correlated(rows: int, width: int, seed: int = 0) -> Tensor:
    return gaussian(rows, width, seed) @ gaussian(width, width, seed + 1000)


def graded(rows: int, width: int, seed: int = 0) -> Tensor:
    """Columns whose norms fall from 1 to 1e-5."""
    return gaussian(rows, width, seed) * torch.logspace(0, -5, width, dtype=torch.float64)


def decaying(width: int, exponent: float, seed: int = 0) -> Tensor:
    """Singular values from 1 to 10^-exponent, in directions that no channel is aligned with."""
    left, _ = torch.linalg.qr(gaussian(2 * width, width, seed))
    right, _ = torch.linalg.qr(gaussian(width, width, seed + 1000))
    return left * torch.logspace(0, -exponent, width, dtype=torch.float64) @ right.mT


def kahan(width: int, sine: float) -> Tensor:
    """Kahan's matrix: column pivoting exchanges nothing and misses the small singular value. The columns shrink a
    little, so that pivoting meets no ties."""
    cosine = (1 - sine**2) ** 0.5
    unit = torch.eye(width, dtype=torch.float64)
    above = torch.ones(width, width, dtype=torch.float64).triu(1)
    powers = torch.arange(width, dtype=torch.float64)
    return (sine**powers)[:, None] * (unit - cosine * above) * (1 - 1e-6) ** powers


def gram(matrix: Tensor) -> Tensor:
    return matrix.mT @ matrix
