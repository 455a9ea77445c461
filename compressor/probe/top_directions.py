"""The top left singular directions of many small matrices at once, by subspace iteration.

On G = S S^T, in float64, with q > r columns X: Y = G^2 X with its columns scaled to length 1, X from Cholesky
factorisations of Gram matrices (Fukaya et al. 2020, shifted CholeskyQR3), and at the end of a round the q x q
Rayleigh-Ritz step on G (Saad, Numerical Methods for Large Eigenvalue Problems, 2nd ed., algorithm 5.3). A matrix is
done when it is sure that no r directions hold more than the found ones by `TOLERANCE` of ||S||_F^2: with
B = (I - X_r X_r^T) G X_r, mu at least the largest eigenvalue of G outside X_r, and any t > 0,

    lambda_1 + ... + lambda_r <= theta_1 + ... + theta_r + ||B||_F^2 / t + r max(0, mu + t - theta_r)

since 2 x^T B^T y <= |B x|^2 / t + t |y|^2 leaves a block-diagonal matrix above G. With t = theta_r - mu that is the
square of the residuals over the gap; where there is hardly one, t = ||B||_F / sqrt(r).
What is not done after `ROUNDS` rounds, as a flat spectrum never is, gets an exact SVD.

Notation used for tensor shapes:
    N   matrices        d_v, d_k  rows and columns of each        r   directions asked for        q   columns of X
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from compressor.errors import RunError

TOLERANCE = 5e-6
"""Share of the energy ||S||_F^2 that the found directions may miss."""

ROUNDS = 4
ITERATIONS_PER_ROUND = 3
SPARE_COLUMNS = 20
"""q - r: the more, the steeper the spectrum between the last direction and the first that is left out. Twelve
directions take 32 columns, the most that cuSOLVER diagonalises in one batched call."""
FRESH_COLUMNS = 4
"""Columns of a warm start that are drawn anew: a direction that the last subspace was orthogonal to is found."""


@dataclass(frozen=True, slots=True, eq=False)
class TopDirections:
    """`basis` float64 [N, d_v, r], orthonormal columns by descending energy; `subspace` float64 [N, d_v, q], the next
    warm start, None where none is needed; `exact` bool [N], which matrices took an SVD."""

    basis: Tensor
    subspace: Tensor | None
    exact: Tensor


def block_width(rank: int, rows: int) -> int | None:
    """q for r directions of matrices with so many rows; None where an SVD costs no more than the iteration."""
    width = rank + SPARE_COLUMNS
    return width if 2 * width <= rows else None


def top_directions(states: Tensor, rank: int, generator: torch.Generator, start: Tensor | None = None) -> TopDirections:
    """The `rank` left singular directions of `states` [N, d_v, d_k] with the most energy.

    Args:
        states: of any floating dtype; all arithmetic is float64.
        rank: r, from 1 to min(d_v, d_k).
        generator: on the CPU; draws the first subspace, and a few columns of every further one.
        start: `subspace` of like states, such as those of the last boundary; None starts at random.

    Raises:
        ValueError: `rank` is out of range.
        RunError: a state is NaN or infinite.
    """
    rows = states.shape[-2]
    if not 1 <= rank <= min(states.shape[-2:]):
        raise ValueError(f"rank {rank} is outside 1 to {min(states.shape[-2:])}")
    matrices = states.double()
    scale = matrices.flatten(1).norm(dim=1)
    if not bool(scale.isfinite().all()):
        raise RunError("a recurrent state is NaN or infinite; check the weights, or run in float32.")
    width = block_width(rank, rows)
    if width is None:
        return TopDirections(_exact(matrices, rank), None, torch.ones(len(states), dtype=torch.bool))
    matrices = matrices / torch.where(scale > 0, scale, 1.0)[:, None, None]  # trace(G) = 1
    gram = matrices @ matrices.mT
    subspace, left = _converge(gram, _start(gram, width, generator, start), rank)
    basis = subspace[..., :rank].clone()
    exact = torch.zeros(len(states), dtype=torch.bool)
    if len(left):
        basis[left] = _exact(matrices[left], rank)
        exact[left.cpu()] = True
    return TopDirections(basis, subspace, exact)


def project(states: Tensor, basis: Tensor) -> Tensor:
    """U U^T S for states [N, d_v, d_k] and orthonormal U [N, d_v, r], in the dtype of the states."""
    matrices = states.double()
    return (basis @ (basis.mT @ matrices)).to(states.dtype)


def retained_energy(states: Tensor, basis: Tensor) -> Tensor:
    """||U^T S||_F^2 / ||S||_F^2, float64 [N]; 1 for a zero state."""
    matrices = states.double()
    total = matrices.square().sum((-2, -1))
    kept = (basis.mT @ matrices).square().sum((-2, -1))
    return torch.where(total > 0, kept / torch.where(total > 0, total, 1.0), 1.0)


def _exact(matrices: Tensor, rank: int) -> Tensor:
    return torch.linalg.svd(matrices, full_matrices=False).U[..., :rank].contiguous()


def _converge(gram: Tensor, subspace: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Ritz vectors [N, d_v, q] after at most ROUNDS rounds, and the indices of matrices for which they may not do."""
    left = torch.arange(len(gram), device=gram.device)
    own, squared = gram, gram @ gram
    for number in range(ROUNDS):
        improved, broken = _iterate(squared, subspace if number == 0 else subspace[left])
        ritz = _rayleigh_ritz(own, improved)
        if number == 0:
            subspace = ritz.vectors
        else:
            subspace[left] = ritz.vectors
        again = (_uncertain(own, ritz, rank) | broken | ~ritz.orthonormal).nonzero()[:, 0]
        left, own, squared = left[again], own[again], squared[again]
        if not len(left):
            break
    return subspace, left


