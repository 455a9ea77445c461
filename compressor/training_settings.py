"""What a recipe's section asks of the training itself, in whole steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from compressor.errors import RequestError
from compressor.naming import Naming
from compressor.recipe import RecoverySection
from compressor.recovery.settings import TrainingSettings, TrainingSettingsError


def training_settings(section: RecoverySection, seed: int, name: Naming) -> TrainingSettings:
    """Of a section; `seed` is that of dropout. Messages call a setting `name(setting)`.

    Raises:
        RequestError: there are fewer sequences than one step takes; as `TrainingSettings`.
    """
    if section.sequences < section.batch_size:
        raise RequestError(
            f"{name('recovery.sequences')} is {section.sequences} and must be at least the {section.batch_size} of a "
            f"step; give more, or a {name('recovery.batch_size')} of at most {section.sequences}."
        )
    with _called(name):
        return _settings(section, seed)


def refuse_processes(settings: TrainingSettings, processes: int, name: Naming) -> None:
    """Refuse what so many processes, with a teacher, cannot train by.

    Raises:
        RequestError: a batch does not divide into equal parts for them.
    """
    with _called(name):
        settings.refuse_impossible(True, processes)


@contextmanager
def _called(name: Naming) -> Iterator[None]:
    try:
        yield
    except TrainingSettingsError as error:
        raise RequestError(error.told(lambda field: name(f"recovery.{field}"))) from None


def _settings(section: RecoverySection, seed: int) -> TrainingSettings:
    return TrainingSettings(
        steps=section.steps,
        batch_size=section.batch_size,
        micro_batch_size=section.micro_batch_size or section.batch_size,
        sequence_length=section.sequence_length,
        learning_rate=section.learning_rate,
        final_learning_rate=section.final_learning_rate,
        warmup_share=section.warmup_share,
        weight_decay=section.weight_decay,
        gradient_norm=section.gradient_norm,
        kl_weight=section.kl_weight,
        cross_entropy_weight=section.cross_entropy_weight,
        temperature=section.temperature,
        matching_weight=section.matching_weight,
        checkpoint_every=section.checkpoint_every,
        evaluate_every=section.evaluate_every,
        gradient_checkpointing=section.gradient_checkpointing,
        seed=seed,
        tracker=section.tracker,
    )


def refuse_idle_settings(section: RecoverySection, evaluate: bool, name: Naming) -> None:
    """Refuse what a training would not use, by whether anything is measured with it.

    Raises:
        RequestError: modules are chosen for adapters and there are none, or figures are asked for and nothing to
            measure them on.
    """
    if section.targets is not None and section.trainable == "mixers":
        raise RequestError(
            f"{name('recovery.targets', ','.join(section.targets))} chooses modules for LoRA, and "
            f"{name('recovery.trainable', 'mixers')} trains every parameter of the mixers; leave one of the two out."
        )
    if section.evaluate_every and not evaluate:
        raise RequestError(
            f"{name('recovery.evaluate_every', section.evaluate_every)} has nothing to measure with "
            f"{name('export.evaluate', False)}; leave one of the two out."
        )


def rounding_note(section: RecoverySection) -> str:
    """Says that the sequences are no multiple of a step's, where they are none."""
    trained = section.steps * section.batch_size
    return (
        f"{section.sequences:,} sequences are no whole number of steps of {section.batch_size:,}: the training takes "
        f"{section.steps:,} steps, which are {trained:,} sequences."
    )
