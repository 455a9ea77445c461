"""Means over tokens whose standard errors know that tokens of one text are not independent.

All sums are float64. A mean a token is the ratio of two sums over clusters (windows, documents), and its standard
error is that of the linearised ratio. With sums y_c and counts n_c of C clusters, N = sum n_c, mean = sum y_c / N:

    SE^2 = C / (C - 1) * sum_c (y_c - mean n_c)^2 / N^2

(Cochran, Sampling Techniques, 3rd ed., section 6.4, without the finite population correction).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over `tokens` tokens: None where there are none; without standard error below two clusters."""

    tokens: int
    mean: float | None
    standard_error: float | None


def estimate(values: Tensor, clusters: Tensor) -> Estimate:
    """Mean of `values` float64 [N], one a token, and its standard error over `clusters` int64 [N]."""
    _, members = clusters.unique(return_inverse=True)
    sums = torch.zeros(int(members.max()) + 1 if len(members) else 0, dtype=torch.float64)
    counts = torch.zeros_like(sums)
    sums.index_add_(0, members, values.double())
    counts.index_add_(0, members, torch.ones(len(members), dtype=torch.float64))
    return estimate_ratio(sums, counts)


def estimate_ratio(sums: Tensor, counts: Tensor) -> Estimate:
    """The same from the sum and the number of tokens of each cluster, both [C], every count positive."""
    total = int(counts.sum())
    if total == 0:
        return Estimate(0, None, None)
    mean = float(sums.double().sum()) / total
    clusters = len(sums)
    if clusters < 2:
        return Estimate(total, mean, None)
    residuals = sums.double() - mean * counts.double()
    variance = clusters / (clusters - 1) * float(residuals.square().sum()) / total**2
    return Estimate(total, mean, math.sqrt(variance))
