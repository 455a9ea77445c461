"""What a probe reads, refused or made before any model is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from compressor.architectures.base import Mixer
from compressor.calibration.text import DocumentStream, TextSource, held_out_source, open_documents
from compressor.context_length import ContextLength, context_length
from compressor.errors import RequestError
from compressor.evaluation.prompt_sets import PromptSet, check_lengths, make_prompt_sets, minimum_lengths
from compressor.probe.truncation import RANKS
from compressor.probe_section import DEFAULT_TASKS, ProbeSection
from compressor.prompts.base import Task
from compressor.prompts.registry import find_task
from compressor.text_windows import Windowed, text_windows
from compressor.tokenization import require_embedding

LENGTH_WITHOUT_CONTEXT = 2048
TASK_LENGTH = 1024
WINDOWS_PER_DOCUMENT = 64
"""Pieces of a text that are looked through for each document asked for, before shorter ones are taken."""


@dataclass(frozen=True, slots=True, eq=False)
class ProbePlan:
    """A checked request: documents int64 [T], T a multiple of `section.every`, ranks and prompts, all of which fit."""

    section: ProbeSection
    length: int
    documents: tuple[Tensor, ...]
    ranks: tuple[int, ...]
    prompt_sets: tuple[PromptSet, ...]
    notes: tuple[str, ...]

    @property
    def text_tokens(self) -> int:
        return sum(len(document) for document in self.documents)

    @property
    def prompt_tokens(self) -> int:
        return sum(prompts.tokens for prompts in self.prompt_sets)

    def settings(self) -> dict[str, object]:
        """The section with everything filled in."""
        return {
            **self.section.model_dump(),
            "length": self.length,
            "document_lengths": [len(document) for document in self.documents],
            "ranks": list(self.ranks),
            "tasks": [prompts.task.name for prompts in self.prompt_sets],
            "task_length": next((prompts.length for prompts in self.prompt_sets), None),
        }


def plan_probe(
    section: ProbeSection,
    config: PretrainedConfig,
    baseline: PretrainedConfig | None,
    mixers: Sequence[Mixer],
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
) -> ProbePlan:
    """Find what the section names, for the model of `config` and the one of `baseline`.

    Raises:
        RequestError: a length beyond a context or below a segment, a rank that states do not have, a text without a
            segment, an unknown task, or an option that nothing would use.
    """
    _refuse_unused(section)
    context = None if section.allow_extrapolation else context_length(config, baseline)
    length = _length(section, context, config, baseline)
    ranks, notes = _ranks(section, mixers)
    vocabulary: int = config.get_text_config(decoder=True).vocab_size
    tasks, task_length, task_notes = _tasks(section, context, tokenizer)
    source = TextSource(section.text, held_out=True)
    stream = open_documents(held_out_source(source) or source)
    read = concatenated_documents if section.concatenate else probe_documents
    documents, text_notes = read(stream, tokenizer, length, section.every, section.documents)
    for document in documents:
        require_embedding(tokenizer, int(document.max()), vocabulary)
    prompt_sets = make_prompt_sets(tasks, (task_length,), section.samples, seed, tokenizer, vocabulary) if tasks else ()
    if section.truncation and all(len(document) == section.every for document in documents):
        text_notes.append(
            f"text is not cut: documents of one segment of {section.every} tokens have no boundary inside"
        )
    return ProbePlan(section, length, documents, ranks, prompt_sets, (*notes, *task_notes, *text_notes))


def probe_documents(
    stream: DocumentStream, tokenizer: PreTrainedTokenizerBase, length: int, every: int, count: int
) -> tuple[tuple[Tensor, ...], list[str]]:
    """The first `count` pieces of a text with `length` tokens, or the longest there are; whole multiples of `every`.

    Raises:
        RequestError: the text has no piece of `every` tokens.
    """
    asked = count
    while True:
        windows, _ = text_windows(stream, tokenizer, Windowed("disjoint", length, length, asked))
        full = [window.tokens for window in windows if len(window.tokens) == length]
        if len(full) >= count or len(windows) < asked or asked >= WINDOWS_PER_DOCUMENT * count:
            break
        asked = min(4 * asked, WINDOWS_PER_DOCUMENT * count)
    pieces = sorted((window.tokens for window in windows), key=lambda tokens: -len(tokens))[:count]
    return _whole_segments(pieces, stream.source.name, length, every, count)


def concatenated_documents(
    stream: DocumentStream, tokenizer: PreTrainedTokenizerBase, length: int, every: int, count: int
) -> tuple[tuple[Tensor, ...], list[str]]:
    """`count` pieces of `length` tokens of the documents joined, with the end-of-sequence token between each two.

    Raises:
        RequestError: all documents together have fewer than `every` tokens.
    """
    wanted, asked = count * length, 8
    while True:
        windows, _ = text_windows(stream, tokenizer, Windowed("disjoint", wanted, wanted, asked))
        if len(windows) < asked or sum(len(window.tokens) for window in windows) >= wanted:
            break
        asked *= 4
    end = tokenizer.eos_token_id
    parts: list[Tensor] = []
    for window in windows:
        parts += [torch.tensor([end])] if parts and isinstance(end, int) else []
        parts.append(window.tokens)
    pieces = list(torch.cat(parts)[:wanted].split(length))
    return _whole_segments(pieces, stream.source.name, length, every, count)


def _whole_segments(
    pieces: Sequence[Tensor], name: str, length: int, every: int, count: int
) -> tuple[tuple[Tensor, ...], list[str]]:
    """Pieces, the longest first, cut to multiples of `every`, and what to say where they are less than asked for."""
    cut = tuple(tokens[: len(tokens) // every * every] for tokens in pieces if len(tokens) >= every)
    if not cut:
        raise RequestError(
            f"the longest document of the text {name} has {len(pieces[0])} tokens and a segment {every}; "
            "give a longer --text, or a lower --every."
        )
    notes = []
    if len(cut) < count:
        notes.append(f"{len(cut)} of {count} documents, as the text has no more of {every} tokens")
    shortest = min(len(tokens) for tokens in cut)
    if shortest < length // every * every:
        notes.append(
            f"documents of {shortest:,} to {len(cut[0]):,} tokens instead of {length:,}: the text has no longer"
        )
    return cut, notes


def _length(
    section: ProbeSection,
    context: ContextLength | None,
    config: PretrainedConfig,
    baseline: PretrainedConfig | None,
) -> int:
    length = section.length
    if length is None:
        named = context_length(config, baseline)
        length = LENGTH_WITHOUT_CONTEXT if named is None else named.tokens
    elif context is not None:
        context.refuse_beyond((length,), "length")
    if length < section.every:
        raise RequestError(
            f"a length of {length} tokens is below one segment of {section.every}; raise --length, or lower --every."
        )
    return length


def _ranks(section: ProbeSection, mixers: Sequence[Mixer]) -> tuple[tuple[int, ...], list[str]]:
    """The ranks, highest first, each below what it takes to change nothing unless it was named."""
    highest = min(min(mixer.head_k_dim, mixer.head_v_dim) for mixer in mixers)
    named = [*(section.ranks or ()), *(() if section.search_rank is None else (section.search_rank,))]
    for rank in named:
        if rank > highest:
            option = "ranks" if rank in (section.ranks or ()) else "search-rank"
            first = mixers[0]
            raise RequestError(
                f"--{option} {rank} is over the {highest} directions that a state of {first.head_v_dim} x "
                f"{first.head_k_dim} has; use 1 to {highest}."
            )
    if not section.truncation:
        return (), []
    if section.ranks is not None:
        return tuple(sorted(set(section.ranks), reverse=True)), []
    return tuple(rank for rank in RANKS if rank < highest), []


def _tasks(
    section: ProbeSection, context: ContextLength | None, tokenizer: PreTrainedTokenizerBase
) -> tuple[tuple[Task, ...], int, list[str]]:
    """The tasks, the length of their prompts, and what to say about those of the default that are left out."""
    if not section.retrieval or (not section.truncation and section.search_rank is None):
        return (), 0, []
    tasks = tuple(find_task(name) for name in section.tasks or DEFAULT_TASKS)
    length = section.task_length
    if length is None:
        length = TASK_LENGTH if context is None else min(TASK_LENGTH, context.tokens)
    elif context is not None:
        context.refuse_beyond((length,), "task-length")
    if length <= section.every:
        sentence = f"prompts of {length} tokens end in their first segment of {section.every}"
        if section.tasks is not None or section.task_length is not None:
            raise RequestError(f"{sentence}, so nothing would be cut; raise --task-length, or lower --every.")
        return (), 0, [f"no retrieval tasks: {sentence}"]
    if section.tasks is not None:
        check_lengths(tasks, (length,), tokenizer)
        return tasks, length, []
    needs = minimum_lengths(tasks, tokenizer)
    fitting = tuple(task for task, minimum in needs if minimum <= length)
    notes = [f"not measured: {task.name} needs {minimum} tokens" for task, minimum in needs if minimum > length]
    return fitting, length, notes


def _refuse_unused(section: ProbeSection) -> None:
    """Raises:
    RequestError: an option was given that would change nothing.
    """
    no_tasks = None if section.retrieval else "no-tasks"
    no_cuts = None if section.truncation else "no-truncation"
    nothing = no_cuts if section.search_rank is None else None
    for option, given, against in (
        ("ranks", section.ranks, no_cuts),
        ("tasks", section.tasks, no_tasks or nothing),
        ("task-length", section.task_length, no_tasks or nothing),
    ):
        if given is not None and against is not None:
            raise RequestError(f"--{option} would change nothing with --{against}; leave one of the two out.")
