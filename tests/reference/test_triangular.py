from __future__ import annotations

import pytest
import torch

from compressor.reference.triangular import solve_unit_lower
from tests.reference.formulas import relative_error


def system(size: int, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(size)
    matrix = scale * torch.randn(2, 3, size, size, dtype=torch.float64, generator=generator)
    return matrix, torch.randn(2, 3, size, 5, dtype=torch.float64, generator=generator)


@pytest.mark.parametrize("size", [16, 32, 64])
def test_solves_the_system_and_reads_only_below_the_diagonal(size):
    matrix, right_sides = system(size, scale=0.3)
    solved = solve_unit_lower(matrix, right_sides)
    lower = torch.stack([torch.tril(m, -1) + torch.eye(size) for m in matrix.flatten(0, 1)]).view_as(matrix)
    assert relative_error(lower @ solved, right_sides) < 1e-12


def test_identical_keys_with_beta_two_do_not_lose_precision():
    """I + 2 * (ones below the diagonal): its inverse has entries +-2, but powers of that triangle reach 1e18."""
    matrix, right_sides = torch.full((64, 64), 2.0), torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
    exact = torch.linalg.solve(torch.tril(matrix.double(), -1) + torch.eye(64), right_sides.double())
    assert relative_error(solve_unit_lower(matrix, right_sides), exact) < 1e-5


def test_gradients():
    matrix, right_sides = system(32, scale=0.1)
    leaves = (matrix[0, :1].clone().requires_grad_(), right_sides[0, :1].clone().requires_grad_())
    assert torch.autograd.gradcheck(solve_unit_lower, leaves)
