"""What a probe reads, refused or made before any model is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from compressor.architectures.base import Mixer
from compressor.architectures.layer_kinds import lists_softmax_layers
from compressor.calibration.text import TextSource, held_out_source, open_documents
from compressor.context_length import ContextLength, context_length
from compressor.errors import RequestError
from compressor.evaluation.prompt_sets import PromptSet, check_lengths, make_prompt_sets, minimum_lengths
from compressor.naming import option_of
from compressor.probe.truncation import RANKS
from compressor.probe_documents import concatenated_documents, probe_documents
from compressor.probe_section import DEFAULT_TASKS, ProbeSection
from compressor.probe_sequences import Sequences, notes_on_cuts, refuse_nothing_to_cut, refuse_without_cuts
from compressor.prompts.base import Task
from compressor.prompts.registry import find_task
from compressor.tokenization import require_embedding

LENGTH_WITHOUT_CONTEXT = 2048
TASK_LENGTH = 1024


@dataclass(frozen=True, slots=True, eq=False)
class ProbePlan:
    """A checked request: documents int64 [T], T a multiple of `section.every`, ranks and prompts, all of which fit.

    `cut` and `windowed` are the sequences that the truncation experiment and its second part change anything for;
    `windowed` is None for a model without softmax layers.
    """

    section: ProbeSection
    length: int
    documents: tuple[Tensor, ...]
    ranks: tuple[int, ...]
    prompt_sets: tuple[PromptSet, ...]
    cut: Sequences
    windowed: Sequences | None
    notes: tuple[str, ...]

    @property
    def text_tokens(self) -> int:
        return sum(len(document) for document in self.documents)

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
    refuse_without_cuts(section)
    context = None if section.allow_extrapolation else context_length(config, baseline)
    length = _length(section, context, config, baseline)
    ranks = _ranks(section, mixers)
    decoder = config.get_text_config(decoder=True)
    tasks, task_length, task_notes = _tasks(section, context, tokenizer)
    source = TextSource(section.text, held_out=True)
    stream = open_documents(held_out_source(source) or source)
    read = concatenated_documents if section.concatenate else probe_documents
    documents, text_notes = read(stream, tokenizer, length, section.every, section.documents)
    for document in documents:
        require_embedding(tokenizer, int(document.max()), decoder.vocab_size)
    prompt_sets: tuple[PromptSet, ...] = ()
    if tasks:
        prompt_sets = make_prompt_sets(tasks, (task_length,), section.samples, seed, tokenizer, decoder.vocab_size)
    asked = Sequences(documents, prompt_sets)
    cut = asked.of_segments(2, section.every)
    refuse_nothing_to_cut(section, cut)
    listed = lists_softmax_layers(decoder)
    has_softmax = decoder.num_hidden_layers > len(mixers) if listed is None else listed
    windowed = asked.of_segments(3, section.every) if has_softmax else None
    notes = (*task_notes, *text_notes, *notes_on_cuts(section, asked, cut, windowed))
    return ProbePlan(section, length, documents, ranks, prompt_sets, cut, windowed, notes)


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
        context.refuse_beyond((length,), "length", option_of)
    if length < section.every:
        raise RequestError(
            f"a length of {length} tokens is below one segment of {section.every}; raise --length, or lower --every."
        )
    return length


def _ranks(section: ProbeSection, mixers: Sequence[Mixer]) -> tuple[int, ...]:
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
        return ()
    if section.ranks is not None:
        return tuple(sorted(section.ranks, reverse=True))
    return tuple(rank for rank in RANKS if rank < highest)


def _tasks(
    section: ProbeSection, context: ContextLength | None, tokenizer: PreTrainedTokenizerBase
) -> tuple[tuple[Task, ...], int, list[str]]:
    """The tasks, the length of their prompts, and what to say about those of the default that are left out."""
    if not section.retrieval or (not section.truncation and section.search_rank is None):
        return (), 0, []
    tasks = tuple(_task(name) for name in section.tasks or DEFAULT_TASKS)
    length = section.task_length
    if length is None:
        length = TASK_LENGTH if context is None else min(TASK_LENGTH, context.tokens)
    elif context is not None:
        context.refuse_beyond((length,), "task_length", option_of)
    if length <= section.every:
        sentence = f"prompts of {length} tokens end in their first segment of {section.every}"
        if section.tasks is not None or section.task_length is not None:
            raise RequestError(f"{sentence}, so nothing would be cut; raise --task-length, or lower --every.")
        return (), 0, [f"no retrieval tasks: {sentence}"]
    if section.tasks is not None:
        check_lengths(tasks, (length,), tokenizer, option_of("task_length"), option_of("tasks"))
        return tasks, length, []
    needs = minimum_lengths(tasks, tokenizer)
    fitting = tuple(task for task, minimum in needs if minimum <= length)
    notes = [f"not measured: {task.name} needs {minimum} tokens" for task, minimum in needs if minimum > length]
    return fitting, length, notes


def _task(name: str) -> Task:
    if name.startswith("lm_eval:"):
        raise RequestError(
            f"--tasks {name}: a probe asks retrieval prompts, and takes no task of lm-eval; name tasks such as "
            f"{','.join(DEFAULT_TASKS)}, or use compress evaluate."
        )
    return find_task(name, further="")
