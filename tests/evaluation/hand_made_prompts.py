"""Prompts written by hand, in the forms that the trained models of the tests know."""

from __future__ import annotations

from compressor.prompts.base import Match, Prompt

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"


def completion_prompt(text: str, completion: str, answers: tuple[str, ...], match: Match = "all") -> Prompt:
    return Prompt("by_hand", text, "", answers, match, completion)


def needle_prompt(key: str, value: str, before: int, after: int) -> Prompt:
    """RULER's single needle among repeated noise."""
    needle = f"One of the special magic numbers for {key} is: {value}.\n"
    return Prompt(
        "niah_single_1",
        "A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you about "
        f"the number afterwards.\n{NOISE * before}{needle}{NOISE * after}\n"
        f"What is the special magic number for {key} mentioned in the provided text?",
        f" The special magic number for {key} mentioned in the provided text is",
        (value,),
        "all",
        f" {value}",
    )


NEEDLES = [
    needle_prompt("calm-river", "4815162", 2, 3),
    needle_prompt("witty-camera", "9078123", 4, 1),
    needle_prompt("proud-island", "2718281", 1, 5),
    needle_prompt("silly-rocket", "3141592", 3, 2),
    needle_prompt("eager-market", "1618033", 0, 6),
]
