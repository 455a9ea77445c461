"""Retrieval prompts as calibration data: sequences of whole prompts with their answers, mixed into those of text."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from compressor.calibration.tokens import PackedTokens, token_sha256
from compressor.errors import RequestError
from compressor.evaluation.prompt_sets import minimum_lengths
from compressor.evaluation.prompt_tokens import TokenCounter, encode_prompts
from compressor.naming import Naming, option_of
from compressor.prompts.base import Task
from compressor.prompts.registry import UNSEEN, find_task, generate_prompts, task_names
from compressor.tokenization import require_embedding

_PROMPTS_AT_ONCE = 4
"""A call for prompts measures its form first, at the price of about two of them."""


@dataclass(frozen=True, slots=True, eq=False)
class RetrievalTokens:
    """Sequences of retrieval prompts.

    Attributes:
        sequences: int64 `[sequence_length]` each.
        prompts: number of prompts that are whole in them.
        tasks: names of the forms that they hold, in the order of `task_names`.
    """

    sequences: tuple[Tensor, ...]
    prompts: int
    tasks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CalibrationForm:
    """A form, and the lengths of its prompts in ascending order."""

    task: Task
    lengths: tuple[int, ...]


def calibration_forms(
    tokenizer: PreTrainedTokenizerBase, sequence_length: int, name: Naming = option_of, section: str = "calibration"
) -> tuple[CalibrationForm, ...]:
    """The forms that calibration may use, with a quarter, a half and the whole of `sequence_length` as lengths.

    A length that is too short for a form is raised to the next that is not; a form that needs more than
    `sequence_length` is left out. Messages call the settings of the recipe's `section` as `name` does.

    Raises:
        RequestError: every form needs more than `sequence_length`, or the tokenizer gives no tokens.
    """
    tasks = [find_task(form) for form in task_names() if form not in UNSEEN]
    forms = []
    minimums = minimum_lengths(tasks, tokenizer)
    for task, minimum in minimums:
        lengths = [sequence_length // 4, sequence_length // 2, sequence_length]
        fitting = [length for length in lengths if length >= minimum]
        if fitting:
            forms.append(CalibrationForm(task, tuple(max(length, fitting[0]) for length in lengths)))
    if not forms:
        least = min(minimum for _, minimum in minimums)
        length, share = f"{section}.sequence_length", name(f"{section}.retrieval_share", 0)
        raise RequestError(
            f"{name(length, sequence_length)} is too short for retrieval prompts: the shortest form needs {least} "
            f"tokens of this tokenizer; raise {name(length)} to {least} or more, or give {share}."
        )
    return tuple(forms)


def retrieval_sequences(
    tokenizer: PreTrainedTokenizerBase, vocab_size: int, count: int, sequence_length: int, seed: int
) -> RetrievalTokens:
    """`count` sequences that each begin with a whole prompt and its ideal completion.

    Behind it, each after the tokenizer's end-of-sequence token where there is one, stand further prompts that the rest
    has room for, and the beginning of one more that fills it. The forms take turns; lengths are drawn with `seed`. A
    completion that is longer than its form's limit on the output, as characters for tokens make it, may be cut.

    The same arguments give the same tokens, a larger `count` begins with them, and another seed gives unrelated
    prompts. Keys, values, words and haystacks are of the calibration split, which no evaluation prompt shares.

    Raises:
        RequestError: no form fits `sequence_length`, or a token has no embedding in a model with `vocab_size`.
    """
    forms = calibration_forms(tokenizer, sequence_length)
    separator = tokenizer.eos_token_id if isinstance(tokenizer.eos_token_id, int) else None
    require_embedding(tokenizer, -1 if separator is None else separator, vocab_size)
    draws = random.Random(seed)
    supplies = {
        (form.task.name, length): _prompts(form.task, length, tokenizer, vocab_size, draws)
        for form in forms
        for length in form.lengths
    }
    waiting = list(forms)
    sequences: list[Tensor] = []
    prompts, used = 0, set[str]()
    for _ in range(count):
        ids: list[int] = []
        while len(ids) < sequence_length:
            task, length = _draw_form(waiting, sequence_length - len(ids), draws)
            whole = next(supplies[task.name, length])
            if ids and separator is not None and separator not in (ids[-1], whole[0]):
                ids.append(separator)
            ids += whole
            prompts += len(ids) <= sequence_length
            used.add(task.name)
        sequences.append(torch.tensor(ids[:sequence_length]))
    return RetrievalTokens(tuple(sequences), prompts, tuple(name for name in task_names() if name in used))


def with_retrieval(text: PackedTokens, retrieval: RetrievalTokens) -> PackedTokens:
    """The calibration sequences of `text` with those of `retrieval` among them; what is held out stays."""
    calibration = interleave(text.calibration, retrieval.sequences)
    added = sum(len(sequence) for sequence in retrieval.sequences)
    return replace(
        text,
        calibration=calibration,
        tokens=text.tokens + added,
        requested_tokens=text.requested_tokens + added,
        sha256=token_sha256(calibration),
        retrieval_sequences=len(retrieval.sequences),
        retrieval_prompts=retrieval.prompts,
        retrieval_tasks=retrieval.tasks,
    )


def interleave(text: Sequence[Tensor], retrieval: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Both in their order; of the first n, the share of `retrieval` times n are its own, rounded to the nearest."""
    total = len(text) + len(retrieval)
    mixed: list[Tensor] = []
    taken = 0
    for position in range(total):
        # Half is rounded up, in whole numbers.
        due = (2 * (position + 1) * len(retrieval) + total) // (2 * total)
        mixed.append(retrieval[taken] if due > taken else text[position - taken])
        taken = due
    return tuple(mixed)


def _prompts(
    task: Task, length: int, tokenizer: PreTrainedTokenizerBase, vocab_size: int, draws: random.Random
) -> Iterator[list[int]]:
    """Token ids of prompts with their completions, without end."""
    count_tokens = TokenCounter(tokenizer)
    while True:
        seed = draws.getrandbits(63)
        prompts = generate_prompts(task, _PROMPTS_AT_ONCE, length, count_tokens, seed, "calibration")
        for encoded in encode_prompts(tokenizer, prompts, vocab_size):
            yield encoded.whole.tolist()


def _draw_form(waiting: list[CalibrationForm], room: int, draws: random.Random) -> tuple[Task, int]:
    """The first waiting form that fits `room`, which goes to the end, and a length that fits.

    Where none does, any form at its shortest: its prompt will be cut, so it keeps its turn.
    """
    for form in waiting:
        lengths = [length for length in form.lengths if length <= room]
        if lengths:
            waiting.remove(form)
            waiting.append(form)
            return form.task, draws.choice(lengths)
    form = draws.choice(waiting)
    return form.task, form.lengths[0]
