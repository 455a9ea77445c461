"""Strong rank-revealing QR of many matrices at once, from their Gram matrices alone. Works in float64 on the CPU.

Source: M. Gu and S. C. Eisenstat, "Efficient algorithms for computing a strong rank-revealing QR factorization",
SIAM J. Sci. Comput. 17(4), 1996, https://doi.org/10.1137/0917055.

For a Gram matrix G = M^T M with columns I kept and J dropped, everything the algorithm asks for stands in one matrix,
G swept on I (the principal pivot transform):

    S_II = -G_II^-1    S_IJ = G_II^-1 G_IJ    S_JJ = G_JJ - G_JI G_II^-1 G_IJ

The diagonal of S_JJ holds the squared residual norms that column pivoting compares, so that sweeping on its largest
entry is column-pivoted QR of M. Exchanging i of I with j of J multiplies the volume of M_I by

    rho_ij = sqrt(S_ij^2 - S_ii S_jj)

and is two sweeps. One sweep is a rank-one update. The sweeps are NumPy's: it rounds every sum and product by itself in
one thread, so that a head's choice depends neither on the heads beside it nor on the number of threads; and a sweep
is too short for threads to pay.

Numerical rank. The columns I stop growing when no residual norm is at least 1e-6 of the largest column norm (1e-12 in
Gram terms). I then has fewer than `keep` columns; it is still strong, and what lacks is filled by residual norm.

Rounding. A Gram matrix squares the condition number: the relative error of a computed rho_ij stays below about
noise = 2^-50 sum_i G_ii (G_II^-1)_ii, which is 1e-2 where sigma_min/sigma_max = 1e-6 and 1e-10 where it is 1e-2.
Exchanges go on while rho > max(f (1 - noise), 1 + noise), so that each of them makes the volume grow, also when
f = 1, and the certificate takes max(f, 1 + noise) (1 + noise + 1e-9).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compressor.errors import RunError
from compressor.selection.base import ChannelChoice
from compressor.selection.diagnostics import diagnose
from compressor.selection.request import check_f, check_keep

PIVOT_TOLERANCE = 1e-12
"""Smallest squared residual norm of a pivot column, as a share of the largest squared column norm."""

CERTIFICATE_TOLERANCE = 1e-9
"""Relative excess of max rho over f that the certificate takes for rounding, besides a head's own noise."""

_EPSILON = float(np.finfo(np.float64).eps)  # 2^-52
_BLOCK_HEADS = 32  # Heads swept together: their matrices stay in the processor's cache.
_REFRESH_EXCHANGES = 16  # Exchanges after which S is computed afresh, so that rounding does not add up.
_CAREFUL_COLUMNS = 8  # Columns between exchanges where pivoting alone loses the accuracy of S.
_CAREFUL_NOISE = 5e-2

_Floats = NDArray[np.float64]
_Integers = NDArray[np.int64]
_Booleans = NDArray[np.bool_]


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
    states = [_factor(block.cpu().numpy(), keep, f) for block in scaled.split(_BLOCK_HEADS)]

    def gather(parts: list[NDArray[np.generic]]) -> Tensor:
        return torch.from_numpy(np.concatenate(parts)).to(gram.device)

    indices = gather([_fill(state, keep) for state in states])
    diagnostics = diagnose(
        gram,
        indices,
        leading=gather([state.inside for state in states]).gather(1, indices),
        swaps=gather([state.exchanges for state in states]),
    )
    certify(diagnostics.max_rho, f, gather([_noise(state) for state in states]))
    return ChannelChoice(indices, diagnostics)


def certify(max_rho: Tensor, f: float, noise: Tensor) -> None:
    """Raises RunError when max rho [N], recomputed, exceeds f by more than its relative rounding error `noise` [N]."""
    allowed = torch.maximum(torch.full_like(noise, f), 1 + noise) * (1 + CERTIFICATE_TOLERANCE + noise)
    failed = ~(max_rho <= allowed)
    if failed.any():
        head = int(failed.nonzero()[0])
        raise RunError(
            f"Stacked head {head} has max rho = {float(max_rho[head]):.9g} above f = {f:g} at the end of the strong "
            "rank-revealing QR; choose a larger f or a smaller kept width."
        )


