"""Greedy removals and exchanges against the quadratic form itself, evaluated for every subset."""

from __future__ import annotations

from itertools import combinations, product

import pytest
import torch
from torch import Tensor

from compressor.errors import RequestError
from compressor.selection.fisher import (
    MaskModel,
    kept_indices,
    mask_model,
    removed,
    shrunk,
    stage_widths,
    swapped,
)


def random_model(problems: int, heads: int, width: int, seed: int, kept: Tensor | None = None) -> MaskModel:
    """A Fisher matrix of a few correlated samples, and a gradient of its size."""
    generator = torch.Generator().manual_seed(seed)
    size = heads * width
    samples = torch.randn(problems, 2 * size, size, generator=generator, dtype=torch.float64)
    samples += 1.5 * torch.randn(problems, 2 * size, 1, generator=generator, dtype=torch.float64)
    gradient = torch.randn(problems, heads, width, generator=generator, dtype=torch.float64) * 0.5
    all_kept = torch.ones(problems, heads, width, dtype=torch.bool)
    return mask_model(gradient, samples.mT @ samples / (2 * size), all_kept if kept is None else kept)


def quadratic(model: MaskModel, kept: Tensor) -> Tensor:
    """[P], the change of the loss from the masks of `model` to `kept`."""
    delta = (kept.double() - model.kept.double()).flatten(1)
    linear = (model.gradient.flatten(1) * delta).sum(1)
    return linear + torch.einsum("pi,pij,pj->p", delta, model.fisher, delta) / 2


def gradient_at(model: MaskModel, kept: Tensor) -> Tensor:
    delta = (kept.double() - model.kept.double()).flatten(1)
    return model.gradient + (model.fisher @ delta[:, :, None]).view(model.gradient.shape)


