"""Permutation groups as tables.

A permutation p of n points is the tuple (p[0], ..., p[n-1]); it takes point i to p[i]. Products go
left to right: the product a b is "apply a first, then b", so (a b)[i] = b[a[i]].
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from compressor.errors import RequestError


@dataclass(frozen=True)
class PermutationGroup:
    """permutations: int64 [order, points], in lexicographic order, so that element 0 is the identity.

    products: int64 [order, order]; products[a, b] is the element "a first, then b".
    """

    name: str
    permutations: Tensor
    products: Tensor

    @property
    def order(self) -> int:
        return self.permutations.shape[0]

    def moving_at_most(self, points: int) -> Tensor:
        """Elements that leave all but `points` points in place, int64 [count]; with 2, transpositions and identity."""
        moved = (self.permutations != self.permutations[0]).sum(1)
        return (moved <= points).nonzero()[:, 0]


def symmetric_group(points: int) -> PermutationGroup:
    """All points! permutations."""
    return _group(f"S{points}", list(itertools.permutations(range(points))))


def alternating_group(points: int) -> PermutationGroup:
    """The even permutations: those with an even number of pairs out of order."""
    return _group(f"A{points}", [p for p in itertools.permutations(range(points)) if _inversions(p) % 2 == 0])


def permutation_group(name: str) -> PermutationGroup:
    """S or A and the number of points, 2 to 6: "S4", "a5".

    Raises:
        RequestError: another name.
    """
    kind, points = name[:1].upper(), name[1:]
    if kind not in ("S", "A") or points not in ("2", "3", "4", "5", "6"):
        raise RequestError(f"unknown group {name!r}: give S or A and 2 to 6 points, such as S4 or A5.")
    return symmetric_group(int(points)) if kind == "S" else alternating_group(int(points))


def _inversions(permutation: tuple[int, ...]) -> int:
    return sum(a > b for a, b in itertools.combinations(permutation, 2))


def _group(name: str, elements: list[tuple[int, ...]]) -> PermutationGroup:
    permutations = torch.tensor(elements)
    points = permutations.shape[1]
    place_values = points ** torch.arange(points)
    element_of_code = torch.full((points**points,), -1)
    element_of_code[permutations @ place_values] = torch.arange(len(elements))
    # [b, a, i] = permutations[b, permutations[a, i]]
    composed = permutations[:, permutations]
    products = element_of_code[composed @ place_values].T.contiguous()
    return PermutationGroup(name, permutations, products)
