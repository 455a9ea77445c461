"""Every prompt form by name, and prompts from it."""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Callable, Sequence
from difflib import get_close_matches

from compressor.errors import RequestError
from compressor.prompts.base import CountTokens, Prompt, Split, Task
from compressor.prompts.common_words import CommonWordsTask
from compressor.prompts.completion import CompletionTask
from compressor.prompts.frequent_words import FrequentWordsTask
from compressor.prompts.haystacks import NeedleHaystack, NoiseHaystack, TextHaystack
from compressor.prompts.needle import NeedleTask
from compressor.prompts.recall import RecallTask
from compressor.prompts.sizing import too_short
from compressor.prompts.variable_tracking import VariableTrackingTask

UNSEEN = frozenset({"niah_multiquery", "fwe", "completion"})
"""Forms that calibration, refit and distillation never use, so that reports can show how far their gains carry over."""

_NOISE, _NEEDLES = NoiseHaystack(), NeedleHaystack()

_FORMS: dict[str, Callable[[str, TextHaystack], Task]] = {
    "niah_single_1": lambda name, text: NeedleTask(name, _NOISE),
    "niah_single_2": lambda name, text: NeedleTask(name, text),
    "niah_single_3": lambda name, text: NeedleTask(name, text, value_kind="uuids"),
    "niah_multikey_1": lambda name, text: NeedleTask(name, text, keys=4),
    "niah_multikey_2": lambda name, text: NeedleTask(name, _NEEDLES),
    "niah_multikey_3": lambda name, text: NeedleTask(name, _NEEDLES, key_kind="uuids", value_kind="uuids"),
    "niah_multivalue": lambda name, text: NeedleTask(name, text, values=4),
    "niah_multiquery": lambda name, text: NeedleTask(name, text, keys=4, queries=4),
    "niah_word": lambda name, text: NeedleTask(name, _NOISE, value_kind="words"),
    "vt": lambda name, text: VariableTrackingTask(name),
    "cwe": lambda name, text: CommonWordsTask(name),
    "fwe": lambda name, text: FrequentWordsTask(name),
    "recall": lambda name, text: RecallTask(name, pairs=32),
    "completion": lambda name, text: CompletionTask(),
}

_LM_EVAL = "; a task of lm-eval is written lm_eval:NAME"

_NUMBER = "(0|[1-9][0-9]{0,8})"
# Forms with numbers in their names: what to write, the pattern, least and greatest of each number, the task. A number
# has one spelling, so that a form has one name.
_NUMBERED: tuple[tuple[str, re.Pattern[str], tuple[tuple[int, int], ...], Callable[[str, list[int]], Task]], ...] = (
    (
        "niah_keys_N",
        re.compile(f"niah_keys_{_NUMBER}"),
        ((1, 32),),
        lambda name, n: NeedleTask(name, _NOISE, keys=n[0]),
    ),
    (
        "vt_CxH",
        re.compile(f"vt_{_NUMBER}x{_NUMBER}"),
        ((1, 32), (1, 32)),
        lambda name, n: VariableTrackingTask(name, chains=n[0], hops=n[1]),
    ),
    ("cwe_N", re.compile(f"cwe_{_NUMBER}"), ((2, 10),), lambda name, n: CommonWordsTask(name, common=n[0])),
    ("recall_N", re.compile(f"recall_{_NUMBER}"), ((2, 1024),), lambda name, n: RecallTask(name, pairs=n[0])),
)


def task_names() -> tuple[str, ...]:
    """The named forms. Further ones have numbers in their names: `task_patterns`."""
    return tuple(_FORMS)


def task_patterns() -> dict[str, tuple[tuple[int, int], ...]]:
    """Forms with numbers in their names, with the least and greatest value of each number."""
    return {written: limits for written, _, limits, _ in _NUMBERED}


def find_task(name: str, haystack: str | None = None, further: str = _LM_EVAL) -> Task:
    """The form of that name. `haystack` is the text that text haystacks are cut from, in place of the bundled one;
    `further` ends the sentence on an unknown name with what else the caller takes.

    Raises:
        RequestError: there is no such form, or a number in its name is outside its limits.
    """
    if name in _FORMS:
        return _FORMS[name](name, TextHaystack(haystack))
    for written, pattern, limits, build in _NUMBERED:
        match = pattern.fullmatch(name)
        if match:
            numbers = [int(number) for number in match.groups()]
            _check_numbers(name, written, numbers, limits)
            return build(name, numbers)
    known = [*_FORMS, *task_patterns()]
    raise RequestError(
        f'unknown task "{name}"; did you mean {_nearest(name, known)}? Known are {", ".join(known)}{further}.'
    )


def needs_text(task: Task) -> bool:
    """Whether the form hides its needles in a text, so that `find_task`'s haystack matters to it."""
    return isinstance(task, NeedleTask) and isinstance(task.haystack, TextHaystack)


def _nearest(name: str, known: Sequence[str]) -> str:
    """A form by the same numbers, plainly written, or else the known name that is spelled most like `name`."""
    plain = re.sub(r"\d{1,9}", lambda digits: str(int(digits.group())), name.strip().lower())
    if any(pattern.fullmatch(plain) for _, pattern, _, _ in _NUMBERED):
        return plain
    lower_case = {form.lower(): form for form in known}
    return lower_case[get_close_matches(name.lower(), lower_case, n=1, cutoff=0.0)[0]]


def _check_numbers(name: str, written: str, numbers: list[int], limits: tuple[tuple[int, int], ...]) -> None:
    for number, (least, greatest) in zip(numbers, limits, strict=True):
        if not least <= number <= greatest:
            raise RequestError(
                f"task {name}: {number} is outside {least} to {greatest}; name a form {written} within these limits."
            )


def generate_prompts(
    task: Task, count: int, length: int, count_tokens: CountTokens, seed: int, split: Split
) -> tuple[Prompt, ...]:
    """`count` prompts that, each with its output, take at most `length` tokens and come close to it.

    The same arguments give the same prompts on every machine; those of another length or split are unrelated.

    Raises:
        RequestError: no prompts are asked for, the length is shorter than the form needs, the tokenizer gives no tokens
            for a text, or calibration asks for one of the forms that are kept for evaluation.
    """
    if count < 1:
        raise RequestError(f"{count} prompts of {task.name}: at least 1 is needed; raise their number.")
    if split == "calibration" and task.name in UNSEEN:
        raise RequestError(
            f"task {task.name} for calibration: it is kept for evaluation as an unseen form; choose another of "
            f"{', '.join(name for name in task_names() if name not in UNSEEN)}."
        )
    if count_tokens("The grass is green.") <= count_tokens(""):
        raise RequestError(
            "the tokenizer gives 0 tokens for a sentence; name a model folder whose tokenizer is complete."
        )
    minimum = task.minimum_length(count_tokens)
    if length < minimum:
        raise too_short(task, length, minimum)
    digest = hashlib.sha256(f"{seed}/{task.name}/{length}/{split}".encode()).digest()
    generator = random.Random(int.from_bytes(digest, "big"))
    return task.sample(count, length, count_tokens, generator, split)
