"""The list of state-tracking tasks."""

from __future__ import annotations

from difflib import get_close_matches

from compressor.errors import RequestError
from compressor.evaluation.state_tracking.base import StateTrackingTask
from compressor.evaluation.state_tracking.groups import permutation_group
from compressor.evaluation.state_tracking.modular_arithmetic import ModularArithmetic
from compressor.evaluation.state_tracking.parity import Parity
from compressor.evaluation.state_tracking.word_problems import GroupWordProblem

TASK_NAMES = (
    *("s3", "s4", "a5", "s5", "s5_transpositions"),
    *("parity", "modular_arithmetic", "modular_arithmetic_sums"),
)


def find_task(name: str) -> StateTrackingTask:
    """The task of a name.

    `s5_transpositions` reads the ten transpositions of S5 and the identity only; `modular_arithmetic_sums`
    has no multiplication.

    Raises:
        RequestError: an unknown name, with the nearest one and the list.
    """
    match name:
        case "s3" | "s4" | "a5" | "s5":
            return GroupWordProblem(name, permutation_group(name))
        case "s5_transpositions":
            group = permutation_group("s5")
            return GroupWordProblem(name, group, group.moving_at_most(2))
        case "parity":
            return Parity()
        case "modular_arithmetic":
            return ModularArithmetic(name)
        case "modular_arithmetic_sums":
            return ModularArithmetic(name, operators=("+", "-"))
    nearest = get_close_matches(name.lower(), TASK_NAMES, n=1)
    hint = f"did you mean {nearest[0]}? " if nearest else ""
    raise RequestError(f"Unknown state-tracking task {name!r}: {hint}Known tasks: {', '.join(TASK_NAMES)}.")
