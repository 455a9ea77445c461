"""Diagnostics of any choice of channels, from the Gram matrix and the indices alone. Works in float64.

This is also the certificate of strong RRQR: it shares no state and no formula of factorisation with `rrqr`.
"""

from __future__ import annotations

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
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    gram = gram / scale[:, None, None]
    diagonal = gram.diagonal(dim1=1, dim2=2)  # [N, d]
    rows = gram.gather(1, indices[:, :, None].expand(-1, -1, gram.shape[2]))  # [N, keep, d]
    kept = rows.gather(2, indices[:, None, :].expand(-1, rows.shape[1], -1))  # [N, keep, keep]

    eigenvalues = torch.linalg.eigvalsh(kept)  # [N, keep], ascending
    rounding = indices.shape[1] * torch.finfo(torch.float64).eps * eigenvalues[:, -1:]
    eigenvalues = torch.where(eigenvalues > rounding, eigenvalues, 0.0)
    sigma = (eigenvalues * scale[:, None]).sqrt()
    sigma_min, sigma_max = sigma[:, 0], sigma[:, -1]
    rank = ((eigenvalues > 0) & (eigenvalues >= RANK_TOLERANCE * eigenvalues[:, -1:])).sum(dim=1)

    if leading is None:
        max_rho = _max_rho(rows, kept, diagonal, indices, torch.ones_like(indices, dtype=torch.bool))
        exchangeable = indices.shape[1] < gram.shape[1]
        max_rho = torch.where((rank < indices.shape[1]) & exchangeable, torch.inf, max_rho)
    else:
        max_rho = _max_rho(rows, kept, diagonal, indices, leading)
        rank = leading.sum(dim=1)

    total = diagonal.sum(dim=1)
    energy = diagonal.gather(1, indices).sum(dim=1)
    return HeadDiagnostics(
        max_rho=max_rho,
        swaps=torch.zeros_like(rank) if swaps is None else swaps,
        numerical_rank=rank,
        rank_deficient=rank < indices.shape[1],
        sigma_min=sigma_min,
        sigma_max=sigma_max,
        condition_number=torch.where(sigma_min > 0, sigma_max / sigma_min, torch.inf),
        retained_energy=torch.where(total > 0, energy / total, 1.0),
    )


def _max_rho(rows: Tensor, kept: Tensor, diagonal: Tensor, indices: Tensor, leading: Tensor) -> Tensor:
    """Largest rho_ij [N] over leading columns i and all columns j that are not leading.

    Gu & Eisenstat 1996, lemma 3.1, in terms of G_II = L L^T:
    rho_ij^2 = (G_II^-1 G_Ij)_i^2 + (G_II^-1)_ii (G_jj - |L^-1 G_Ij|^2).
    """
    unit = torch.eye(kept.shape[1], dtype=kept.dtype, device=kept.device)
    both = leading[:, :, None] & leading[:, None, :]
    factor, info = torch.linalg.cholesky_ex(torch.where(both, kept, unit))  # [N, keep, keep]
    inverse = torch.linalg.solve_triangular(factor, unit.expand_as(factor), upper=False)
    half = torch.linalg.solve_triangular(factor, rows * leading[:, :, None], upper=False)  # [N, keep, d]
    interpolation = torch.linalg.solve_triangular(factor.mT, half, upper=True)
    residual = (diagonal - half.square().sum(dim=1)).clamp_min(0)  # [N, d]
    rho_squared = interpolation.square() + inverse.square().sum(dim=1)[:, :, None] * residual[:, None, :]

    outside = torch.ones_like(diagonal, dtype=torch.bool).scatter(1, indices, ~leading)  # [N, d]
    pairs = leading[:, :, None] & outside[:, None, :]
    largest = torch.where(pairs, rho_squared, 0.0).flatten(1).amax(dim=1).sqrt()
    return torch.where((info > 0) & pairs.flatten(1).any(dim=1), torch.inf, largest)
