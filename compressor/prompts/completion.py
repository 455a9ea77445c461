"""Completion of documents: the answer stood in the text, and the text breaks off right before it is due again.

The form of the recall tasks of Arora et al. 2024 (Based, arXiv 2402.18668; `squad_completion`, `swde` and `fda` of
lm-eval): greedy output of at most 48 tokens, right if it contains the answer, whatever the case.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import Any

from compressor.errors import RequestError
from compressor.file_kinds import refuse_no_file
from compressor.json_text import parse_json
from compressor.prompts.base import CountTokens, Prompt, Split, Task
from compressor.prompts.sizing import Draft, Search, SizedTask, answered, begin_searches, too_short

NAME = "completion"
TOKENS_TO_GENERATE = 48
"""The limit of lm-eval's tasks."""

# A word with the space before it, whatever its length: source code indents by many.
_WORD = re.compile(r"\s*\S+")


@dataclass(frozen=True)
class Passage:
    """A held-out document and what is asked about it.

    A `cloze` goes on from the document to the place where `value` occurs again; a `lookup` repeats a
    line of the document up to `value`, which stands nowhere else in it.
    """

    domain: str
    kind: str
    context: str
    question: str
    value: str


def bundled_passages() -> tuple[Passage, ...]:
    """263 passages of up to 500 characters of prose, documentation and source code; `benchmarks/completion_prompts.py`
    made them. Sources and licences are in `completion.NOTICE.md`.
    """
    text = files("compressor.prompts").joinpath("completion.jsonl").read_text(encoding="utf-8")
    return tuple(Passage(**json.loads(line)) for line in text.splitlines())


@dataclass(frozen=True)
class CompletionTask(SizedTask):
    """Evaluation only. Text of other passages that lack the answer stands before the document and fills the length:
    longer prompts put more into the state, and leave the answer as far from the question as it was.
    """

    name: str = NAME
    tokens_to_generate: int = TOKENS_TO_GENERATE
    passages: tuple[Passage, ...] = field(default_factory=bundled_passages, repr=False)

    def draft(self, length: int, count_tokens: CountTokens, generator: random.Random, split: Split) -> Draft:
        """See `SizedTask`; one word of other passages is a unit.

        Raises:
            RequestError: `split` is calibration.
        """
        _require_evaluation(split)
        return self._draft(generator.choice(self.passages), generator)

    def sample(
        self, count: int, length: int, count_tokens: CountTokens, generator: random.Random, split: Split
    ) -> tuple[Prompt, ...]:
        """`count` prompts as `generate` makes them, no passage again before all that fit were asked.

        Raises:
            RequestError: `split` is calibration, or no passage fits the length.
        """
        _require_evaluation(split)
        searches: list[Search] = []
        while len(searches) < count:
            before = len(searches)
            passages = generator.sample(self.passages, len(self.passages))
            while passages and len(searches) < count:
                drafts = [
                    self._draft(passages.pop(0), generator) for _ in range(min(count - len(searches), len(passages)))
                ]
                searches += begin_searches(drafts, count_tokens, length - self.tokens_to_generate)
            if len(searches) == before:
                raise too_short(self, length, self.minimum_length(count_tokens))
        return tuple(answered(searches, count_tokens))

    def _draft(self, passage: Passage, generator: random.Random) -> Draft:
        value = passage.value.lower()
        others = [other.context for other in self.passages if value not in other.context.lower()]
        generator.shuffle(others)
        remaining = _WORD.finditer("\n\n".join(others))
        words: list[str] = []

        def build(units: int) -> Prompt:
            # Most prompts need a small part of the text.
            words.extend(match.group() for match in islice(remaining, max(0, units - len(words))))
            repeats, rest = divmod(units, len(words)) if units > len(words) else (0, units)
            return _prompt(passage, "".join(words * repeats + words[:rest]))

        return Draft(build, minimum=0, probe=64)


@dataclass(frozen=True)
class CompletionFileTask(Task):
    """Prompts of a file as they are, in its order; those that are longer than the length are left out."""

    prompts: tuple[Prompt, ...] = field(repr=False)
    name: str = NAME
    tokens_to_generate: int = TOKENS_TO_GENERATE

    def minimum_length(self, count_tokens: CountTokens) -> int:
        return self.tokens_to_generate + min(count_tokens(prompt.text) for prompt in self.prompts)

    def generate(self, length: int, count_tokens: CountTokens, generator: random.Random, split: Split) -> Prompt:
        return generator.choice(self.sample(len(self.prompts), length, count_tokens, generator, split))

    def sample(
        self, count: int, length: int, count_tokens: CountTokens, generator: random.Random, split: Split
    ) -> tuple[Prompt, ...]:
        """At most `count` prompts, each once.

        Raises:
            RequestError: `split` is calibration, or no prompt fits the length.
        """
        _require_evaluation(split)
        budget = length - self.tokens_to_generate
        fitting = [prompt for prompt in self.prompts if count_tokens(prompt.text) <= budget]
        if not fitting:
            raise too_short(self, length, self.minimum_length(count_tokens))
        return tuple(fitting[:count])


def load_completion_file(path: Path) -> tuple[Prompt, ...]:
    """Prompts from a JSON array or JSON lines with the fields `text` and `value` of lm-eval's completion tasks.

    Both are stripped, as there. Further fields are not read.

    Raises:
        RequestError: the file cannot be read or holds no prompts, or a row lacks a field or has it empty.
    """
    prompts = []
    for number, row in enumerate(_rows(path), start=1):
        text, value = (_field(path, number, row, name) for name in ("text", "value"))
        prompts.append(Prompt(NAME, text, "", (value,), "all", f" {value}"))
    if not prompts:
        raise RequestError(
            f"{path} holds 0 prompts and at least 1 is needed; give rows with the fields text and value."
        )
    return tuple(prompts)


def _prompt(passage: Passage, filler: str) -> Prompt:
    before = f"{filler}\n\n" if filler else ""
    between = "\n\n" if passage.kind == "lookup" else ""
    return Prompt(
        NAME, before + passage.context + between, passage.question, (passage.value,), "all", f" {passage.value}"
    )


def _require_evaluation(split: Split) -> None:
    if split == "calibration":
        raise RequestError(
            f"task {NAME} for calibration: its texts are held out and only ever measured on; choose another task."
        )


def _rows(path: Path) -> Iterator[Any]:
    remedy = "give a UTF-8 file of JSON lines with the fields text and value"
    refuse_no_file(path, str(path), remedy)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise RequestError(f"{path} cannot be read ({reason}); {remedy}.") from error
    if text.lstrip().startswith("["):
        yield from _json(path, 1, text)
        return
    # Only a line feed ends a JSON line; `splitlines` would also cut at separators that strings may hold.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield _json(path, number, line)


def _json(path: Path, line: int, text: str) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        raise RequestError(f"{path}, line {line}, is not JSON ({error}); give a JSON array or JSON lines.") from error


def _field(path: Path, number: int, row: Any, name: str) -> str:
    value = row.get(name) if isinstance(row, Mapping) else None
    if not isinstance(value, str) or not value.strip():
        raise RequestError(
            f'{path}, row {number}, has no text in the field "{name}"; every row needs text and value, both not empty.'
        )
    return value.strip()
