"""Diagnostics of any choice of channels, from the Gram matrix and the indices alone. Works in float64.

This is also the certificate of strong RRQR: it shares neither state nor factorisation with `rrqr`.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from compressor.selection.base import HeadDiagnostics

RANK_TOLERANCE = 1e-12
"""Share of the largest eigenvalue of a Gram matrix, (1e-6)^2 in singular values, that still counts as rank."""


def diagnose(
    gram: Tensor, indices: Tensor, leading: Tensor | None = None, swaps: Tensor | None = None
) -> HeadDiagnostics:
    """Diagnostics of the channels `indices` of `gram`.

    gram: [N, d, d] float64. indices: [N, keep] int64, unique in each row.
    leading: [N, keep] bool, the kept columns that the selector found independent; `max_rho` is of exchanges of these
        with any other column, so that what fills up a head of too low rank does not count. Default all.
    swaps: [N] int64, exchanges the selector made; default 0.
    """
    scale = gram.diagonal(dim1=1, dim2=2).amax(dim=1)  # [N]
    scale = torch.where(scale > 0, scale, 1.0)
    gram = gram / scale[:, None, None]
    diagonal = gram.diagonal(dim1=1, dim2=2)  # [N, d]
    keep = indices.shape[1]
    rows = gram.gather(1, indices[:, :, None].expand(-1, -1, gram.shape[2]))  # [N, keep, d]
    kept = rows.gather(2, indices[:, None, :].expand(-1, keep, -1))  # [N, keep, keep]

    eigenvalues = torch.linalg.eigvalsh(kept)  # [N, keep], ascending
    rounding = keep * torch.finfo(torch.float64).eps * eigenvalues[:, -1:]
    eigenvalues = torch.where(eigenvalues > rounding, eigenvalues, 0.0)
    sigma = (eigenvalues * scale[:, None]).sqrt()
    sigma_min, sigma_max = sigma[:, 0], sigma[:, -1]

    if leading is None:
        leading = torch.ones_like(indices, dtype=torch.bool)
        rank = ((eigenvalues > 0) & (eigenvalues >= RANK_TOLERANCE * eigenvalues[:, -1:])).sum(dim=1)
        dependent = rank < keep
    else:
        rank = leading.sum(dim=1)
        dependent = torch.zeros_like(rank, dtype=torch.bool)
    outside = torch.ones_like(diagonal, dtype=torch.bool).scatter(1, indices, ~leading)  # [N, d]

    total = diagonal.sum(dim=1)
    energy = diagonal.gather(1, indices).sum(dim=1)
    return HeadDiagnostics(
        max_rho=_max_rho(rows, kept, diagonal, leading, outside, dependent),
        swaps=torch.zeros_like(rank) if swaps is None else swaps,
        numerical_rank=rank,
        rank_deficient=rank < keep,
        sigma_min=sigma_min,
        sigma_max=sigma_max,
        condition_number=torch.where(sigma_min > 0, sigma_max / sigma_min, torch.inf),
        retained_energy=torch.where(total > 0, energy / total, 1.0),
    )


def _max_rho(
    rows: Tensor, kept: Tensor, diagonal: Tensor, leading: Tensor, outside: Tensor, dependent: Tensor
) -> Tensor:
    """Largest rho_ij [N] over i in I, the `leading` columns [N, keep], and j in J, the `outside` columns [N, d].

    rho_ij^2 = (G_II^-1 G_IJ)_ij^2 + (G_II^-1)_ii (G_JJ - G_JI G_II^-1 G_IJ)_jj, after Gu & Eisenstat 1996, lemma 3.1.
    Infinite where G_II is not positive definite, or the columns are known to be `dependent` [N], and J is not empty.
    """
    unit = torch.eye(kept.shape[1], dtype=kept.dtype, device=kept.device)
    block = torch.where(leading[:, :, None] & leading[:, None, :], kept, unit)
    norms = block.diagonal(dim1=1, dim2=2).clamp_min(torch.finfo(torch.float64).tiny).sqrt()[:, :, None]
    block = block / norms / norms.mT
    singular = dependent | (torch.linalg.cholesky_ex(block).info > 0)
    block = torch.where(singular[:, None, None], unit, block)

    right = torch.cat([unit.expand_as(block), rows * leading[:, :, None] / norms], dim=2)
    solution = _solve(block, right) / norms  # [N, keep, keep + d]
    inverse = solution.diagonal(dim1=1, dim2=2) / norms[:, :, 0]  # [N, keep]
    interpolation = solution[:, :, kept.shape[1] :]  # [N, keep, d]
    residual = diagonal - (rows * interpolation).sum(dim=1)  # [N, d]
    rho_squared = interpolation.square() + inverse[:, :, None] * residual[:, None, :]

    pairs = leading[:, :, None] & outside[:, None, :]
    largest = torch.where(pairs, rho_squared, 0.0).flatten(1).amax(dim=1).sqrt()
    return torch.where(singular & pairs.flatten(1).any(dim=1), torch.inf, largest)


def _solve(matrices: Tensor, right: Tensor) -> Tensor:
    """Solve many small systems by LU. NumPy's solver keeps each in one thread, where torch's has threads wait for each
    other at every one of them: seconds instead of milliseconds when other work shares the cores."""
    solution = np.linalg.solve(matrices.cpu().numpy(), right.cpu().numpy())
    return torch.from_numpy(solution).to(right.device)
