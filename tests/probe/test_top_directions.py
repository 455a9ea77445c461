"""Subspace iteration against exact singular value decompositions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compressor.errors import RunError
from compressor.probe import top_directions as module
from compressor.probe.top_directions import TopDirections, project, retained_energy, top_directions
from tests.probe.test_spectra import random_matrix

ORDER = torch.arange(1, 129, dtype=torch.float64)
SPECTRA = {
    "flat": torch.ones(128, dtype=torch.float64),
    "step": torch.where(ORDER <= 12, 1.0, 0.5).double(),
    "step_behind": torch.where(ORDER <= 13, 1.0, 0.1).double(),
    "nearly_flat": ORDER**-0.5,
    "harmonic": 1 / ORDER,
    "quadratic": ORDER**-2,
    "geometric": 0.9**ORDER,
    "steep": 0.3**ORDER,
    "one_above_a_slow_tail": torch.where(ORDER <= 1, 1.0, 0.03 / ORDER**0.6).double(),
    "cliff": torch.where(ORDER <= 5, 10.0 ** (-ORDER), 1e-9 / ORDER).double(),
    "rank_12": (ORDER <= 12).double(),
    "rank_5": (ORDER <= 5).double(),
    "rank_1": (ORDER <= 1).double(),
    "zero": torch.zeros(128, dtype=torch.float64),
}


def states_of(values: Tensor, count: int = 3, rows: int = 128, columns: int = 128) -> Tensor:
    return torch.stack([random_matrix(values, rows, columns, seed) for seed in range(count)])


def best_energy(states: Tensor, rank: int) -> Tensor:
    energies = torch.linalg.svdvals(states.double()).square()
    total = energies.sum(-1)
    return torch.where(total > 0, energies[:, :rank].sum(-1) / total, 1.0)


def check(states: Tensor, rank: int, found: TopDirections) -> None:
    identity = torch.eye(rank, dtype=torch.float64).expand(len(states), rank, rank)
    torch.testing.assert_close(found.basis.mT @ found.basis, identity, rtol=0, atol=1e-7)
    best = best_energy(states, rank)
    kept = retained_energy(states, found.basis)
    assert float((best - kept).abs().max()) <= 1e-5


@pytest.mark.parametrize("rank", [1, 4, 12, 24, 48, 128])
@pytest.mark.parametrize("name", SPECTRA)
def test_as_much_energy_as_the_exact_directions(name: str, rank: int) -> None:
    states = states_of(SPECTRA[name])
    generator = torch.Generator().manual_seed(0)
    found = top_directions(states.float(), rank, generator)
    check(states, rank, found)
    moved = states + 0.03 * states_of(SPECTRA["harmonic"]) * states.flatten(1).norm(dim=1)[:, None, None]
    check(moved, rank, top_directions(moved, rank, generator, found.subspace))


@pytest.mark.parametrize("name", ["harmonic", "quadratic", "geometric", "one_above_a_slow_tail", "cliff", "rank_5"])
def test_iteration_converges_where_spectra_decay(name: str) -> None:
    found = top_directions(states_of(SPECTRA[name]), 12, torch.Generator().manual_seed(0))
    assert not bool(found.exact.any())


@pytest.mark.parametrize("name", ["flat", "zero"])
def test_what_does_not_converge_takes_an_svd(name: str) -> None:
    found = top_directions(states_of(SPECTRA[name]), 12, torch.Generator().manual_seed(0))
    assert bool(found.exact.all())


@pytest.mark.parametrize("tolerance", [0.1, 0.01, 1e-3])
def test_what_is_called_found_is_within_the_tolerance(tolerance: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a single step from a start that is nearly the same for all, some are sure to be close enough, some not."""
    monkeypatch.setattr(module, "TOLERANCE", tolerance)
    monkeypatch.setattr(module, "ITERATIONS_PER_ROUND", 1)
    monkeypatch.setattr(module, "ROUNDS", 1)
    powers = [2.0**-number for number in range(8)]
    states = torch.cat([states_of(ORDER**-power, 2) for power in powers] + [states_of(SPECTRA["step"], 2)])
    sure = 0
    for rank in (1, 4, 12):
        for start in (None, torch.linalg.qr(states[:1]).Q.expand(len(states), -1, -1)[..., : rank + 20]):
            found = top_directions(states, rank, torch.Generator().manual_seed(0), start)
            missed = best_energy(states, rank) - retained_energy(states, found.basis)
            assert float(missed[~found.exact].amax().clamp(min=0) if not found.exact.all() else 0) <= tolerance
            sure += int((~found.exact).sum())
    assert 0 < sure < 6 * len(states)


def test_one_slow_matrix_does_not_make_the_others_exact() -> None:
    states = torch.cat([states_of(SPECTRA["geometric"]), states_of(SPECTRA["flat"], 1)])
    found = top_directions(states, 12, torch.Generator().manual_seed(0))
    assert found.exact.tolist() == [False, False, False, True]
    check(states, 12, found)


def test_a_start_that_misses_the_largest_direction() -> None:
    """A warm subspace orthogonal to a direction that came up since: an invariant subspace, and the wrong one."""
    values = 0.8 ** torch.arange(64, dtype=torch.float64)
    left = torch.linalg.qr(torch.randn(64, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(1))).Q
    old = (left * values)[None]
    found = top_directions(old, 4, torch.Generator().manual_seed(0))
    assert found.subspace is not None
    new_values = values.clone()
    new_values[40] = 3.0
    new = (left * new_values)[None]
    start = left[:, : found.subspace.shape[-1]][None]
    check(new, 4, top_directions(new, 4, torch.Generator().manual_seed(0), start))


@pytest.mark.parametrize(("rows", "columns"), [(128, 32), (32, 128)])
def test_rectangular_states(rows: int, columns: int) -> None:
    states = states_of(0.7 ** torch.arange(32, dtype=torch.float64), rows=rows, columns=columns)
    for rank in (1, 6, 32):
        check(states, rank, top_directions(states, rank, torch.Generator().manual_seed(0)))


def test_projection_is_the_nearest_matrix_of_the_rank() -> None:
    states = states_of(SPECTRA["geometric"])
    found = top_directions(states, 12, torch.Generator().manual_seed(0))
    left, values, right = torch.linalg.svd(states)
    nearest = (left[..., :12] * values[:, None, :12]) @ right[:, :12]
    torch.testing.assert_close(project(states, found.basis), nearest, rtol=0, atol=1e-4)


@pytest.mark.parametrize("rank", [0, 17])
def test_rank_out_of_range(rank: int) -> None:
    with pytest.raises(ValueError, match="outside 1 to 16"):
        top_directions(torch.zeros(1, 16, 32), rank, torch.Generator())


def test_states_that_are_not_finite() -> None:
    states = torch.zeros(2, 32, 32)
    states[1, 3, 4] = torch.nan
    with pytest.raises(RunError, match="NaN or infinite; check the weights"):
        top_directions(states, 4, torch.Generator())