@dataclass(frozen=True)
class _Swept:
    """The working state of n heads. Its arrays are updated in place."""

    gram: _Floats  # [n, d, d], largest diagonal entry 1
    matrix: _Floats  # [n, d, d], S
    inside: _Booleans  # [n, d], I
    log_volume: _Floats  # [n], log det G_II
    exchanges: _Integers  # [n]

    def take(self, heads: _Integers) -> _Swept:
        """A copy of some heads."""
        return _Swept(
            self.gram[heads], self.matrix[heads], self.inside[heads], self.log_volume[heads], self.exchanges[heads]
        )

    def put(self, heads: _Integers, changed: _Swept) -> None:
        """Write back a copy that `take` gave."""
        self.matrix[heads] = changed.matrix
        self.inside[heads] = changed.inside
        self.log_volume[heads] = changed.log_volume
        self.exchanges[heads] = changed.exchanges


def _factor(gram: _Floats, keep: int, f: float) -> _Swept:
    """Columns by pivoting, then exchanges. Where pivoting alone ends too close to singular (Kahan's matrices),
    exchanges in between keep every intermediate choice strong, as in Gu & Eisenstat's algorithm 4."""
    state = _start(gram)
    _pivot(state, keep)
    careful = np.flatnonzero(~(_noise(state) <= _CAREFUL_NOISE))
    if careful.size:
        part = _start(gram[careful])
        for first in range(0, keep, _CAREFUL_COLUMNS):
            _pivot(part, min(_CAREFUL_COLUMNS, keep - first))
            _strengthen(part, f)
        state.put(careful, part)
    _strengthen(state, f)
    return state


def _start(gram: _Floats) -> _Swept:
    heads, width, _ = gram.shape
    return _Swept(
        gram=gram,
        matrix=gram.copy(),
        inside=np.zeros((heads, width), dtype=np.bool_),
        log_volume=np.zeros(heads),
        exchanges=np.zeros(heads, dtype=np.int64),
    )


def _diagonal(matrix: _Floats) -> _Floats:
    return matrix.diagonal(axis1=1, axis2=2)


def _sweep(matrix: _Floats, columns: _Integers, live: _Booleans) -> None:
    """Sweep S [n, d, d] on column `columns` [n] in place, in or out of I by the sign of its diagonal entry.
    Heads that are not `live` [n] stay."""
    heads = np.arange(len(columns))
    column = matrix[heads, columns]  # [n, d]
    value = column[heads, columns]  # [n]
    pivot = np.where(live, value, 1.0)
    root = np.where(live[:, None], column / np.sqrt(np.abs(pivot))[:, None], 0.0)
    signed = root * np.sign(pivot)[:, None]
    matrix -= signed[:, :, None] * root[:, None, :]
    swept = np.where(live[:, None], column / np.abs(pivot)[:, None], column)
    swept[heads, columns] = np.where(live, -1 / pivot, value)
    matrix[heads, columns] = swept
    matrix[heads, :, columns] = swept


def _pivot(state: _Swept, count: int, among: _Booleans | None = None) -> None:
    """Take up to `count` more columns into I, each time the one of the largest residual, the lowest index on ties.

    among: [n, d], columns to take from; they are known to be independent and need only be distinguishable from
    rounding. Default all, held to the rule of numerical rank.
    """
    heads = np.arange(len(state.inside))
    tolerance = PIVOT_TOLERANCE if among is None else state.inside.shape[1] * _EPSILON
    for _ in range(count):
        excluded = state.inside if among is None else state.inside | ~among
        residuals = np.where(excluded, -np.inf, _diagonal(state.matrix))
        columns = residuals.argmax(axis=1)
        residual = residuals[heads, columns]
        live = residual >= tolerance
        if not live.any():
            break
        _sweep(state.matrix, columns, live)
        state.inside[heads, columns] |= live
        state.log_volume[:] += np.log(np.where(live, residual, 1.0))


