"""Strong rank-revealing QR of many matrices at once, from their Gram matrices alone. Works in float64.

Source: M. Gu and S. C. Eisenstat, "Efficient algorithms for computing a strong rank-revealing QR factorization",
SIAM J. Sci. Comput. 17(4), 1996, https://doi.org/10.1137/0917055.

For a Gram matrix G = M^T M with columns I kept and J dropped, everything the algorithm asks for stands in one matrix,
G swept on I (the principal pivot transform):

    S_II = -G_II^-1    S_IJ = G_II^-1 G_IJ    S_JJ = G_JJ - G_JI G_II^-1 G_IJ

The diagonal of S_JJ holds the squared residual norms that column pivoting compares, so that sweeping on its largest
entry is column-pivoted QR of M. Exchanging i of I with j of J multiplies the volume of M_I by

    rho_ij = sqrt(S_ij^2 - S_ii S_jj)

and is two sweeps. One sweep is a rank-one update. Sums and products here are rounded one by one, never fused or
reordered, so that a head's result does not depend on the heads beside it or on the number of threads.

Numerical rank. The columns I stop growing when no residual norm is at least 1e-6 of the largest column norm (1e-12 in
Gram terms). I then has fewer than `keep` columns; it is still strong, and what lacks is filled by residual norm.

Rounding. A Gram matrix squares the condition number: the relative error of a computed rho_ij stays below about
noise = 2^-50 sum_i G_ii (G_II^-1)_ii, which is 1e-2 where sigma_min/sigma_max = 1e-6 and 1e-10 where it is 1e-2.
Exchanges go on while rho > max(f (1 - noise), 1 + noise), so that each of them makes the volume grow, also when
f = 1, and the certificate takes max(f, 1 + noise) (1 + noise + 1e-9).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from compressor.errors import RunError
from compressor.selection.base import ChannelChoice
from compressor.selection.diagnostics import diagnose
from compressor.selection.request import check_f, check_keep

PIVOT_TOLERANCE = 1e-12
"""Smallest squared residual norm of a pivot column, as a share of the largest squared column norm."""

CERTIFICATE_TOLERANCE = 1e-9
"""Relative excess of max rho over f that the certificate takes for rounding, besides a head's own noise."""

_BLOCK_HEADS = 32  # Heads swept together: their matrices stay in the processor's cache.
_REFRESH_EXCHANGES = 32  # Exchanges after which S is computed afresh, so that rounding does not add up.
_CAREFUL_COLUMNS = 8  # Columns between exchanges where pivoting alone loses the accuracy of S.
_CAREFUL_NOISE = 5e-2


def strong_rrqr(gram: Tensor, keep: int, f: float) -> ChannelChoice:
    """Choose `keep` columns of every head by strong rank-revealing QR, and certify the choice.

    gram: [N, d, d] float64, symmetric positive semidefinite. Every head whose numerical rank is at least `keep` ends
    with max rho <= f, recomputed by `diagnose`; for a head of lower rank max rho is that of its independent columns.

    Raises RequestError when keep is outside [1, d] or f < 1, and RunError when a head's certificate fails.
    """
    check_keep(keep, gram.shape[1])
    check_f(f)
    scale = gram.diagonal(dim1=1, dim2=2).amax(dim=1)[:, None, None]
    scaled = (gram + gram.mT) / (2 * torch.where(scale > 0, scale, 1.0))
    states = [_factor(block, keep, f) for block in scaled.split(_BLOCK_HEADS)]
    inside = torch.cat([state.inside for state in states])
    indices = torch.cat([_fill(state, keep) for state in states])
    diagnostics = diagnose(
        gram,
        indices,
        leading=inside.gather(1, indices),
        swaps=torch.cat([state.exchanges for state in states]),
    )
    certify(diagnostics.max_rho, f, torch.cat([_noise(state) for state in states]))
    return ChannelChoice(indices, diagnostics)


