"""String match against values worked out by hand."""

from __future__ import annotations

import pytest

from compressor.evaluation.scoring import string_match
from tests.evaluation.hand_made_prompts import completion_prompt


@pytest.mark.parametrize(
    ("output", "all_of_them", "any_of_them"),
    [
        (" Kettle, 271 and zinc.", 1, 1),
        ("KETTLE kettle", 1 / 3, 1),
        ("zinc\t271", 2 / 3, 1),
        ("27 1", 0, 0),
        ("", 0, 0),
        ("unzinced 12719 kettles", 1, 1),
    ],
)
def test_string_match(output: str, all_of_them: float, any_of_them: float) -> None:
    answers = ("kettle", "271", "Zinc")
    completion = " kettle 271 Zinc"
    assert string_match(completion_prompt("", completion, answers, "all"), output) == pytest.approx(all_of_them)
    assert string_match(completion_prompt("", completion, answers, "part"), output) == any_of_them


def test_a_control_character_is_no_part_of_an_answer() -> None:
    prompt = completion_prompt("", " two words", ("two words",))
    assert string_match(prompt, "two words") == 1
    assert string_match(prompt, "two\twords") == string_match(prompt, "two\x00words") == 0
