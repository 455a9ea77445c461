"""The group tables against permutations composed point by point."""

from __future__ import annotations

import itertools

import pytest
import torch

from compressor.errors import RequestError
from compressor.evaluation.state_tracking.groups import alternating_group, permutation_group, symmetric_group


def apply_in_turn(first: tuple[int, ...], second: tuple[int, ...]) -> tuple[int, ...]:
    """Where each point ends that `first` moves, and then `second`."""
    return tuple(second[first[point]] for point in range(len(first)))


@pytest.mark.parametrize(("name", "order"), [("S3", 6), ("s4", 24), ("A5", 60), ("S5", 120)])
def test_products_are_first_one_then_the_other(name, order):
    group = permutation_group(name)
    elements = [tuple(row) for row in group.permutations.tolist()]
    assert group.order == order == len(set(elements))
    for a, b in itertools.product(range(order), repeat=2):
        assert elements[group.products[a, b]] == apply_in_turn(elements[a], elements[b])


def test_a_product_that_depends_on_the_order():
    group = symmetric_group(3)
    elements = [tuple(row) for row in group.permutations.tolist()]
    swap_01, swap_12 = elements.index((1, 0, 2)), elements.index((0, 2, 1))
    # Swap 0 and 1, then 1 and 2: point 0 goes to 1 and on to 2.
    assert elements[group.products[swap_01, swap_12]] == (2, 0, 1)
    assert elements[group.products[swap_12, swap_01]] == (1, 2, 0)


def test_alternating_group_holds_the_products_of_two_transpositions():
    group = symmetric_group(5)
    transpositions = group.moving_at_most(2)
    pairs = group.products[transpositions[1:]][:, transpositions[1:]]
    generated = set(pairs.flatten().tolist())
    while True:
        products = group.products[list(generated)][:, list(generated)].flatten().tolist()
        if set(products) <= generated:
            break
        generated |= set(products)
    even = {tuple(row) for row in group.permutations[sorted(generated)].tolist()}
    assert {tuple(row) for row in alternating_group(5).permutations.tolist()} == even


def test_elements_that_move_few_points():
    group = symmetric_group(5)
    assert len(group.moving_at_most(2)) == 1 + 10
    assert len(group.moving_at_most(3)) == 1 + 10 + 20
    assert group.moving_at_most(0).tolist() == [0]
    assert torch.equal(group.products[0], torch.arange(120))


@pytest.mark.parametrize("name", ["D4", "S", "S9", "", "Sx"])
def test_other_names_are_refused(name):
    with pytest.raises(RequestError, match="unknown group .*: give S or A and 2 to 6 points, such as S4 or A5."):
        permutation_group(name)
