"""What an evaluation puts to a model, from the recipe: refused or made before any model is loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from compressor.calibration.documents import TextDocument
from compressor.calibration.text import DEMO, DocumentStream, TextSource, held_out_source, open_documents
from compressor.errors import RequestError
from compressor.evaluation.lm_eval_tasks import LmEvalTasks, check_lm_eval_tasks
from compressor.evaluation.measure import Material, NamedWindows
from compressor.evaluation.prompt_sets import check_lengths, make_prompt_sets, minimum_lengths
from compressor.evaluation.suites import Suite, choose_suite
from compressor.evaluation.windows import (
    Document,
    Window,
    disjoint_windows,
    encode_document,
    rolling_windows,
    sliding_windows,
)
from compressor.prompts.base import Task
from compressor.prompts.completion import CompletionFileTask, load_completion_file
from compressor.prompts.registry import find_task
from compressor.recipe import EvaluationSection

MOST_DOCUMENTS = 10_000
"""Documents that are read of a text at most, however short they are."""


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
    def num_prompts(self) -> int:
        return len(self.tasks) * len(self.suite.lengths) * self.suite.samples


def plan_evaluation(
    section: EvaluationSection,
    config: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    texts: Sequence[str],
) -> EvaluationPlan:
    """Find everything that the section names.

    What the suite itself brings and the model cannot take is left out, with a note; what was asked for
    by name is refused.

    Raises:
        RequestError: an unknown task, a length that is too short for a form or too long for the model,
            a text, haystack or data set that cannot be read, or lm-eval missing.
    """
    decoder = config.get_text_config(decoder=True)
    suite, lm_eval_names = choose_suite(
        section.suite,
        section.tasks,
        section.lengths,
        section.samples,
        section.windows,
        section.window_length,
        section.mode,
    )
    haystack = None if section.haystack is None else _read_text(section.haystack)
    tasks = tuple(_find(name, haystack, section.completion) for name in suite.tasks)
    context = None if section.allow_extrapolation else _context_length(decoder)
    notes: list[str] = []
    if section.tasks is None and section.lengths is None:
        tasks, notes = _fitting(tasks, suite.lengths[0], context, tokenizer)
    else:
        _refuse_beyond_context(suite.lengths if tasks else (), "lengths", context)
        if tasks:
            check_lengths(tasks, suite.lengths, tokenizer)
    if texts and section.window_length is not None:
        _refuse_beyond_context((section.window_length,), "window-length", context)
    include = None if section.lm_eval_tasks is None else Path(section.lm_eval_tasks).expanduser()
    return EvaluationPlan(
        section=section,
        suite=suite,
        tasks=tasks,
        texts=tuple((name, _open_text(name)) for name in texts),
        lm_eval=check_lm_eval_tasks(lm_eval_names, include) if lm_eval_names else None,
        tokenizer=tokenizer,
        vocab_size=decoder.vocab_size,
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
    texts = [NamedWindows(name, tuple(_windows(plan, stream))) for name, stream in plan.texts]
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
    return Material(tuple(texts), prompt_sets, plan.suite.mode, plan.section.batch_size)


def _find(name: str, haystack: str | None, completion: str | None) -> Task:
    if name == "completion" and completion is not None:
        return CompletionFileTask(load_completion_file(Path(completion).expanduser()))
    return find_task(name, haystack)


def _fitting(
    tasks: Sequence[Task], length: int, context: int | None, tokenizer: PreTrainedTokenizerBase
) -> tuple[tuple[Task, ...], list[str]]:
    """The tasks that fit the suite's own length, and what to say about the others."""
    if context is not None and context < length:
        names = ", ".join(task.name for task in tasks)
        return (), [f"not measured: {names} at {length} tokens, since the config names a context of {context}"]
    kept, notes = [], []
    for task, minimum in minimum_lengths(tasks, tokenizer):
        if minimum <= length:
            kept.append(task)
        else:
            notes.append(
                f"not measured: {task.name} needs {minimum} tokens of this tokenizer and the suite has {length}"
            )
    return tuple(kept), notes


def _refuse_beyond_context(lengths: Sequence[int], option: str, context: int | None) -> None:
    longest = max(lengths, default=0)
    if context is not None and longest > context:
        raise RequestError(
            f"--{option} {longest} is over the {context} tokens of context that the model's config names; ask for "
            f"{context} or fewer, or add --allow-extrapolation."
        )


def _context_length(decoder: PretrainedConfig) -> int | None:
    length: object = decoder.to_dict().get("max_position_embeddings")
    return length if isinstance(length, int) else None


def _open_text(name: str) -> DocumentStream:
    source = TextSource(name)
    return open_documents(held_out_source(source) or source) if name == DEMO else open_documents(source)


def _windows(plan: EvaluationPlan, stream: DocumentStream) -> list[Window]:
    suite, section = plan.suite, plan.section
    stride = section.stride or max(1, suite.window_length // 2)
    step = stride if section.windowing == "sliding" else suite.window_length
    documents = _encode(plan, stream, suite.window_length + suite.windows * step)
    if section.windowing == "sliding":
        return sliding_windows(documents, suite.window_length, stride, suite.windows)
    if section.windowing == "rolling":
        return rolling_windows(documents, suite.window_length, _prefix_token(plan.tokenizer), suite.windows)
    return disjoint_windows(documents, suite.window_length, suite.windows)


def _encode(plan: EvaluationPlan, stream: DocumentStream, limit: int) -> list[Document]:
    """Whole documents until there are `limit` tokens, the last one cut there."""
    documents: list[Document] = []
    tokens = 0
    for document in stream:
        if tokens >= limit or len(documents) == MOST_DOCUMENTS:
            break
        if isinstance(document, TextDocument):
            encoded = encode_document(plan.tokenizer, _beginning(document, limit - tokens), limit - tokens)
            documents.append(encoded)
            tokens += len(encoded.tokens)
    if not documents:
        raise RequestError(f"the text {stream.source.name} holds conversations only; perplexity needs plain text.")
    return documents


def _beginning(document: TextDocument, tokens: int) -> str:
    """Enough characters for `tokens` tokens, of which none is expected to hold more than 32."""
    parts: list[str] = []
    size = 0
    for chunk in document.chunks:
        parts.append(chunk)
        size += len(chunk)
        if size >= 32 * tokens:
            break
    return "".join(parts)


def _prefix_token(tokenizer: PreTrainedTokenizerBase) -> int:
    for token in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if isinstance(token, int):
            return token
    raise RequestError(
        "rolling windows begin with a BOS or EOS token and the tokenizer has neither; use --windowing disjoint."
    )


def _read_text(name: str) -> str:
    try:
        return Path(name).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"the haystack {name} cannot be read ({error}); give a UTF-8 text file.") from error