@dataclass(frozen=True)
class _Swept:
    """The working state of n heads. Its tensors are updated in place."""

    gram: Tensor  # [n, d, d], largest diagonal entry 1
    matrix: Tensor  # [n, d, d], S
    inside: Tensor  # [n, d] bool, I
    log_volume: Tensor  # [n], log det G_II
    exchanges: Tensor  # [n] int64

    def take(self, heads: Tensor) -> _Swept:
        """A copy of some heads."""
        return _Swept(
            self.gram[heads], self.matrix[heads], self.inside[heads], self.log_volume[heads], self.exchanges[heads]
        )

    def put(self, heads: Tensor, changed: _Swept) -> None:
        """Write back a copy that `take` gave."""
        self.matrix[heads] = changed.matrix
        self.inside[heads] = changed.inside
        self.log_volume[heads] = changed.log_volume
        self.exchanges[heads] = changed.exchanges


def _factor(gram: Tensor, keep: int, f: float) -> _Swept:
    """Columns by pivoting, then exchanges. Where pivoting alone ends too close to singular (Kahan's matrices),
    exchanges in between keep every intermediate choice strong, as in Gu & Eisenstat's algorithm 4."""
    state = _start(gram)
    _pivot(state, keep)
    careful = (~(_noise(state) <= _CAREFUL_NOISE)).nonzero()[:, 0]
    if careful.numel():
        part = _start(gram[careful])
        for first in range(0, keep, _CAREFUL_COLUMNS):
            _pivot(part, min(_CAREFUL_COLUMNS, keep - first))
            _strengthen(part, f)
        state.put(careful, part)
    _strengthen(state, f)
    return state


def _start(gram: Tensor) -> _Swept:
    heads, width, _ = gram.shape
    return _Swept(
        gram=gram,
        matrix=gram.clone(),
        inside=gram.new_zeros(heads, width, dtype=torch.bool),
        log_volume=gram.new_zeros(heads),
        exchanges=gram.new_zeros(heads, dtype=torch.int64),
    )


def _sweep(matrix: Tensor, columns: Tensor, live: Tensor) -> None:
    """Sweep S [n, d, d] on column `columns` [n] in place, in or out of I by the sign of its diagonal entry.
    Heads that are not `live` [n] stay."""
    heads = torch.arange(len(columns), device=columns.device)
    column = matrix[heads, columns]  # [n, d]
    value = column[heads, columns]  # [n]
    magnitude = torch.where(live, value.abs(), torch.inf)
    root = column / magnitude.sqrt()[:, None]
    signed = root * value.sign()[:, None]
    matrix.sub_(signed[:, :, None] * root[:, None, :])
    swept = torch.where(live[:, None], column / magnitude[:, None], column)
    swept[heads, columns] = torch.where(live, -1 / value, value)
    matrix[heads, columns] = swept
    matrix[heads, :, columns] = swept


def _pivot(state: _Swept, count: int, among: Tensor | None = None) -> None:
    """Take up to `count` more columns into I, each time the one of the largest residual, the lowest index on ties.

    among: [n, d] bool, columns to take from; they are known to be independent and need only be distinguishable
    from rounding. Default all, held to the rule of numerical rank.
    """
    heads = torch.arange(len(state.inside), device=state.inside.device)
    tolerance = PIVOT_TOLERANCE if among is None else state.inside.shape[1] * torch.finfo(torch.float64).eps
    for _ in range(count):
        excluded = state.inside if among is None else state.inside | ~among
        residual, column = state.matrix.diagonal(dim1=1, dim2=2).masked_fill(excluded, -torch.inf).max(dim=1)
        live = residual >= tolerance
        if not live.any():
            break
        _sweep(state.matrix, column, live)
        state.inside[heads, column] |= live
        state.log_volume.add_(torch.where(live, residual, 1.0).log())


def _noise(state: _Swept) -> Tensor:
    """Bound [n] of the relative rounding error to expect of rho (module docstring)."""
    inverse = state.matrix.diagonal(dim1=1, dim2=2).abs()
    inflation = torch.where(state.inside, state.gram.diagonal(dim1=1, dim2=2) * inverse, 0.0).sum(dim=1)
    return 4 * torch.finfo(torch.float64).eps * inflation


