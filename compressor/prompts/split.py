"""Which keys, values and words belong to evaluation and which to calibration."""

from __future__ import annotations

from collections.abc import Callable, Container

from compressor.errors import RunError
from compressor.prompts.base import Split

_MAX_DRAWS = 10_000


def in_split(item: str, split: Split) -> bool:
    """Whether `item` is one of the split's: the parity of the sum of its character codes decides.

    The rule halves numbers, identifiers and words alike and leaves the distribution of every single character as it is.
    """
    return (sum(map(ord, item)) % 2 == 0) == (split == "evaluation")


def draw_in_split(draw: Callable[[], str], split: Split) -> str:
    """The first of repeated draws that is the split's."""
    return _draw_until(draw, lambda item: in_split(item, split))


def draw_unused(draw: Callable[[], str], taken: Container[str]) -> str:
    """The first of repeated draws that is not `taken`."""
    return _draw_until(draw, lambda item: item not in taken)


def draw_distinct(draw: Callable[[], str], count: int) -> list[str]:
    """`count` different items, in the order in which they were drawn."""
    items: dict[str, None] = {}
    while len(items) < count:
        items[draw_unused(draw, items)] = None
    return list(items)


def _draw_until(draw: Callable[[], str], accept: Callable[[str], bool]) -> str:
    for _ in range(_MAX_DRAWS):
        item = draw()
        if accept(item):
            return item
    raise RunError(f"no new key or value in {_MAX_DRAWS} draws; ask for fewer keys, pairs or variables.")
