"""What an evaluation puts to a model, from the recipe: refused or made before any model is loaded."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from compressor.calibration.text import DocumentStream, TextSource, held_out_source, open_documents
from compressor.context_length import ContextLength, context_length
from compressor.errors import RequestError
from compressor.evaluation.lm_eval_tasks import LmEvalTasks, check_lm_eval_tasks
from compressor.evaluation.measure import Material, NamedWindows
from compressor.evaluation.prompt_sets import PromptSet, check_lengths, make_prompt_sets, minimum_lengths
from compressor.evaluation.stride import require_stride
from compressor.evaluation.suites import Suite, choose_suite
from compressor.evaluation.windows import Document, disjoint_windows
from compressor.evaluation_checks import refuse_impossible_evaluation
from compressor.evaluation_section import EvaluationSection
from compressor.file_kinds import refuse_no_file
from compressor.naming import Naming, key_of
from compressor.prompts.base import Task
from compressor.prompts.completion import CompletionFileTask, load_completion_file
from compressor.prompts.registry import find_task
from compressor.section import refuse_doubles
from compressor.text_windows import Windowed, text_windows


@dataclass(frozen=True)
class EvaluationPlan:
    """A checked request: forms, texts and lm-eval tasks that are all there and fit the model.

    `texts` is empty where the caller has windows of its own.
    """

    section: EvaluationSection
    suite: Suite
    tasks: tuple[Task, ...]
    texts: tuple[tuple[str, DocumentStream], ...]
    lm_eval: LmEvalTasks | None
    tokenizer: PreTrainedTokenizerBase
    vocab_size: int
    seed: int
    notes: tuple[str, ...]

    @property
    def cut(self) -> Windowed:
        """How the texts are cut into windows."""
        length = self.suite.window_length
        stride = self.section.stride or max(1, length // 2)
        return Windowed(self.section.windowing, length, stride, self.suite.windows)

    @property
    def num_prompts(self) -> int:
        return len(self.tasks) * len(self.suite.lengths) * self.suite.samples


def plan_evaluation(
    section: EvaluationSection,
    config: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    texts: Sequence[str],
    baseline: PretrainedConfig | None = None,
    name: Naming = key_of,
) -> EvaluationPlan:
    """Find everything that the section names, for the model of `config` and the one of `baseline`.

    What the suite itself brings and a model cannot take is left out or shortened, with a note; what was asked for
    by name is refused. Messages call a field of the section `name(field)`.

    Raises:
        RequestError: a text that stands there twice, a length that is too short for a form or too long for a model, a
            text, haystack or data set that cannot be read, lm-eval missing, or a setting that nothing uses.
    """
    suite, lm_eval_names = choose_suite(
        section.suite,
        section.tasks,
        section.lengths,
        section.samples,
        section.windows,
        section.window_length,
        section.mode,
    )
    refuse_doubles(name("texts"), texts)
    refuse_impossible_evaluation(section, texts, name)
    haystack = None if section.haystack is None else _read_text(section.haystack)
    tasks = tuple(_find(task, haystack, section.completion) for task in suite.tasks)
    named = context_length(config, baseline)
    context = None if section.allow_extrapolation else named
    tasks, notes = _plan_tasks(section, suite, tasks, context, tokenizer, name)
    if texts:
        suite, shortened = _plan_windows(section, suite, context, name)
        notes += shortened
    include = None if section.lm_eval_tasks is None else _path(section.lm_eval_tasks)
    return EvaluationPlan(
        section=section,
        suite=suite,
        tasks=tasks,
        texts=tuple((text, _open_text(text)) for text in texts),
        lm_eval=check_lm_eval_tasks(lm_eval_names, include) if lm_eval_names else None,
        tokenizer=tokenizer,
        vocab_size=config.get_text_config(decoder=True).vocab_size,
        seed=seed,
        notes=tuple(notes),
    )


def make_material(
    plan: EvaluationPlan, held_out: Sequence[Tensor], held_out_name: str, on_prompts: Callable[[int], None]
) -> Material:
    """Windows of the plan's texts, or of the held-out token sequences where it names none, and the prompts.

    Raises:
        RequestError: a text is too short for a window, or the tokenizer gives no tokens.
    """
    texts: list[NamedWindows] = []
    notes: list[str] = []
    for name, stream in plan.texts:
        windows, note = text_windows(stream, plan.tokenizer, plan.cut)
        texts.append(NamedWindows(name, tuple(windows)))
        notes += [] if note is None else [f"text {name}: {note}"]
    if not texts and held_out:
        length = max(len(sequence) for sequence in held_out)
        documents = [Document(sequence) for sequence in held_out]
        texts.append(NamedWindows(held_out_name, tuple(disjoint_windows(documents, max(length, 2)))))
    prompt_sets = (
        make_prompt_sets(
            plan.tasks,
            plan.suite.lengths,
            plan.suite.samples,
            plan.seed,
            plan.tokenizer,
            plan.vocab_size,
            on_prompts,
        )
        if plan.tasks
        else ()
    )
    notes += _missing_prompts(prompt_sets, plan.suite.samples)
    return Material(tuple(texts), prompt_sets, plan.suite.mode, plan.section.batch_size, tuple(notes))


def _missing_prompts(prompt_sets: Sequence[PromptSet], samples: int) -> list[str]:
    return [
        f"{each.task.name} at {each.length} tokens: {len(each.prompts):,} of {samples:,} prompts, as no more fit"
        for each in prompt_sets
        if len(each.prompts) < samples
    ]


def _find(name: str, haystack: str | None, completion: str | None) -> Task:
    if name == "completion" and completion is not None:
        return CompletionFileTask(load_completion_file(_path(completion)))
    return find_task(name, haystack)


def _plan_tasks(
    section: EvaluationSection,
    suite: Suite,
    tasks: tuple[Task, ...],
    context: ContextLength | None,
    tokenizer: PreTrainedTokenizerBase,
    name: Naming,
) -> tuple[tuple[Task, ...], list[str]]:
    """The tasks that are measured, and what to say about the suite's others."""
    if section.tasks is None and section.lengths is None:
        return _fitting(tasks, suite.lengths[0], context, tokenizer)
    if tasks:
        if context is not None:
            context.refuse_beyond(suite.lengths, "lengths", name)
        check_lengths(tasks, suite.lengths, tokenizer, name("lengths"), name("tasks"))
    return tasks, []


