"""Widths of each layer: the allocation against every other one, the descent against the selection it repeats."""

from __future__ import annotations

import itertools

import pytest
import torch

from benchmarks.layer_widths import allocate, descend, grid_widths, masks_at, measured_curves, stages_to
from compressor.errors import RequestError
from compressor.fisher.progressive import alone, progressive_fisher
from compressor.fisher.settings import FisherSettings
from compressor.fisher.statistics import MaskedModel, masked_divergence
from compressor.selection.fisher import stage_widths
from tests.families import tiny_checkpoint

SETTINGS = FisherSettings(stages=4, segment=32, linear_weight=0.0)


@pytest.fixture(scope="module")
def masked(tmp_path_factory: pytest.TempPathFactory) -> MaskedModel:
    tiny = tiny_checkpoint("gated_deltanet", tmp_path_factory.mktemp("model"))
    return MaskedModel(tiny.architecture, tiny.model, tiny.mixers)


@pytest.fixture(scope="module")
def ids() -> list[torch.Tensor]:
    return list(torch.randint(0, 64, (4, 70), generator=torch.Generator().manual_seed(5)).split(2))


@pytest.mark.parametrize("total", [12, 20, 27, 48])
def test_no_other_allocation_of_the_total_costs_less(total: int) -> None:
    widths = (16, 12, 8, 4)
    curves = torch.rand(3, 4, generator=torch.Generator().manual_seed(total), dtype=torch.float64).cumsum(1)
    found = allocate(curves, widths, total)
    assert sum(found) <= total

    def cost(chosen: tuple[int, ...]) -> float:
        return sum(float(curves[layer, widths.index(width)]) for layer, width in enumerate(chosen))

    fitting = [chosen for chosen in itertools.product(widths, repeat=3) if sum(chosen) <= total]
    assert cost(found) == pytest.approx(min(map(cost, fitting)), rel=1e-12)


def test_a_total_below_the_least_widths_is_refused() -> None:
    with pytest.raises(RequestError, match="3 layers of at least 4 channels do not fit into 11; give a smaller --step"):
        allocate(torch.zeros(3, 2), (8, 4), 11)


def test_grids_and_stages() -> None:
    assert grid_widths(128, 16) == (112, 96, 80, 64, 48, 32, 16)
    assert grid_widths(20, 8) == (16, 8)
    assert stages_to((32, 128, 8), 128, 2) == [(64, 128, 32), (32, 128, 8)]
    with pytest.raises(RequestError, match="--step 16 has no multiple below the width 16; give 1 to 15"):
        grid_widths(16, 16)


def test_a_uniform_descent_chooses_what_progressive_selection_does(
    masked: MaskedModel, ids: list[torch.Tensor]
) -> None:
    layers, _, width = masked.shape
    widths = [(each,) * layers for each in stage_widths(width, 8, 4)]
    descent = descend(masked, ids, widths, SETTINGS, seed=0)
    selection = progressive_fisher(
        masked.architecture, masked.model, masked.mixers, ids, 8, SETTINGS, torch.Generator().manual_seed(0),
        lambda passes: None, epsilon_scaled=True,
    )  # fmt: skip
    expected = torch.zeros(masked.shape, dtype=torch.bool).flatten(0, 1).scatter_(1, selection.indices, True)
    assert torch.equal(descent.kept[-1], expected.view(masked.shape))
    assert descent.passes == selection.passes
    predicted = torch.tensor([stage.predicted for stage in selection.stages], dtype=torch.float64)
    torch.testing.assert_close(descent.curves.sum(0)[1:], 4 * predicted.cumsum(0))


def test_layers_go_to_widths_of_their_own(masked: MaskedModel, ids: list[torch.Tensor]) -> None:
    descent = descend(masked, ids, [(12, 14), (9, 14), (6, 4)], SETTINGS, seed=0)
    for kept, widths in zip(descent.kept, descent.widths, strict=True):
        assert [kept[layer].sum(-1).unique().tolist() for layer in range(2)] == [[widths[0]], [widths[1]]]
    assert all(bool((after <= before).all()) for before, after in itertools.pairwise(descent.kept))
    assert bool((descent.curves.diff(dim=1) >= 0).all())
    assert float(descent.curves[1, 1]) == float(descent.curves[1, 2])
    mixed = masks_at(descent, (16, 14))
    assert bool(mixed[0].all())
    assert torch.equal(mixed[1], descent.kept[0][1])
    measured = measured_curves(masked, ids, descent)
    assert measured[:, 0].tolist() == [0, 0]
    assert float(measured[1, 1]) == pytest.approx(masked_divergence(masked, ids, mixed, 1.0, alone), rel=1e-9)
    with pytest.raises(RequestError, match="the width 10 is not on the way of the descent"):
        masks_at(descent, (10, 14))
