"""Diagnostics of any choice, against dense linear algebra of the explicit matrix."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from compressor.selection.diagnostics import diagnose
from tests.selection import oracle
from tests.selection.matrices import correlated, generator, gram


@pytest.mark.parametrize("seed", range(5))
def test_diagnostics_of_arbitrary_choices(seed: int) -> None:
    matrix = correlated(40, 10, seed)
    kept = sorted(torch.randperm(10, generator=generator(seed))[:4].tolist())
    diagnostics = diagnose(gram(matrix)[None], torch.tensor([kept]))
    sigma = np.linalg.svd(matrix.numpy()[:, kept], compute_uv=False)
    energy = (matrix[:, kept] ** 2).sum() / (matrix**2).sum()
    assert float(diagnostics.max_rho) == pytest.approx(oracle.exchange_factors(matrix.numpy(), kept).max())
    assert float(diagnostics.sigma_max) == pytest.approx(sigma[0])
    assert float(diagnostics.sigma_min) == pytest.approx(sigma[-1])
    assert float(diagnostics.condition_number) == pytest.approx(sigma[0] / sigma[-1])
    assert float(diagnostics.retained_energy) == pytest.approx(float(energy))
    assert int(diagnostics.numerical_rank) == 4
    assert not bool(diagnostics.rank_deficient)
    assert int(diagnostics.swaps) == 0


def test_dependent_columns_have_infinite_rho_unless_they_are_only_fill() -> None:
    matrix = correlated(40, 6)
    matrix[:, 1] = matrix[:, 0]
    indices = torch.tensor([[0, 1, 2]])
    every = diagnose(gram(matrix)[None], indices)
    assert float(every.max_rho) == torch.inf
    assert int(every.numerical_rank) == 2
    assert bool(every.rank_deficient)
    leading = diagnose(gram(matrix)[None], indices, leading=torch.tensor([[True, False, True]]))
    assert float(leading.max_rho) == pytest.approx(oracle.exchange_factors(matrix.numpy(), [0, 2]).max())
    assert int(leading.numerical_rank) == 2


@pytest.mark.parametrize(("distance", "rank"), [(1e-5, 2), (1e-7, 1)])
def test_columns_closer_than_the_rank_tolerance_are_dependent(distance: float, rank: int) -> None:
    matrix = torch.eye(3, dtype=torch.float64)
    matrix[:, 1] = matrix[:, 0] + distance * matrix[:, 1]
    diagnostics = diagnose(gram(matrix)[None], torch.tensor([[0, 1]]))
    assert int(diagnostics.numerical_rank) == rank
    assert bool(diagnostics.max_rho.isinf()) == (rank == 1)


def test_dependent_columns_said_to_be_independent_have_infinite_rho() -> None:
    """A selector cannot pass off a singular choice."""
    matrix = torch.zeros(3, 4, dtype=torch.float64)
    matrix[0, :2] = 1
    matrix[1, 2] = 1
    every = torch.ones(1, 2, dtype=torch.bool)
    assert float(diagnose(gram(matrix)[None], torch.tensor([[0, 1]]), leading=every).max_rho) == torch.inf


def test_nothing_to_exchange_is_rho_zero_even_when_singular() -> None:
    matrix = torch.ones(3, 4, dtype=torch.float64)
    diagnostics = diagnose(gram(matrix)[None], torch.arange(4)[None])
    assert float(diagnostics.max_rho) == 0
    assert int(diagnostics.numerical_rank) == 1


def test_swaps_are_passed_on() -> None:
    diagnostics = diagnose(gram(correlated(40, 6))[None], torch.tensor([[0, 1]]), swaps=torch.tensor([7]))
    assert diagnostics.swaps.tolist() == [7]
