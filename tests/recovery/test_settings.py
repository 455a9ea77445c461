"""Settings of a training run that cannot be."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from compressor.errors import RequestError
from tests.recovery.runs import SETTINGS


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "steps is 0 and must be at least 1 and finite; change it."),
        ({"sequence_length": 1}, "sequence_length is 1 and must be at least 2 and finite; change it."),
        ({"kl_weight": -0.5}, "kl_weight is -0.5 and must be at least 0 and finite; change it."),
        ({"weight_decay": math.nan}, "weight_decay is nan and must be at least 0 and finite; change it."),
        ({"learning_rate": 0.0}, "learning_rate is 0.0 and must be above 0 and finite; change it."),
        ({"temperature": math.inf}, "temperature is inf and must be above 0 and finite; change it."),
        ({"warmup_share": 1.5}, "warmup_share is 1.5 and must be at most 1; change it."),
        (
            {"learning_rate": 0.1, "final_learning_rate": 0.2},
            "final_learning_rate is 0.2 and must be at most the learning_rate of 0.1; lower it.",
        ),
        (
            {"kl_weight": 0.0, "cross_entropy_weight": 0.0},
            "kl_weight, cross_entropy_weight and matching_weight are all 0, and one must be above, or nothing is "
            "learnt; raise one.",
        ),
    ],
)
def test_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as refused:
        replace(SETTINGS, **changes)
    assert str(refused.value) == message


def test_a_batch_must_divide_among_the_processes() -> None:
    SETTINGS.refuse_impossible(has_teacher=True, processes=2)
    with pytest.raises(RequestError, match="^batch_size is 4 and must be a multiple of the 3 processes, which get"):
        SETTINGS.refuse_impossible(has_teacher=True, processes=3)
