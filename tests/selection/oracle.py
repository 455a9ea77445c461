"""Strong rank-revealing QR the textbook way: dense QR of one explicit matrix, float64, no Gram matrix."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]


def log_volume(matrix: Matrix, columns: list[int]) -> float:
    """log |det R11| of the chosen columns; -inf when they are dependent."""
    with np.errstate(divide="ignore"):
        return float(np.log(np.abs(np.diag(np.linalg.qr(matrix[:, columns], mode="r")))).sum())


def exchange_factors(matrix: Matrix, kept: list[int]) -> Matrix:
    """rho by its meaning: the volume after each single exchange over the volume before, each from its own QR."""
    dropped = [column for column in range(matrix.shape[1]) if column not in kept]
    before = log_volume(matrix, kept)
    factors = np.zeros((len(kept), len(dropped)))
    for row, leaving in enumerate(kept):
        others = [column for column in kept if column != leaving]
        for position, entering in enumerate(dropped):
            factors[row, position] = np.exp(log_volume(matrix, [*others, entering]) - before)
    return factors


def blocks(matrix: Matrix, kept: list[int]) -> tuple[Matrix, Matrix, Matrix]:
    """R11, R12, R22 of the QR of the kept columns, then the dropped ones."""
    dropped = [column for column in range(matrix.shape[1]) if column not in kept]
    triangle = np.linalg.qr(matrix[:, kept + dropped]).R
    k = len(kept)
    return triangle[:k, :k], triangle[:k, k:], triangle[k:, k:]


def dense_rho(matrix: Matrix, kept: list[int]) -> Matrix:
    """rho of Gu & Eisenstat 1996, lemma 3.1, from the blocks of R."""
    r11, r12, r22 = blocks(matrix, kept)
    inverse = np.linalg.inv(r11)
    row_norms = np.linalg.norm(inverse, axis=1)
    return np.hypot(inverse @ r12, row_norms[:, None] * np.linalg.norm(r22, axis=0)[None, :])


def pivoted_columns(matrix: Matrix, keep: int) -> list[int]:
    """The first `keep` pivots of QR with column pivoting, by projecting out one column at a time, twice."""
    residual = matrix.copy()
    pivots: list[int] = []
    for _ in range(keep):
        norms = np.linalg.norm(residual, axis=0)
        norms[pivots] = -1
        pivots.append(int(norms.argmax()))
        direction = residual[:, pivots[-1]] / np.linalg.norm(residual[:, pivots[-1]])
        for _ in range(2):
            residual -= np.outer(direction, direction @ residual)
    return pivots


def strong_columns(matrix: Matrix, keep: int, f: float) -> tuple[list[int], int]:
    """Kept columns, ascending, and the number of exchanges: pivoting, then the largest rho first while it exceeds f."""
    kept = sorted(pivoted_columns(matrix, keep))
    exchanges = 0
    while keep < matrix.shape[1]:
        rho = dense_rho(matrix, kept)
        row, position = np.unravel_index(rho.argmax(), rho.shape)
        if rho[row, position] <= f:
            break
        dropped = [column for column in range(matrix.shape[1]) if column not in kept]
        kept = sorted({*kept, dropped[position]} - {kept[row]})
        exchanges += 1
    return kept, exchanges