def _strengthen(state: _Swept, f: float) -> None:
    """Exchange columns until no rho exceeds f; S is computed afresh before a head is left.

    A head is left, too, when its exchanges did not make the freshly computed volume grow: rounding decides there,
    and the certificate judges. So the volume, or the rank, changes one way only and the loop ends.
    """
    active = torch.arange(len(state.inside), device=state.inside.device)
    while active.numel():
        part = state.take(active)
        before, rank = part.log_volume, part.inside.sum(dim=1)
        moved = _exchange(part, f)
        if moved.numel():
            moved_part = part.take(moved)
            fresh = _start(moved_part.gram)
            _pivot(fresh, int(rank.max()), among=moved_part.inside)
            fresh.exchanges.copy_(moved_part.exchanges)
            part.put(moved, fresh)
        state.put(active, part)
        progress = (part.log_volume > before) | (part.inside.sum(dim=1) < rank)
        active = active[moved][progress[moved]]


def _exchange(state: _Swept, f: float) -> Tensor:
    """Up to `_REFRESH_EXCHANGES` exchanges in each head, largest rho first. Returns the heads that had any."""
    noise = _noise(state)
    bound = torch.maximum(f * (1 - noise), 1 + noise)
    active = torch.arange(len(noise), device=noise.device)
    moved = torch.zeros_like(noise, dtype=torch.bool)
    for _ in range(_REFRESH_EXCHANGES):
        matrix, inside = state.matrix[active], state.inside[active]
        rho, leaving, entering = _largest_rho(matrix, inside)
        exceeds = rho > bound[active]
        active, matrix = active[exceeds], matrix[exceeds]
        if not active.numel():
            break
        leaving, entering = leaving[exceeds], entering[exceeds]
        live = torch.ones_like(leaving, dtype=torch.bool)
        _sweep(matrix, leaving, live)
        _sweep(matrix, entering, live)
        state.matrix[active] = matrix
        state.inside[active, leaving] = False
        state.inside[active, entering] = True
        state.exchanges[active] += 1
        moved[active] = True
    return moved.nonzero()[:, 0]


def _largest_rho(matrix: Tensor, inside: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Largest rho_ij [n] with its i in I and j in J, the lowest on ties. Zero where I or J is empty."""
    width = inside.shape[1]
    diagonal = matrix.diagonal(dim1=1, dim2=2)
    inverse = torch.where(inside, -diagonal, 0.0)
    residual = torch.where(inside, 0.0, diagonal.clamp_min(0))
    squared = matrix.square().add_(inverse[:, :, None] * residual[:, None, :])
    squared.masked_fill_(~(inside[:, :, None] & ~inside[:, None, :]), 0)
    largest, position = squared.flatten(1).max(dim=1)
    return largest.sqrt(), position // width, position % width


def _fill(state: _Swept, keep: int) -> Tensor:
    """Sorted indices [n, keep]: I, then the largest residual norms; the lowest index where they are rounding."""
    residual = state.matrix.diagonal(dim1=1, dim2=2)
    floor = state.inside.shape[1] * torch.finfo(torch.float64).eps
    score = torch.where(residual > floor, residual, 0.0).masked_fill(state.inside, torch.inf)
    return score.argsort(dim=1, descending=True, stable=True)[:, :keep].sort(dim=1).values


def certify(max_rho: Tensor, f: float, noise: Tensor) -> None:
    """Raises RunError when max rho [N], recomputed, exceeds f by more than rounding explains."""
    allowed = torch.maximum(torch.full_like(noise, f), 1 + noise) * (1 + CERTIFICATE_TOLERANCE + noise)
    failed = ~(max_rho <= allowed)
    if failed.any():
        head = int(failed.nonzero()[0])
        raise RunError(
            f"Stacked head {head} has max rho = {float(max_rho[head]):.9g} above f = {f:g} at the end of the strong "
            "rank-revealing QR; choose a larger f or a smaller kept width."
        )
