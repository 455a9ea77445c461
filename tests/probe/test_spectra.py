"""Figures of spectra against closed forms."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from compressor.probe.spectra import FIGURES, RANK_FACTOR, spectrum, spectrum_figures

EPS = float(torch.finfo(torch.float32).eps)


def figures(values: torch.Tensor, eps: float = EPS) -> dict[str, float]:
    return dict(zip(FIGURES, spectrum_figures(values, eps).tolist(), strict=True))


def random_matrix(values: torch.Tensor, rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """rows x columns float64 with these singular values."""
    generator = torch.Generator().manual_seed(seed)
    left = torch.linalg.qr(torch.randn(rows, len(values), dtype=torch.float64, generator=generator)).Q
    right = torch.linalg.qr(torch.randn(columns, len(values), dtype=torch.float64, generator=generator)).Q
    return left * values @ right.mT


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30])
@pytest.mark.parametrize("width", [1, 16, 128])
def test_flat(width: int, scale: float) -> None:
    found = figures(torch.full((width,), scale, dtype=torch.float64))
    assert found == pytest.approx(
        {
            "numerical_rank": width,
            "entropy_effective_rank": width,
            "stable_rank": width,
            "utilisation": 1,
            "condition_number": 1,
        },
        rel=1e-12,
    )


def test_rank_one() -> None:
    found = figures(torch.tensor([3.0] + [0.0] * 15, dtype=torch.float64))
    assert found == {
        "numerical_rank": 1,
        "entropy_effective_rank": 1,
        "stable_rank": 1,
        "utilisation": 1 / 16,
        "condition_number": math.inf,
    }


@pytest.mark.parametrize("ratio", [0.5, 0.9, 0.99])
def test_geometric_decay(ratio: float) -> None:
    """s_i = ratio^i, i < n: sums of geometric series, and the entropy of a truncated geometric distribution."""
    n = 128
    found = figures(ratio ** torch.arange(n, dtype=torch.float64))
    total = (1 - ratio**n) / (1 - ratio)
    mean_place = ratio / (1 - ratio) - n * ratio**n / (1 - ratio**n)
    assert found["entropy_effective_rank"] == pytest.approx(total * ratio**-mean_place, rel=1e-10)
    stable = (1 - ratio ** (2 * n)) / (1 - ratio**2)
    assert found["stable_rank"] == pytest.approx(stable, rel=1e-12)
    assert found["utilisation"] == pytest.approx(stable / n, rel=1e-12)
    assert found["condition_number"] == pytest.approx(ratio ** (1 - n), rel=1e-10)
    assert found["numerical_rank"] == min(n, math.ceil(math.log(RANK_FACTOR * EPS) / math.log(ratio)))


def test_decay_to_a_floor_by_hand() -> None:
    """s = (4, 2, 1, 1): p = (1/2, 1/4, 1/8, 1/8), entropy 1.75 bits."""
    found = figures(torch.tensor([4.0, 2.0, 1.0, 1.0]))
    assert found["entropy_effective_rank"] == pytest.approx(2**1.75)
    assert found["stable_rank"] == pytest.approx(22 / 16)
    assert found["condition_number"] == 4


def test_zero_state_has_defined_figures() -> None:
    measured = spectrum(torch.zeros(2, 3, 16, 8))
    assert measured.figures.shape == (2, 3, len(FIGURES))
    assert measured.figures[1, 2].tolist() == [0, 0, 0, 0, math.inf]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_threshold_is_that_of_the_dtype_of_the_state(dtype: torch.dtype) -> None:
    eps = float(torch.finfo(dtype).eps)
    values = torch.tensor([1.0, 130 * eps, 126 * eps, 0.0], dtype=torch.float64)
    diagonal = torch.diag(values).to(dtype)
    assert spectrum(diagonal).figures[FIGURES.index("numerical_rank")] == 2


@pytest.mark.parametrize(("rows", "columns"), [(32, 16), (16, 32)])
def test_either_side_may_be_wider(rows: int, columns: int) -> None:
    values = 0.8 ** torch.arange(16, dtype=torch.float64)
    matrix = random_matrix(values, rows, columns)
    measured = spectrum(matrix)
    np.testing.assert_allclose(measured.singular_values, np.linalg.svd(matrix.numpy(), compute_uv=False), atol=1e-14)
    torch.testing.assert_close(measured.figures, spectrum_figures(values, float(torch.finfo(torch.float64).eps)))
    norms = float(matrix.square().sum()) / np.linalg.norm(matrix.numpy(), 2) ** 2
    assert float(measured.figures[2]) == pytest.approx(norms)


def test_condition_number_is_above_its_bound() -> None:
    values = torch.rand(200, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).sort(-1, True).values
    found = spectrum_figures(values, EPS)
    bound = found[:, FIGURES.index("utilisation")].rsqrt()
    assert bool((found[:, FIGURES.index("condition_number")] >= bound).all())
    flat = spectrum_figures(torch.ones(16), EPS)
    assert float(flat[4]) == pytest.approx(float(flat[3].rsqrt()))