@pytest.mark.parametrize(("heads", "keep"), [(1, 3), (1, 1), (2, 4), (3, 2)])
def test_the_predicted_change_and_gradient_are_those_of_the_quadratic(heads: int, keep: int) -> None:
    model = random_model(4, heads, 7, seed=0)
    after = removed(model, keep)
    assert after.kept.sum(-1).unique().tolist() == [keep]
    torch.testing.assert_close(after.change, quadratic(model, after.kept), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(after.gradient, gradient_at(model, after.kept), rtol=1e-12, atol=1e-12)
    assert after.steps.tolist() == [heads * (7 - keep)] * 4


def test_every_step_removes_what_costs_least() -> None:
    model = random_model(1, 1, 8, seed=1)
    kept = model.kept
    for keep in range(7, 0, -1):
        candidates = []
        for channel in kept[0, 0].nonzero()[:, 0].tolist():
            without = kept.clone()
            without[0, 0, channel] = False
            candidates.append((float(quadratic(model, without)), channel))
        expected = kept.clone()
        expected[0, 0, min(candidates)[1]] = False
        kept = removed(model, keep).kept
        assert torch.equal(kept, expected)


def test_channels_that_do_not_interact_are_removed_in_the_best_way() -> None:
    coupled = random_model(3, 1, 8, seed=2)
    model = mask_model(coupled.gradient, shrunk(coupled.fisher, 1.0), coupled.kept)
    after = removed(model, 5)
    best = torch.stack([quadratic(model, subset) for subset in every_subset(model, 5)]).min(dim=0).values
    torch.testing.assert_close(after.change, best)


def every_subset(model: MaskModel, keep: int) -> list[Tensor]:
    _, heads, width = model.kept.shape
    subsets = []
    for choice in product(combinations(range(width), keep), repeat=heads):
        kept = torch.zeros_like(model.kept)
        for head, channels in enumerate(choice):
            kept[:, head, list(channels)] = True
        subsets.append(kept)
    return subsets


@pytest.mark.parametrize(("heads", "width", "keep"), [(1, 8, 4), (2, 5, 3)])
def test_exchanges_end_where_none_pays_and_never_below_the_best_subset(heads: int, width: int, keep: int) -> None:
    kept = (torch.arange(width) < keep).expand(6, heads, -1)
    model = random_model(6, heads, width, seed=3, kept=kept)
    after = swapped(model, limit=100)
    torch.testing.assert_close(after.change, quadratic(model, after.kept), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(after.gradient, gradient_at(model, after.kept), rtol=1e-12, atol=1e-12)
    assert (after.change < 0).sum() >= 3
    values = {index: quadratic(model, subset) for index, subset in enumerate(every_subset(model, keep))}
    assert (torch.stack(list(values.values())).min(dim=0).values <= after.change + 1e-12).all()
    for subset in every_subset(model, keep):
        exchanges = (subset ^ after.kept).flatten(1).sum(-1) == 2
        assert (quadratic(model, subset) >= after.change - 1e-12)[exchanges].all()


def test_exchanges_stop_at_their_limit_and_count_as_steps() -> None:
    kept = torch.tensor([[[True, True, False, False]], [[True, True, False, False]]])
    gradient = torch.tensor([[[2.0, 2.0, -2.0, -4.0]], [[-2.0, -2.0, 2.0, 2.0]]], dtype=torch.float64)
    model = mask_model(gradient, torch.eye(4, dtype=torch.float64).expand(2, -1, -1), kept)
    assert swapped(model, limit=9).kept[:, 0].tolist() == [[False, False, True, True], [True, True, False, False]]
    assert swapped(model, limit=9).steps.tolist() == [2, 0]
    once = swapped(model, limit=1)
    assert once.kept[0, 0].tolist() == [False, True, False, True]
    assert once.steps.tolist() == [1, 0]
    assert once.change.tolist() == [-5.0, 0.0]
    assert swapped(model, limit=0).steps.tolist() == [0, 0]
    assert swapped(model, limit=9, least_gain=4.0).steps.tolist() == [1, 0]


def test_a_channel_removed_at_an_earlier_stage_comes_back_where_it_is_missed() -> None:
    kept = torch.tensor([[[False, True, True]]])
    gradient = torch.tensor([[[-3.0, 0.1, -1.0]]], dtype=torch.float64)  # less loss with more of channel 0
    after = swapped(mask_model(gradient, torch.eye(3, dtype=torch.float64)[None], kept), limit=5)
    assert after.kept.tolist() == [[[True, False, True]]]
    assert float(after.change) == pytest.approx(-3 + 0.5 - 0.1 + 0.5)


def test_heads_that_do_not_interact_are_as_good_alone() -> None:
    apart = random_model(6, 1, 6, seed=5)
    blocks = torch.zeros(3, 12, 12, dtype=torch.float64)
    blocks[:, :6, :6], blocks[:, 6:, 6:] = apart.fisher[0::2], apart.fisher[1::2]
    together = mask_model(apart.gradient.view(3, 2, 6), blocks, apart.kept.view(3, 2, 6))
    alone, joint = removed(apart, 3), removed(together, 3)
    assert torch.equal(joint.kept.view(6, 1, 6), alone.kept)
    torch.testing.assert_close(joint.change, alone.change.view(3, 2).sum(1))


def test_uniform_damping_changes_no_choice() -> None:
    model = random_model(5, 1, 9, seed=6)
    damped = mask_model(model.gradient, model.fisher + 4 * torch.eye(9, dtype=torch.float64), model.kept)
    assert torch.equal(removed(damped, 4).kept, removed(model, 4).kept)


def test_shrinking_leaves_the_diagonal() -> None:
    fisher = random_model(2, 1, 4, seed=0).fisher
    half = shrunk(fisher, 0.5)
    assert torch.equal(half.diagonal(dim1=1, dim2=2), fisher.diagonal(dim1=1, dim2=2))
    assert float(half[1, 0, 3]) == pytest.approx(float(fisher[1, 0, 3]) / 2)


@pytest.mark.parametrize(
    ("width", "keep", "stages", "expected"),
    [
        (128, 32, 2, (64, 32)),
        (128, 64, 4, (108, 91, 76, 64)),
        (16, 15, 8, (15,)),
        (16, 14, 4, (15, 14)),
        (8, 8, 3, ()),
        (8, 1, 1, (1,)),
    ],
)
def test_stages_remove_equal_shares(width: int, keep: int, stages: int, expected: tuple[int, ...]) -> None:
    assert stage_widths(width, keep, stages) == expected


def test_impossible_requests_are_refused() -> None:
    model = random_model(1, 1, 4, seed=0)
    with pytest.raises(RequestError, match="Cannot keep 0 of 8"):
        stage_widths(8, 0, 1)
    with pytest.raises(RequestError, match="0 stages were asked for and at least 1"):
        stage_widths(8, 4, 0)
    with pytest.raises(RequestError, match="Cannot keep 5 of 4"):
        removed(model, 5)
    with pytest.raises(ValueError, match=r"are not \[P, G, d\]"):
        mask_model(model.gradient, model.fisher.float(), model.kept)
    uneven = torch.tensor([[[True, True, False]], [[True, False, False]]])
    with pytest.raises(ValueError, match=r"heads keep \[1, 2\] channels"):
        mask_model(torch.zeros(2, 1, 3, dtype=torch.float64), torch.zeros(2, 3, 3, dtype=torch.float64), uneven)


def test_indices_of_masks_are_ascending_head_by_head() -> None:
    kept = torch.tensor([[[True, False, True], [False, True, True]]])
    assert kept_indices(kept).tolist() == [[0, 2], [1, 2]]
