"""Batches of small triangular systems.

`torch.linalg.solve_triangular` solves the matrices of a batch one after another and on a CPU hands
each to all threads: 64 x 64 is too little work for that, and it becomes tens of times slower when
another process holds a core. This one consists of batched products.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK_SIZE = 16


def solve_unit_lower(system: Tensor, right_sides: Tensor) -> Tensor:
    """The X of (I + L) X = right_sides, by forward substitution in blocks; differentiable.

    Args:
        system: [..., n, n], n a multiple of 16; L is its strictly lower triangle, the rest is not read.
        right_sides: [..., n, m].

    Computed in the dtype of the arguments.
    """
    blocks = system.shape[-1] // BLOCK_SIZE
    diagonal = system.unflatten(-1, (blocks, BLOCK_SIZE)).unflatten(-3, (blocks, BLOCK_SIZE))
    inverses = _inverse_of_unit_lower(diagonal.diagonal(dim1=-4, dim2=-2).movedim(-1, -3))  # [..., blocks, 16, 16]
    solved = inverses[..., 0, :, :] @ right_sides[..., :BLOCK_SIZE, :]
    for block in range(1, blocks):
        rows = slice(block * BLOCK_SIZE, (block + 1) * BLOCK_SIZE)
        remainder = right_sides[..., rows, :] - system[..., rows, : rows.start] @ solved
        solved = torch.cat([solved, inverses[..., block, :, :] @ remainder], dim=-2)
    return solved


def _inverse_of_unit_lower(lower: Tensor) -> Tensor:
    """Row by row; lower [..., n, n]."""
    size = lower.shape[-1]
    identity = torch.eye(size, dtype=lower.dtype, device=lower.device)
    inverse = identity[:1].expand(*lower.shape[:-2], 1, size)
    for row in range(1, size):
        entries = identity[row : row + 1] - lower[..., row : row + 1, :row] @ inverse
        inverse = torch.cat([inverse, entries], dim=-2)
    return inverse
