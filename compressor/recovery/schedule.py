"""The learning rate of every step: linear warm-up, then a cosine.

Source of the cosine: Loshchilov, Hutter, "SGDR" (arXiv:1608.03983), equation 5, without restarts.
"""

from __future__ import annotations

import math

ROUNDING = 1e-9
"""Steps by which a product of a share and a count may exceed the whole number that is meant: 0.07 * 100 does."""


def learning_rate(step: int, steps: int, warmup_share: float, peak: float, final: float) -> float:
    """Learning rate of step `step`, counted from 0, of `steps`.

    The W = ceil(warmup_share * steps) warm-up steps rise by peak / W each, from peak / W to `peak`. Half a period of a
    cosine leads from there to `final` at the last step. Without warm-up the first step has `peak`; a run without a
    step after that never falls. Steps after the last keep its rate: a scheduler asks for one.

    With peak 1 and `final` as a share of the peak, it is the factor that torch.optim.lr_scheduler.LambdaLR takes.

    Raises:
        ValueError: `step` is negative, `steps` is not positive or `warmup_share` is outside 0 to 1.
    """
    if step < 0 or steps < 1 or not 0 <= warmup_share <= 1:
        raise ValueError(
            f"step {step} of {steps} with a warm-up share of {warmup_share:g}: steps count from 0, "
            "a run has at least 1, and the share is 0 to 1."
        )
    step = min(step, steps - 1)
    peak_step = max(math.ceil(warmup_share * steps - ROUNDING), 1) - 1
    if step <= peak_step:
        return peak * (step + 1) / (peak_step + 1)
    progress = (step - peak_step) / (steps - 1 - peak_step)
    return final + (peak - final) * (1 + math.cos(math.pi * progress)) / 2