def _start(gram: Tensor, width: int, generator: torch.Generator, start: Tensor | None) -> Tensor:
    """Columns drawn at random are the same for all matrices, which know nothing of them: so few are quickly drawn."""
    count, rows, _ = gram.shape
    fresh = torch.randn(rows, width if start is None else FRESH_COLUMNS, dtype=torch.float64, generator=generator)
    columns = (fresh / rows**0.5).to(gram.device).expand(count, -1, -1)
    return columns if start is None else torch.cat([start[..., : width - FRESH_COLUMNS], columns], dim=-1)


def _iterate(squared: Tensor, subspace: Tensor) -> tuple[Tensor, Tensor]:
    """An orthonormal subspace nearer to the top one, and bool [N] which of them lost a column on the way."""
    broken = torch.zeros(len(squared), dtype=torch.bool, device=squared.device)
    for number in range(ITERATIONS_PER_ROUND):
        subspace = squared @ subspace
        for _ in range(3 if number == ITERATIONS_PER_ROUND - 1 else 1):  # between, nearly orthonormal is enough
            subspace, failed = _cholesky_qr(subspace)
            broken |= failed
    return subspace, broken


def _cholesky_qr(columns: Tensor) -> tuple[Tensor, Tensor]:
    """Orthonormal columns of the same span, to the square of the condition of the scaled ones; and which failed."""
    lengths = columns.norm(dim=-2, keepdim=True)
    columns = columns / torch.where(lengths > 0, lengths, 1.0)
    inner = columns.mT @ columns
    # So small a shift leaves the second pass to restore orthogonality, and keeps dependent columns apart (Fukaya 2020).
    inner.diagonal(dim1=-2, dim2=-1).add_(columns.shape[-2] * columns.shape[-1] * torch.finfo(inner.dtype).eps)
    factor, info = torch.linalg.cholesky_ex(inner)
    failed = info != 0
    identity = torch.eye(factor.shape[-1], dtype=factor.dtype, device=factor.device)
    factor = torch.where(failed[:, None, None], identity, factor)
    return torch.linalg.solve_triangular(factor.mT, columns, upper=True, left=False), failed


