"""Scores of generated text."""

from __future__ import annotations

import re

from compressor.prompts.base import Prompt

_CONTROL_CHARACTERS = re.compile(r"[\x00-\x1f]")


def string_match(prompt: Prompt, output: str) -> float:
    """RULER's string match (Hsieh et al., arXiv:2404.06654), in [0, 1].

    The share of the answers that occur in `output`, or, for a prompt that matches in part, whether any
    does. Case does not count; control characters of the output count as line breaks, as in RULER.
    """
    text = _CONTROL_CHARACTERS.sub("\n", output).lower()
    found = [answer.lower() in text for answer in prompt.answers]
    return float(any(found)) if prompt.match == "part" else sum(found) / len(found)