def _fitting(
    tasks: Sequence[Task], length: int, context: ContextLength | None, tokenizer: PreTrainedTokenizerBase
) -> tuple[tuple[Task, ...], list[str]]:
    """The tasks that fit the suite's own length, and what to say about the others."""
    if context is not None and context.tokens < length:
        names = ", ".join(task.name for task in tasks)
        return (), [
            f"not measured: {names} at {length} tokens, since {context.owner}'s config names a context of "
            f"{context.tokens}"
        ]
    kept, notes = [], []
    for task, minimum in minimum_lengths(tasks, tokenizer):
        if minimum <= length:
            kept.append(task)
        else:
            notes.append(
                f"not measured: {task.name} needs {minimum} tokens of this tokenizer and the suite has {length}"
            )
    return tuple(kept), notes


def _plan_windows(
    section: EvaluationSection, suite: Suite, context: ContextLength | None, name: Naming
) -> tuple[Suite, list[str]]:
    """The suite with windows that the models can read, and what to say where those are shorter than its own."""
    notes = []
    if context is not None and section.window_length is not None:
        context.refuse_beyond((section.window_length,), "window_length", name)
    elif context is not None and context.tokens < suite.window_length:
        notes.append(
            f"windows of {context.tokens} tokens instead of {suite.window_length}: {context.owner}'s config names no "
            "longer context"
        )
        suite = replace(suite, window_length=context.tokens)
    if section.stride is not None:
        require_stride(section.stride, suite.window_length)
    return suite, notes


def _open_text(name: str) -> DocumentStream:
    source = TextSource(name, held_out=True)
    return open_documents(held_out_source(source) or source)


def _read_text(name: str) -> str:
    path, remedy = _path(name), "give a UTF-8 text file"
    refuse_no_file(path, f"the haystack {name}", remedy)
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise RequestError(f"the haystack {name} cannot be read ({reason}); {remedy}.") from error


def _path(name: str) -> Path:
    # pathlib raises for a user that is unknown.
    return Path(os.path.expanduser(name))  # noqa: PTH111
