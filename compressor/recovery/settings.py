"""Everything that a training run is told, checked when it is made."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from compressor.errors import RequestError
from compressor.section import SettingsError

_AT_LEAST = {
    "steps": 1,
    "batch_size": 1,
    "micro_batch_size": 1,
    "sequence_length": 2,
    "final_learning_rate": 0,
    "warmup_share": 0,
    "weight_decay": 0,
    "kl_weight": 0,
    "cross_entropy_weight": 0,
    "matching_weight": 0,
    "checkpoint_every": 1,
    "evaluate_every": 0,
    "seed": 0,
}
_ABOVE_ZERO = ("learning_rate", "gradient_norm", "temperature")
_AT_MOST = {"micro_batch_size": "batch_size", "final_learning_rate": "learning_rate"}
_WEIGHTS = ("kl_weight", "cross_entropy_weight", "matching_weight")

_NO_EFFECT_ON_THE_RESULT = frozenset(
    {"micro_batch_size", "checkpoint_every", "evaluate_every", "gradient_checkpointing", "tracker"}
)

Identity = dict[str, str | int | float]


class TrainingSettingsError(SettingsError, RequestError):
    """Settings that cannot be, which `told` can call by what the user knows them as."""


@dataclass(frozen=True, slots=True)
class TrainingSettings:
    """One training run.

    Attributes:
        steps: updates of the weights.
        batch_size: sequences of a step, over all processes.
        micro_batch_size: sequences of one forward pass of one process; less needs less memory and more time.
        sequence_length: tokens of a sequence.
        learning_rate: the peak, see `schedule.learning_rate`.
        final_learning_rate: of the last step.
        warmup_share: share of the steps in which the learning rate rises.
        weight_decay: AdamW's, of tensors with at least two dimensions.
        gradient_norm: longer gradients are scaled down to it.
        kl_weight, cross_entropy_weight: see `losses`.
        temperature: of the KL.
        matching_weight: of the match of the mixers' outputs, see `matching`; 0 computes none.
        checkpoint_every: steps between two checkpoints.
        evaluate_every: steps between two evaluations; 0 for none.
        gradient_checkpointing: whether the backward pass computes activations anew instead of keeping them.
        seed: of dropout.
        tracker: name of an experiment tracker of accelerate, None for none.

    Raises:
        TrainingSettingsError: a value is outside its limits, or all weights are 0.
    """

    steps: int
    batch_size: int
    micro_batch_size: int
    sequence_length: int
    learning_rate: float
    final_learning_rate: float
    warmup_share: float
    weight_decay: float
    gradient_norm: float
    kl_weight: float
    cross_entropy_weight: float
    temperature: float
    matching_weight: float
    checkpoint_every: int
    evaluate_every: int
    gradient_checkpointing: bool
    seed: int
    tracker: str | None

    def __post_init__(self) -> None:
        values = asdict(self)
        for name, limit in _AT_LEAST.items():
            if not limit <= values[name] < math.inf:
                raise TrainingSettingsError(
                    f"{{{name}}} is {values[name]} and must be at least {limit} and finite; change it.", name
                )
        for name in _ABOVE_ZERO:
            if not 0 < values[name] < math.inf:
                raise TrainingSettingsError(
                    f"{{{name}}} is {values[name]} and must be above 0 and finite; change it.", name
                )
        if self.warmup_share > 1:
            raise TrainingSettingsError(
                f"{{warmup_share}} is {self.warmup_share} and must be at most 1; change it.", "warmup_share"
            )
        for name, other in _AT_MOST.items():
            if values[name] > values[other]:
                raise TrainingSettingsError(
                    f"{{{name}}} is {values[name]} and must be at most the {{{other}}} of {values[other]}; lower it.",
                    name,
                    other,
                )
        if all(values[name] == 0 for name in _WEIGHTS):
            raise TrainingSettingsError(
                "{kl_weight}, {cross_entropy_weight} and {matching_weight} are all 0, and one must be above, or "
                "nothing is learnt; raise one.",
                *_WEIGHTS,
            )

    def refuse_impossible(self, has_teacher: bool, processes: int) -> None:
        """Refuse what the settings cannot know by themselves.

        Raises:
            TrainingSettingsError: a batch does not divide into equal parts for the processes, or without a teacher its
                terms have a weight, or are all there is.
        """
        if self.batch_size % processes:
            raise TrainingSettingsError(
                f"{{batch_size}} is {self.batch_size} and must be a multiple of the {processes} processes, which get "
                "the same number of sequences each; change one of the two.",
                "batch_size",
            )
        if not has_teacher and self.cross_entropy_weight == 0:
            raise TrainingSettingsError(
                "{cross_entropy_weight} is 0 and there is no teacher, so nothing is learnt; raise it, or give a "
                "teacher.",
                "cross_entropy_weight",
            )
        if not has_teacher and self.matching_weight > 0:
            raise TrainingSettingsError(
                f"{{matching_weight}} is {self.matching_weight} and there is no teacher to match; set it to 0 or give "
                "a teacher.",
                "matching_weight",
            )

    def identity(self) -> Identity:
        """The settings that decide what is learnt; the others may change when a run is resumed."""
        return {name: value for name, value in asdict(self).items() if name not in _NO_EFFECT_ON_THE_RESULT}
