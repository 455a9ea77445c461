"""The mathematics of benchmarks.pca against singular values, least squares and every subset of channels."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from benchmarks.principal_directions import (
    nearest_filters,
    principal_directions,
    retained_squares,
    rotate,
    shared_filters,
)

HEADS, WIDTH, TAPS = 3, 6, 4


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def activations() -> Tensor:
    """[H, n, d], of channels that are correlated."""
    return random(HEADS, 40, WIDTH) @ random(HEADS, WIDTH, WIDTH, seed=1)


def orthogonal() -> Tensor:
    return torch.linalg.qr(random(HEADS, WIDTH, WIDTH, seed=2)).Q


def test_directions_are_the_right_singular_vectors() -> None:
    matrix = activations()
    directions = principal_directions(matrix.mT @ matrix)
    _, values, expected = torch.linalg.svd(matrix, full_matrices=False)
    assert torch.allclose((directions * expected).sum(-1).abs(), torch.ones(HEADS, WIDTH).double(), atol=1e-10)
    assert torch.allclose(directions @ directions.mT, torch.eye(WIDTH).double().expand(HEADS, -1, -1), atol=1e-12)
    assert bool((directions.amax(-1) == directions.abs().amax(-1)).all())
    for keep in (1, 3, WIDTH):
        share = values[:, :keep].square().sum(-1) / values.square().sum(-1)
        assert torch.allclose(retained_squares(matrix.mT @ matrix, directions, keep), share, atol=1e-10)


def test_directions_hold_more_than_any_channels() -> None:
    matrix = activations()
    gram = matrix.mT @ matrix
    squares = gram.diagonal(dim1=-2, dim2=-1)
    best = torch.stack([squares[:, list(kept)].sum(-1) for kept in itertools.combinations(range(WIDTH), 3)]).amax(0)
    assert bool((retained_squares(gram, principal_directions(gram), 3) > best / squares.sum(-1)).all())


def test_uncorrelated_channels_are_their_own_directions() -> None:
    directions = principal_directions(torch.diag(torch.tensor([2.0, 5.0, 3.0])).double()[None])
    assert directions.tolist() == [[[0, 1, 0], [0, 0, 1], [1, 0, 0]]]


def test_rotation_is_a_product_with_each_head() -> None:
    weights, directions = random(HEADS, WIDTH, 2, 5, seed=3), orthogonal()
    rotated = rotate(weights, directions)
    for head in range(HEADS):
        assert torch.allclose(rotated[head, :, 1], directions[head] @ weights[head, :, 1], atol=1e-12)


def test_nearest_filters_are_least_squares() -> None:
    filters, directions = random(HEADS, WIDTH, TAPS, seed=3), orthogonal()
    nearest = nearest_filters(filters, directions)
    for head, row, tap in itertools.product(range(HEADS), range(WIDTH), range(TAPS)):
        direction = directions[head, row]
        wanted = direction * filters[head, :, tap]
        solution = torch.linalg.lstsq(direction[:, None], wanted[:, None]).solution
        assert torch.allclose(nearest[head, row, tap], solution[0, 0], atol=1e-12)


def test_nearest_filters_are_the_diagonal_of_the_rotated_operator() -> None:
    filters, directions = random(HEADS, WIDTH, TAPS, seed=3), orthogonal()
    operators = torch.einsum("hij,hjt,hkj->htik", directions, filters, directions)
    diagonal = operators.diagonal(dim1=-2, dim2=-1).mT
    assert torch.allclose(nearest_filters(filters, directions), diagonal, atol=1e-12)


def test_shared_filters_commute_with_every_rotation() -> None:
    filters, directions = random(HEADS, WIDTH, TAPS, seed=3), orthogonal()
    shared = shared_filters(filters, directions)
    assert torch.allclose(shared, filters.sum(1, keepdim=True).repeat(1, WIDTH, 1) / WIDTH, atol=1e-12)
    operators = torch.einsum("hij,hjt,hkj->htik", directions, shared, directions)
    assert torch.allclose(operators, torch.diag_embed(shared.mT), atol=1e-12)
    assert torch.allclose(nearest_filters(shared, directions), shared, atol=1e-12)
