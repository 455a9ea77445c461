"""What to say of shares of retrieval prompts that are less than one sequence. Imports no torch."""

from __future__ import annotations

import math

from compressor.naming import Naming
from compressor.recipe import RecoverySection

_MOST_SEQUENCES = 10**9
"""Advice for more than a recipe takes is none."""


def too_small_share_note(share: float, samples: int, name: Naming) -> str:
    """Of a calibration, whose share above 0 is rounded to no sequence; settings are called as `name` does."""
    given, of = name("calibration.retrieval_share", share), name("calibration.samples", samples)
    # Python rounds a half to the even number, which is 0.
    advice = _advice(math.floor(0.5 / share) + 1 if share * _MOST_SEQUENCES > 1 else None, "samples", samples)
    return f"calibrated on text alone: {given} of {of} rounds to no retrieval prompt; {advice}."


def too_small_training_share_note(section: RecoverySection) -> str:
    """Of a training, whose share above 0 is less than one of all its sequences."""
    share, sequences = section.retrieval_share, section.steps * section.batch_size
    least = math.ceil(1 / share - 1e-9) if share * _MOST_SEQUENCES > 1 else None
    return (
        f"trained on text alone: a retrieval share of {share:g} of {sequences:,} sequences is less than one prompt; "
        f"{_advice(least, 'sequences', sequences)}."
    )


def _advice(least: int | None, what: str, present: int) -> str:
    """`least` of them, or the share that is one of the `present` ones, rounded upwards."""
    digits = 2 - math.floor(math.log10(1 / present))
    share = f"{math.ceil(10**digits / present) / 10**digits:g}"
    more = "" if least is None else f"{least:,} {what} or "
    return f"{more}a share of {share} would give one"
