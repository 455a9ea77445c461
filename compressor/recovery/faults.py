"""Steps that must not be taken or cannot be: no number, nothing learnt, no memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from compressor.errors import RunError
from compressor.naming import Naming
from compressor.out_of_memory import is_out_of_memory
from compressor.recovery.log import StepRecord

DEAD_STEPS = 3
"""Steps without any gradient after which a run stops; one step can be at a stationary point by accident."""

_OF_THE_LOSS = ("kl_weight", "cross_entropy_weight", "matching_weight", "temperature")


def refuse_unusable(record: StepRecord, kept: str, name: Naming) -> None:
    """Stop before the weights take in what is not finite; `kept` says which checkpoint remains.

    Messages call a setting `name(setting)`. Of the first step no learning rate is to blame, which nothing has used.

    Raises:
        RunError: the loss, one of its terms or the gradient's norm is NaN or infinite.
    """
    slower = f"start again with a {name('recovery.learning_rate')} below {record.learning_rate:.3g}"
    terms = f"KL {record.kl:.4g}, cross-entropy {record.cross_entropy:.4g}, matching {record.matching:.4g}"
    if not all(map(math.isfinite, (record.loss, record.kl, record.cross_entropy, record.matching))):
        remedy = _less_extreme(_OF_THE_LOSS, name) if record.step == 1 else slower
        raise RunError(
            f"step {record.step}: the loss is {record.loss:.4g} ({terms}) and must be finite; {kept}: check student "
            f"and teacher for NaN, or {remedy}."
        )
    if not math.isfinite(record.gradient_norm):
        less = _less_extreme(("alpha", *_OF_THE_LOSS), name)
        remedy = f"check the student for NaN, or {less}" if record.step == 1 else slower
        raise RunError(
            f"step {record.step}: the gradient's norm is {record.gradient_norm:.4g} at a loss of {record.loss:.4g} and "
            f"must be finite; {kept}: {remedy}."
        )


def _less_extreme(settings: Sequence[str], name: Naming) -> str:
    *first, last = (name(f"recovery.{setting}") for setting in settings)
    return f"choose less extreme values of {', '.join(first)} and {last}"


def refuse_dead(step: int, steps_without_gradient: int, tensors: int, steps: int) -> None:
    """Stop a run that has not learnt anything since it began.

    Raises:
        RunError: no trained tensor got a gradient in the first steps.
    """
    if steps_without_gradient >= min(DEAD_STEPS, steps):
        raise RunError(
            f"step {step}: the gradient of all {tensors} trained tensors was exactly 0 in each of the "
            f"{steps_without_gradient} steps so far and must be above; check that these tensors take part in the "
            "student's forward pass and that it differs from its teacher."
        )


def field_of(setting: str, value: object = None, /) -> str:
    """`micro_batch_size 2`, as `TrainingSettings` has it."""
    field = setting.rpartition(".")[2]
    return field if value is None or value is True else f"{field} {value}"


@contextmanager
def explained_memory(
    step: int, sequences: int, length: int, recomputed: bool, kept: str, name: Naming
) -> Iterator[None]:
    """Where a pass over `sequences` of `length` tokens at once does not fit on the GPU, say what needs less.

    Messages call a setting `name(setting)`.

    Raises:
        RunError: it does not fit.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        less = [name("recovery.micro_batch_size", sequences // 2)] if sequences > 1 else []
        less += [] if recomputed else [name("recovery.gradient_checkpointing", True)]
        remedy = f"give {' or '.join(less)}" if less else f"lower {name('recovery.sequence_length')}"
        raise RunError(
            f"step {step}: a pass over {sequences} sequences of {length} tokens at once does not fit on the GPU; "
            f"{kept}: {remedy}, and --resume where there is a checkpoint."
        ) from error
