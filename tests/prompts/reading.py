"""Readers that take prompts of RULER's forms apart, with regular expressions of their own."""

from __future__ import annotations

import re
from dataclasses import dataclass

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEEDLE = re.compile(r"One of the special magic (numbers|words|uuids) for (\S+(?: \S+)?) is: ([^.\n]+)\.")
_NEEDLE_PROMPT = re.compile(
    r"(?:A special magic \w+ is|Some special magic \w+ are) hidden within the following text\. "
    r"Make sure to memorize it\. I will quiz you about the \w+ afterwards\.\n(.*)\n"
    r"What (?:is the|are all the) special magic \w+ for (.*) mentioned in the provided text\?",
    re.DOTALL,
)
_TRACKING = re.compile(
    r"Memorize and track the chain\(s\) of variable assignment hidden in the following text\.\n\n(.*?)\n"
    r"Question: Find all variables that are assigned the value (\d+) in the text above\.",
    re.DOTALL,
)
_STATEMENT = re.compile(r"VAR [A-Z]+ = (?:\d+|VAR [A-Z]+ )|" + re.escape(NOISE) + "\n")


@dataclass(frozen=True)
class NeedlePrompt:
    context: str
    queries: list[str]
    needles: list[tuple[str, str, str]]
    """(kind, key, value), in the order of the context."""


def read_needles(text: str) -> NeedlePrompt:
    match = _NEEDLE_PROMPT.fullmatch(text)
    assert match is not None, text
    context, query = match.groups()
    queries = query.replace(", and ", ", ").split(", ")
    return NeedlePrompt(context, queries, NEEDLE.findall(context))


@dataclass(frozen=True)
class TrackingPrompt:
    statements: list[tuple[int, str]]
    """Line and text of every assignment."""
    noise_lines: int
    value: str


def read_tracking(text: str) -> list[TrackingPrompt]:
    """The solved example, where there is one, and the question."""
    prompts = []
    for context, value in _TRACKING.findall(text):
        lines = _STATEMENT.findall(context)
        assert " ".join(lines) == context
        statements = [(index, line) for index, line in enumerate(lines) if line.startswith("VAR")]
        prompts.append(TrackingPrompt(statements, len(lines) - len(statements), value))
    return prompts


def variables_with_value(prompt: TrackingPrompt) -> list[str]:
    """In the order of their assignments, by running them."""
    values: dict[str, str] = {}
    for _, statement in prompt.statements:
        _, target, _, *source = statement.split()
        values[target] = values[source[1]] if source[0] == "VAR" else source[0]
    return [variable for variable, value in values.items() if value == prompt.value]


def read_list(text: str) -> list[str]:
    """Entries of a numbered list, which may hold spaces."""
    context = re.search(r"most often\.\n(.*)\nQuestion", text, re.DOTALL)
    assert context is not None
    return [entry.strip() for entry in re.split(r"(?:^| )\d+\. ", context.group(1))[1:]]


def read_coded(text: str) -> list[str]:
    context = re.search(r"Find the three most frequently appeared coded words\. (.*)\nQuestion", text)
    assert context is not None
    return context.group(1).split(" ")
