"""What an evaluation puts to a model, from the recipe: refused or made before any model is loaded."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path

from torch import Tensor
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from compressor.calibration.text import DocumentStream, TextSource, held_out_source, open_documents
from compressor.context_length import ContextLength, context_length
from compressor.errors import RequestError
from compressor.evaluation.lm_eval_bridge import SIX_TASKS
from compressor.evaluation.lm_eval_tasks import LmEvalTasks, check_lm_eval_tasks
from compressor.evaluation.measure import Material, NamedWindows
from compressor.evaluation.prompt_sets import PromptSet, check_lengths, make_prompt_sets, minimum_lengths
from compressor.evaluation.suites import Suite, choose_suite, refuse_doubles
from compressor.evaluation.windows import Document, disjoint_windows, require_stride
from compressor.prompts.base import Task
from compressor.prompts.completion import CompletionFileTask, load_completion_file
from compressor.prompts.registry import find_task, needs_text
from compressor.recipe import EvaluationSection
from compressor.text_windows import Windowed, text_windows

LM_EVAL_EXAMPLES = (*SIX_TASKS, "wikitext", "lambada", "mmlu", "gsm8k", "boolq", "swde", "fda", "squad_completion")
"""Tasks of lm-eval that are often written without the prefix; listing all of its own takes seconds."""


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
) -> EvaluationPlan:
    """Find everything that the section names, for the model of `config` and the one of `baseline`.

    What the suite itself brings and a model cannot take is left out or shortened, with a note; what was asked for
    by name is refused.

    Raises:
        RequestError: an unknown task, a name or length that stands there twice, a length that is too short for a form
            or too long for a model, a text, haystack or data set that cannot be read, lm-eval missing, or an option
            that nothing uses.
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
    refuse_doubles("--text", texts)
    haystack = None if section.haystack is None else _read_text(section.haystack)
    tasks = tuple(_find(name, haystack, section.completion) for name in suite.tasks)
    _refuse_unused(section, tasks, lm_eval_names, texts)
    context = context_length(config, baseline)
    tasks, notes = _plan_tasks(section, suite, tasks, None if section.allow_extrapolation else context, tokenizer)
    if texts:
        suite, shortened = _plan_windows(section, suite, None if section.allow_extrapolation else context)
        notes += shortened
    include = None if section.lm_eval_tasks is None else _path(section.lm_eval_tasks)
    return EvaluationPlan(
        section=section,
        suite=suite,
        tasks=tasks,
        texts=tuple((name, _open_text(name)) for name in texts),
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
    try:
        return find_task(name, haystack)
    except RequestError:
        nearest = get_close_matches(name.lower(), LM_EVAL_EXAMPLES, n=1, cutoff=0.8)
        if not nearest:
            raise
        raise RequestError(
            f'unknown task "{name}"; did you mean lm_eval:{nearest[0]}? Tasks of lm-eval come last in --tasks, the '
            "first of them with lm_eval: before it."
        ) from None


def _refuse_unused(
    section: EvaluationSection, tasks: Sequence[Task], lm_eval_names: Sequence[str], texts: Sequence[str]
) -> None:
    """Raises:
    RequestError: an option was given that would change nothing, so that its user expects other figures.
    """
    cutting = (section.windows, section.window_length, section.stride)
    unused = (
        (
            "completion",
            section.completion is not None and not any(isinstance(task, CompletionFileTask) for task in tasks),
            "the task completion to --tasks",
        ),
        (
            "haystack",
            section.haystack is not None and not any(needs_text(task) for task in tasks),
            "a task that hides needles in text, such as niah_single_2, to --tasks",
        ),
        ("lm-eval-tasks", section.lm_eval_tasks is not None and not lm_eval_names, "lm_eval:NAME to --tasks"),
        ("stride", section.stride is not None and section.windowing != "sliding", "--windowing sliding"),
        (
            "windows, --window-length, --stride or --windowing",
            not texts and (section.windowing != "disjoint" or any(value is not None for value in cutting)),
            "a text",
        ),
    )
    for option, ignored, remedy in unused:
        if ignored:
            raise RequestError(f"--{option} would change nothing here; add {remedy}, or leave it out.")


def _plan_tasks(
    section: EvaluationSection,
    suite: Suite,
    tasks: tuple[Task, ...],
    context: ContextLength | None,
    tokenizer: PreTrainedTokenizerBase,
) -> tuple[tuple[Task, ...], list[str]]:
    """The tasks that are measured, and what to say about the suite's others."""
    if section.tasks is None and section.lengths is None:
        return _fitting(tasks, suite.lengths[0], context, tokenizer)
    if tasks:
        if context is not None:
            context.refuse_beyond(suite.lengths, "lengths")
        check_lengths(tasks, suite.lengths, tokenizer)
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


def _plan_windows(section: EvaluationSection, suite: Suite, context: ContextLength | None) -> tuple[Suite, list[str]]:
    """The suite with windows that the models can read, and what to say where those are shorter than its own."""
    notes = []
    if context is not None and section.window_length is not None:
        context.refuse_beyond((section.window_length,), "window-length")
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
    try:
        return _path(name).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"the haystack {name} cannot be read ({error}); give a UTF-8 text file.") from error


def _path(name: str) -> Path:
    # pathlib raises for a user that is unknown.
    return Path(os.path.expanduser(name))  # noqa: PTH111