@dataclass(frozen=True, slots=True, eq=False)
class _Ritz:
    """Ritz values [N, q], descending, vectors [N, d_v, q], the norm of each residual [N, q], and bool [N] whether the
    vectors are orthonormal."""

    values: Tensor
    vectors: Tensor
    residuals: Tensor
    orthonormal: Tensor


def _rayleigh_ritz(gram: Tensor, subspace: Tensor) -> _Ritz:
    image = gram @ subspace
    values, rotation = torch.linalg.eigh(subspace.mT @ image)
    values, rotation = values.flip(-1), rotation.flip(-1)
    vectors, image = subspace @ rotation, image @ rotation
    identity = torch.eye(vectors.shape[-1], dtype=vectors.dtype, device=vectors.device)
    return _Ritz(
        values=values,
        vectors=vectors,
        residuals=(image - vectors * values[:, None]).norm(dim=1),
        orthonormal=(vectors.mT @ vectors - identity).abs().amax((-2, -1)) < 1e-8,
    )


def _uncertain(gram: Tensor, ritz: _Ritz, rank: int) -> Tensor:
    """bool [N], for which matrices the first r Ritz vectors may miss too much of what any r directions hold.

    Beside them stand the Ritz vectors up to `middle`, whose residuals are mostly small too, and C, which is G outside
    all these. Its largest eigenvalue is at most trace(C^p)^(1/p): with p = 2 from traces alone, and where that is too
    coarse with p = 8 from C itself.
    """
    middle = (rank + ritz.values.shape[-1]) // 2
    # trace(C^2) is at most that of G less that of the Ritz values: the pinching inequality.
    squares = gram.square().sum((-2, -1)) - ritz.values[:, :middle].square().sum(-1)
    missing = _missing(ritz, rank, middle, squares.clamp(min=0).sqrt())
    doubtful = (missing > TOLERANCE).nonzero()[:, 0]
    if len(doubtful):
        part = _Ritz(*(each[doubtful] for each in (ritz.values, ritz.vectors, ritz.residuals, ritz.orthonormal)))
        outside = _largest_outside(gram[doubtful], part.vectors[..., :middle])
        missing[doubtful] = _missing(part, rank, middle, outside)
    return missing > TOLERANCE


def _missing(ritz: _Ritz, rank: int, middle: int, outside: Tensor) -> Tensor:
    """At most what r directions hold more than the first r Ritz vectors, [N]; trace(G) is 1.

    `outside` [N] bounds the eigenvalues of G outside the first `middle` Ritz vectors.
    """
    beside, least = ritz.values[:, rank], ritz.values[:, rank - 1]
    coupling = ritz.residuals[:, rank:middle].norm(dim=-1)
    # The largest eigenvalue of [[beside, coupling], [coupling, outside]] bounds all that the first r do not hold.
    highest = (beside + outside) / 2 + (((beside - outside) / 2).square() + coupling.square()).sqrt()
    hidden = ritz.residuals[:, :rank].norm(dim=-1)
    gap = torch.maximum(least - highest, hidden / rank**0.5).clamp(min=torch.finfo(hidden.dtype).tiny)
    return hidden.square() / gap + rank * (highest + gap - least).clamp(min=0)


def _largest_outside(gram: Tensor, vectors: Tensor) -> Tensor:
    """A bound [N] of the largest eigenvalue of (I - V V^T) G (I - V V^T), from the trace of its eighth power."""
    deflated = gram - vectors @ (vectors.mT @ gram)
    deflated = deflated - (deflated @ vectors) @ vectors.mT
    scale = deflated.flatten(1).norm(dim=1)
    power = deflated / torch.where(scale > 0, scale, 1.0)[:, None, None]
    for _ in range(2):
        power = power @ power
    return scale * power.square().sum((-2, -1)).pow(1 / 8)
