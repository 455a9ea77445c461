"""Makes the bundled completion set from held-out text; the same text gives the same file.

    python -m benchmarks.completion_prompts --text ../shared/text --output compressor/prompts/completion.jsonl

Rows are of two kinds, half each, from three domains. `cloze`: a passage broken off right before a name or identifier
that occurred in it before, in the manner of the SQuAD completion of Arora et al. 2024 (arXiv 2402.18668). `lookup`: a
passage, then one of its lines again up to a name, number or identifier that stands once in it, as SWDE and FDA there
ask for the value of a key. What is asked is chosen by these rules alone, by no model.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

from benchmarks.options import check_options, check_text_folder
from benchmarks.output_files import replaced, told_in_one_sentence
from compressor.calibration.text_file import TextFileChunks

SEPARATOR = "<|endoftext|>"
SEED = 0
ROWS_PER_CELL = 50
CONTEXT_CHARACTERS = 420
STEP = 500
"""Characters from one passage's start to the next: no two share text."""
CLOZE_DISTANCE = 120
"""Least characters from the last earlier occurrence of a cloze's answer to its place."""
CLOZE_QUESTION = 12
"""Least characters of the line that breaks off."""
LOOKUP_CUE = (16, 64)
"""Least and most characters of the line that a lookup repeats."""

# Documents from the front of each file, so that their licences are few: Austen, the King James Version and Bierce;
# SQLite's documentation (public domain); Tornado (Apache-2.0).
DOCUMENTS = {"prose": 4, "docs": 29, "code": 8}

# Names, numbers of two or more digits, and identifiers with a capital or an underscore inside.
_NAME = r"[A-Z][a-z]{3,}"
_NUMBER = r"\d[\d.,:-]*\d"
_IDENTIFIER = r"[A-Za-z]+(?:_[A-Za-z0-9]+)+|[A-Z]?[a-z]+[A-Z][A-Za-z0-9]+|[A-Z]{2,}(?:_[A-Z]+)+"
ANSWER = {
    "prose": re.compile(rf"(?<= )(?:{_NAME})\b"),
    "docs": re.compile(rf"(?<= )(?:{_IDENTIFIER}|{_NUMBER}|{_NAME})\b"),
    "code": re.compile(rf"(?<= )(?:{_IDENTIFIER}|{_NUMBER}|{_NAME})\b"),
}
_SENTENCE_START = re.compile(r"(?:(?<=[.!?;\"] )|(?<=\n))\S")


@told_in_one_sentence()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--text", type=Path, required=True, help="folder of test_prose.txt, test_docs.txt, test_code.txt"
    )
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    check_options(arguments)
    check_text_folder(arguments.text, list(DOCUMENTS))
    rows = [
        row
        for domain, count in DOCUMENTS.items()
        for row in domain_rows(domain, "".join(TextFileChunks(arguments.text / f"test_{domain}.txt")), count)
    ]
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    with replaced(arguments.output) as partial:
        partial.write_text(text, encoding="utf-8")
    print(f"{len(rows)} rows, {len(text.encode()):,} bytes")


def domain_rows(domain: str, text: str, documents: int) -> Iterator[dict[str, str]]:
    """`ROWS_PER_CELL` rows of either kind, from passages that share no text, in the order of the file."""
    generator = random.Random(f"{SEED}/{domain}")
    parts = [part.strip() for part in text.split(SEPARATOR)[:documents]]
    passages = [passage for part in parts for passage in _passages(part)]
    found: dict[str, list[tuple[int, dict[str, str]]]] = {"cloze": [], "lookup": []}
    asked: set[str] = set()
    for index in generator.sample(range(len(passages)), len(passages)):
        for kind in sorted(found, key=lambda kind: len(found[kind])):
            row = _cloze(passages[index], domain) if kind == "cloze" else _lookup(passages[index], domain, generator)
            if row is not None and len(found[kind]) < ROWS_PER_CELL and row["question"] not in asked:
                asked.add(row["question"])
                found[kind].append((index, {"domain": domain, "kind": kind, **row}))
                break
    for kind in sorted(found):
        yield from (row for _, row in sorted(found[kind], key=lambda pair: pair[0]))


def _passages(document: str) -> Iterator[str]:
    """Pieces of `STEP` characters or a little less, each from the beginning of a sentence or line."""
    end = 0
    for match in _SENTENCE_START.finditer(document):
        if match.start() >= end and match.start() + STEP <= len(document):
            end = match.start() + STEP
            yield document[match.start() : end]


def _cloze(passage: str, domain: str) -> dict[str, str] | None:
    """The last answer within the passage that occurred before and not just now."""
    for match in reversed(list(ANSWER[domain].finditer(passage))):
        value, before = match.group(), passage[: match.start()]
        earlier = [found.start() for found in re.finditer(rf"\b{re.escape(value)}\b", before)]
        if earlier and match.start() - earlier[-1] >= CLOZE_DISTANCE and _begins_no_sentence(before):
            # The question is the line that breaks off; what stands before it is the document.
            cut = max(before.rfind("\n") + 1, before.rfind(". ") + 2)
            question = before[cut:].rstrip()
            asks = len(question.strip()) >= CLOZE_QUESTION and value.lower() not in question.lower()
            if earlier[-1] < cut and asks:
                return {"context": before[:cut], "question": question, "value": value}
    return None


def _lookup(passage: str, domain: str, generator: random.Random) -> dict[str, str] | None:
    """A line of the passage again, up to an answer that occurs nowhere else in it."""
    context = passage[:CONTEXT_CHARACTERS].rsplit(" ", 1)[0].rstrip()
    candidates = []
    for match in ANSWER[domain].finditer(context):
        before = context[: match.start()]
        cue = before[max(before.rfind("\n") + 1, before.rfind(". ") + 2, 0) :].strip()
        if len(cue) > LOOKUP_CUE[1]:
            cue = cue[-LOOKUP_CUE[1] :].partition(" ")[2]
        once = context.lower().count(match.group().lower()) == 1 and context.count(cue) == 1
        if once and len(cue) >= LOOKUP_CUE[0] and _begins_no_sentence(before) and match.end() < len(context):
            candidates.append({"context": context, "question": cue, "value": match.group()})
    return generator.choice(candidates) if candidates else None


def _begins_no_sentence(before: str) -> bool:
    """A capital at a sentence's beginning is no name."""
    return before.rstrip()[-1:] not in {"", ".", "!", "?", ":", ";", '"', "-"} and not before.endswith("\n")


if __name__ == "__main__":
    main()
