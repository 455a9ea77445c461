"""What a section of a recipe comes to as settings of a training, and what refusals call its fields."""

from __future__ import annotations

from pathlib import Path

import pytest

from compressor.errors import RequestError
from compressor.naming import key_of, names_of, option_of
from compressor.recipe import RecoverySection
from compressor.training_settings import refuse_processes, training_settings
from tests.test_validate import refusal, written


def test_a_step_is_taken_whole_unless_less_is_asked_for() -> None:
    for asked, expected in ((None, 16), (1, 1), (16, 16)):
        settings = training_settings(RecoverySection(micro_batch_size=asked), 0, key_of)
        assert (settings.micro_batch_size, settings.batch_size) == (expected, 16)


def test_more_at_once_than_a_step_has_is_refused() -> None:
    section = RecoverySection(batch_size=4, micro_batch_size=5)
    for name, sentence in (
        (option_of, "--micro-batch-size is 5 and must be at most the --batch-size of 4; lower it."),
        (key_of, "recovery.micro_batch_size is 5 and must be at most the recovery.batch_size of 4; lower it."),
    ):
        with pytest.raises(RequestError) as refused:
            training_settings(section, 0, name)
        assert str(refused.value) == sentence


def test_a_batch_that_does_not_divide_is_called_as_it_was_given() -> None:
    settings = training_settings(RecoverySection(batch_size=4), 0, option_of)
    refuse_processes(settings, 2, option_of)
    given = names_of({"recovery.batch_size"}, True, {}, ())
    for name, called in ((key_of, "recovery.batch_size"), (given, "--batch-size")):
        with pytest.raises(RequestError, match=f"^{called} is 4 and must be a multiple of the 3 processes, which"):
            refuse_processes(settings, 3, name)


def test_recover_refuses_settings_before_anything_is_opened(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, sentence in (
        (
            ["--micro-batch-size", "32"],
            "--micro-batch-size is 32 and must be at most the --batch-size of 16; lower it.",
        ),
        (
            ["--final-learning-rate", "1"],
            "--final-learning-rate is 1.0 and must be at most the --learning-rate of 0.00",
        ),
        (
            ["--sequences", "8"],
            "--sequences is 8 and must be at least the 16 of a step; give more, or a --batch-size of",
        ),
        (["--kl-weight", "0"], "--kl-weight, --cross-entropy-weight and --matching-weight are all 0, and one must be"),
    ):
        assert refusal(["recover", "absent", *words], capsys).startswith(sentence)
    recipe = str(written(tmp_path, "recovery: {batch_size: 4}"))
    said = refusal(["recover", "absent", "--recipe", recipe, "--micro-batch-size", "8"], capsys)
    assert said == "--micro-batch-size is 8 and must be at most the recovery.batch_size of 4; lower it.\n"
