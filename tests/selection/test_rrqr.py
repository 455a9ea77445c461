"""Strong RRQR on Gram matrices against dense QR of the explicit matrix."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from compressor.errors import RequestError
from compressor.selection.rrqr import strong_rrqr
from tests.selection import oracle
from tests.selection.matrices import correlated, decaying, gaussian, graded, gram, kahan


def duplicated(seed: int) -> Tensor:
    half = gaussian(40, 6, seed)
    return torch.cat([half, half], dim=1)


def with_zero_columns(seed: int) -> Tensor:
    matrix = correlated(40, 12, seed)
    matrix[:, [0, 5, 11]] = 0
    return matrix


def in_bfloat16(seed: int) -> Tensor:
    return correlated(40, 12, seed).bfloat16().double()


# name: (matrix, keep). In all of them `keep` columns have sigma_min/sigma_max >= 1e-6.
FULL_RANK = {
    "gaussian": (gaussian(40, 12), 6),
    "correlated": (correlated(40, 12), 6),
    "graded": (graded(40, 12), 6),
    "graded, keep d - 1": (graded(40, 12), 11),
    "duplicated": (duplicated(3), 5),
    "duplicated, keep rank": (duplicated(3), 6),
    "zero columns": (with_zero_columns(4), 6),
    "zero columns, keep rank": (with_zero_columns(4), 9),
    "bfloat16": (in_bfloat16(5), 6),
    "one token": (gaussian(2, 12, 6), 1),
    "one token, keep rank": (gaussian(2, 12, 6), 2),
    "keep 1": (correlated(40, 12, 7), 1),
    "keep d - 1": (correlated(40, 12, 8), 11),
    "decaying": (decaying(16, 5, 9), 8),
    "kahan, keep d - 1": (kahan(16, 0.9), 15),
    "kahan, keep half": (kahan(16, 0.9), 8),
    "width 1": (gaussian(5, 1), 1),
}
# These have many equally good choices, which rounding tells apart.
TIED = {"duplicated", "duplicated, keep rank"}


def select(matrix: Tensor, keep: int, f: float) -> tuple[list[int], float, int]:
    choice = strong_rrqr(gram(matrix)[None], keep, f)
    return choice.indices[0].tolist(), float(choice.diagnostics.max_rho), int(choice.diagnostics.swaps)


@pytest.mark.parametrize("f", [1.0, 1.5, 4.0])
@pytest.mark.parametrize("name", FULL_RANK)
def test_max_rho_is_the_largest_volume_ratio_and_at_most_f(name: str, f: float) -> None:
    matrix, keep = FULL_RANK[name]
    choice = strong_rrqr(gram(matrix)[None], keep, f)
    factors = oracle.exchange_factors(matrix.numpy(), choice.indices[0].tolist())
    largest = factors.max(initial=0)
    assert largest <= f * (1 + 1e-6)
    assert float(choice.diagnostics.max_rho) <= f * (1 + 1e-9)
    assert float(choice.diagnostics.max_rho) == pytest.approx(largest, rel=1e-5, abs=1e-5)
    assert not choice.diagnostics.rank_deficient.any()


@pytest.mark.parametrize("f", [1.0, 1.5])
@pytest.mark.parametrize("name", sorted(FULL_RANK.keys() - TIED))
def test_columns_and_exchanges_agree_with_dense_strong_qr(name: str, f: float) -> None:
    matrix, keep = FULL_RANK[name]
    kept, _, swaps = select(matrix, keep, f)
    assert (kept, swaps) == oracle.strong_columns(matrix.numpy(), keep, f)


@pytest.mark.parametrize("seed", range(12))
def test_columns_agree_with_dense_strong_qr_at_width_64(seed: int) -> None:
    matrix = decaying(64, (seed + 1) / 2, seed)
    kept, _, swaps = select(matrix, 32, 1.2)
    assert (kept, swaps) == oracle.strong_columns(matrix.numpy(), 32, 1.2)


@pytest.mark.parametrize("f", [1.0, 1.5, 4.0])
@pytest.mark.parametrize("name", [*FULL_RANK, "kahan 96"])
def test_bounds_of_gu_and_eisenstat(name: str, f: float) -> None:
    matrix, keep = (kahan(96, 0.95), 95) if name == "kahan 96" else FULL_RANK[name]
    kept, _, _ = select(matrix, keep, f)
    width = matrix.shape[1]
    r11, r12, r22 = oracle.blocks(matrix.numpy(), kept)
    sigma = np.linalg.svd(matrix.numpy(), compute_uv=False)
    growth = np.sqrt(1 + f**2 * keep * (width - keep))
    rounding = 1e-12 * sigma[0]
    assert (np.linalg.svd(r11, compute_uv=False) >= sigma[:keep] / growth - rounding).all()
    assert (np.abs(np.linalg.solve(r11, r12)) <= f * (1 + 1e-6)).all()
    small = np.linalg.svd(r22, compute_uv=False)
    assert (small <= sigma[keep : keep + len(small)] * growth + rounding).all()


KAHAN = [(16, 0.9, 15), (16, 0.9, 8), (60, 0.8, 59), (60, 0.9, 59), (96, 0.95, 95)]


@pytest.mark.parametrize("f", [1.0, 1.5])
@pytest.mark.parametrize(("width", "sine", "keep"), KAHAN)
def test_kahan_matrices_need_exchanges(width: int, sine: float, keep: int, f: float) -> None:
    matrix = kahan(width, sine)
    pivoted = oracle.pivoted_columns(matrix.numpy(), keep)
    kept, max_rho, swaps = select(matrix, keep, f)
    assert pivoted == list(range(keep))
    assert (kept, swaps) == oracle.strong_columns(matrix.numpy(), keep, f)
    assert swaps > 0
    assert max_rho <= f
    assert oracle.log_volume(matrix.numpy(), kept) > oracle.log_volume(matrix.numpy(), pivoted) + np.log(1.5)


@pytest.mark.parametrize("f", [1.0, 1.5])
def test_pivoting_that_ends_in_a_singular_choice_is_corrected_on_the_way(f: float) -> None:
    """Pivoting keeps the first 127 columns, whose Gram matrix is singular in float64; there are 127 that are not."""
    matrix = kahan(128, 0.9)
    choice = strong_rrqr(gram(matrix)[None], 127, f)
    assert choice.diagnostics.numerical_rank.tolist() == [127]
    assert oracle.dense_rho(matrix.numpy(), choice.indices[0].tolist()).max() <= f


def test_many_exchanges_agree_with_dense_strong_qr() -> None:
    matrix = decaying(256, 4, 0)
    kept, _, swaps = select(matrix, 128, 1.0)
    assert (kept, swaps) == oracle.strong_columns(matrix.numpy(), 128, 1.0)
    assert swaps > 20


@pytest.mark.parametrize("exponent", [6, 8, 10, 12, 14, 16, 20])
@pytest.mark.parametrize("f", [1.0, 1.5])
def test_spectra_that_cross_the_rank_tolerance_get_a_choice(exponent: float, f: float) -> None:
    """Around sigma_min/sigma_max = 1e-6 the Gram matrix decides little, and no head may fail or be NaN."""
    matrices = torch.stack([decaying(48, exponent, seed) for seed in range(8)])
    choice = strong_rrqr(gram(matrices), 40, f)
    rank = choice.diagnostics.numerical_rank
    sigma = torch.linalg.svdvals(matrices)
    assert (rank <= (sigma >= 1e-7 * sigma[:, :1]).sum(dim=1)).all()
    assert (rank >= (sigma >= 1e-5 * sigma[:, :1]).sum(dim=1).clamp_max(40)).all()
    assert (choice.diagnostics.rank_deficient == (rank < 40)).all()
    assert (choice.diagnostics.max_rho <= max(f, 1.02)).all()
    assert (choice.diagnostics.max_rho > 0).all()


@pytest.mark.parametrize("rank", [1, 3, 4])
def test_rank_below_keep_keeps_the_span_and_is_reported(rank: int) -> None:
    matrix = gaussian(40, rank, 1) @ gaussian(rank, 12, 2)
    choice = strong_rrqr(gram(matrix)[None], 6, 1.5)
    kept = choice.indices[0].tolist()
    assert int(choice.diagnostics.numerical_rank) == rank
    assert bool(choice.diagnostics.rank_deficient)
    assert 0 < float(choice.diagnostics.max_rho) <= 1.5
    fitted, *_ = np.linalg.lstsq(matrix.numpy()[:, kept], matrix.numpy(), rcond=1e-10)
    np.testing.assert_allclose(matrix.numpy()[:, kept] @ fitted, matrix.numpy(), atol=1e-9)
    assert len(set(kept)) == 6


def test_columns_in_the_span_are_equally_good_fill_and_the_lowest_are_taken() -> None:
    first = gaussian(40, 3, 1)
    matrix = torch.cat([first @ gaussian(3, 9, 2), 100 * first], dim=1)
    choice = strong_rrqr(gram(matrix)[None], 6, 1.5)
    assert choice.indices[0].tolist() == [0, 1, 2, 9, 10, 11]


@pytest.mark.parametrize(("keep", "expected"), [(1, [0]), (2, [0, 3]), (3, [0, 2, 3]), (4, [0, 1, 2, 3])])
def test_columns_that_lack_are_filled_by_residual_norm_then_index(keep: int, expected: list[int]) -> None:
    matrix = torch.diag(torch.tensor([1.0, 0.0, 1e-7, 4e-7, 0.0], dtype=torch.float64))
    choice = strong_rrqr(gram(matrix)[None], keep, 1.5)
    assert choice.indices[0].tolist() == expected
    assert int(choice.diagnostics.numerical_rank) == 1
    assert float(choice.diagnostics.max_rho) == pytest.approx(4e-7)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("f", [1.0, 1.5])
def test_gram_matrix_that_rounding_made_indefinite_gets_a_choice(seed: int, f: float) -> None:
    """Products in float32 of dependent columns leave eigenvalues of about -1e-7 of the largest."""
    matrix = (gaussian(60, 5, seed) @ gaussian(5, 24, seed + 1)).float()
    rounded = gram(matrix).double()
    assert torch.linalg.eigvalsh(rounded)[0] < 0
    choice = strong_rrqr(rounded[None], 12, f)
    assert float(choice.diagnostics.max_rho) <= f * (1 + 1e-3)
    assert set(oracle.pivoted_columns(matrix.double().numpy(), 1)) <= set(choice.indices[0].tolist())


def test_dead_head_gets_the_first_channels() -> None:
    choice = strong_rrqr(torch.zeros(2, 5, 5, dtype=torch.float64), 3, 1.5)
    diagnostics = choice.diagnostics
    assert choice.indices.tolist() == [[0, 1, 2]] * 2
    assert diagnostics.max_rho.tolist() == [0, 0]
    assert diagnostics.numerical_rank.tolist() == [0, 0]
    assert diagnostics.retained_energy.tolist() == [1, 1]
    assert diagnostics.sigma_max.tolist() == [0, 0]
    assert diagnostics.condition_number.tolist() == [torch.inf] * 2


@pytest.mark.parametrize("scale", [1e-280, 1e-20, 1e280])
def test_scale_of_the_activations_does_not_matter(scale: float) -> None:
    matrix = correlated(40, 12)
    choice = strong_rrqr(gram(matrix)[None] * scale, 6, 1.1)
    expected = strong_rrqr(gram(matrix)[None], 6, 1.1)
    assert torch.equal(choice.indices, expected.indices)
    torch.testing.assert_close(choice.diagnostics.condition_number, expected.diagnostics.condition_number)
    torch.testing.assert_close(choice.diagnostics.sigma_min / scale**0.5, expected.diagnostics.sigma_min)


@pytest.mark.parametrize("matrix", [correlated(40, 12), torch.zeros(4, 12, dtype=torch.float64)], ids=["full", "zero"])
def test_keeping_every_channel(matrix: Tensor) -> None:
    choice = strong_rrqr(gram(matrix)[None], 12, 1.0)
    assert choice.indices[0].tolist() == list(range(12))
    assert float(choice.diagnostics.max_rho) == 0
    assert float(choice.diagnostics.retained_energy) == 1


@pytest.mark.parametrize("keep", [0, -1, 13])
def test_keep_outside_the_width_is_refused(keep: int) -> None:
    with pytest.raises(RequestError) as caught:
        strong_rrqr(gram(correlated(40, 12))[None], keep, 1.5)
    assert str(caught.value) == f"Cannot keep {keep} of 12 key channels; choose a width from 1 to 12."


@pytest.mark.parametrize("f", [0.99, 0.0, -2.0, float("nan"), float("inf")])
def test_f_that_bounds_nothing_is_refused(f: float) -> None:
    with pytest.raises(RequestError) as caught:
        strong_rrqr(gram(correlated(40, 12))[None], 6, f)
    assert str(caught.value) == (
        f"f = {f} cannot bound the exchange factor rho; choose a finite f of at least 1, such as 1.5."
    )