def _noise(state: _Swept) -> _Floats:
    """Bound [n] of the relative rounding error to expect of rho (module docstring)."""
    inflation = _diagonal(state.gram) * np.abs(_diagonal(state.matrix))
    return 4 * _EPSILON * np.where(state.inside, inflation, 0.0).sum(axis=1)


def _strengthen(state: _Swept, f: float) -> None:
    """Exchange columns until no rho exceeds f; S is computed afresh before a head is left.

    A head is left, too, when its exchanges did not make the freshly computed volume grow: rounding decides there,
    and the certificate judges. So the volume, or the rank, changes one way only and the loop ends.
    """
    active = np.arange(len(state.inside))
    while active.size:
        part = state.take(active)
        before, rank = part.log_volume.copy(), part.inside.sum(axis=1)
        moved = _exchange(part, f)
        if moved.size:
            exchanged = part.take(moved)
            fresh = _start(exchanged.gram)
            _pivot(fresh, int(rank.max()), among=exchanged.inside)
            fresh.exchanges[:] = exchanged.exchanges
            part.put(moved, fresh)
        state.put(active, part)
        progress = (part.log_volume > before) | (part.inside.sum(axis=1) < rank)
        active = active[moved][progress[moved]]


def _exchange(state: _Swept, f: float) -> _Integers:
    """Up to `_REFRESH_EXCHANGES` exchanges in each head, largest rho first. Returns the heads that had any."""
    noise = _noise(state)
    bound = np.maximum(f * (1 - noise), 1 + noise)
    active = np.arange(len(noise))
    moved = np.zeros(len(noise), dtype=np.bool_)
    for _ in range(_REFRESH_EXCHANGES):
        matrix = state.matrix[active]
        rho, leaving, entering = _largest_rho(matrix, state.inside[active])
        exceeds = rho > bound[active]
        active, matrix = active[exceeds], matrix[exceeds]
        if not active.size:
            break
        leaving, entering = leaving[exceeds], entering[exceeds]
        live = np.ones(len(active), dtype=np.bool_)
        _sweep(matrix, leaving, live)
        _sweep(matrix, entering, live)
        state.matrix[active] = matrix
        state.inside[active, leaving] = False
        state.inside[active, entering] = True
        state.exchanges[active] += 1
        moved[active] = True
    return np.flatnonzero(moved)


def _largest_rho(matrix: _Floats, inside: _Booleans) -> tuple[_Floats, _Integers, _Integers]:
    """Largest rho_ij [n] with its i in I and j in J, the lowest on ties. Zero where I or J is empty."""
    heads, width = inside.shape
    diagonal = _diagonal(matrix)
    inverse = np.where(inside, -diagonal, 0.0)
    residual = np.where(inside, 0.0, diagonal)
    squared = np.square(matrix)
    squared += inverse[:, :, None] * residual[:, None, :]
    squared *= inside[:, :, None]
    squared *= ~inside[:, None, :]
    flat = squared.reshape(heads, -1)
    position = flat.argmax(axis=1)
    largest = flat[np.arange(heads), position].clip(min=0)
    return np.sqrt(largest), position // width, position % width


def _fill(state: _Swept, keep: int) -> _Integers:
    """Sorted indices [n, keep]: I, then the largest residual norms; the lowest index where they are rounding."""
    residual = _diagonal(state.matrix)
    score = np.where(residual > state.inside.shape[1] * _EPSILON, residual, 0.0)
    score[state.inside] = np.inf
    order = np.argsort(-score, axis=1, kind="stable")
    return np.sort(order[:, :keep], axis=1)
