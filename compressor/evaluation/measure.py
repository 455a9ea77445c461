"""Texts and prompts put to one model, or to a model and the one it is compared with, in the same passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from compressor.evaluation.asking import (
    PromptResult,
    ask_by_generation,
    ask_teacher_forced,
    compare_teacher_forced,
)
from compressor.evaluation.prompt_sets import PromptSet
from compressor.evaluation.results import Mode, NamedText, TaskFigures, score_of
from compressor.evaluation.text_loss import compare_text, measure_text
from compressor.evaluation.windows import Window

OnTokens = Callable[[int], None]


@dataclass(frozen=True, slots=True, eq=False)
class NamedWindows:
    """One text source, cut into windows."""

    name: str
    windows: tuple[Window, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Material:
    """Everything that is put to a model; made before any model is loaded.

    `notes` say what is less than was asked for.
    """

    texts: tuple[NamedWindows, ...]
    prompt_sets: tuple[PromptSet, ...]
    mode: Mode
    batch_size: int
    notes: tuple[str, ...] = ()

    def tokens(self, models: int) -> int:
        """Tokens that `models` models read, as `on_tokens` counts them."""
        windows = sum(len(window.tokens) for text in self.texts for window in text.windows)
        prompts = sum(prompt_set.tokens for prompt_set in self.prompt_sets)
        asked = sum(len(prompt.prompt) for prompt_set in self.prompt_sets for prompt in prompt_set.encoded)
        return windows + prompts + (models * asked if self.mode == "generation" else 0)


@dataclass(frozen=True, slots=True)
class Measured:
    """Figures of one model on the material."""

    texts: tuple[NamedText, ...]
    tasks: tuple[TaskFigures, ...]


def measure(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, material: Material, on_tokens: OnTokens
) -> Measured:
    """Figures of one model, without divergences.

    Raises:
        RequestError, RunError: see `forward_tokens` and `ask_by_generation`.
    """
    size = material.batch_size
    texts = [
        NamedText(text.name, measure_text(model, text.windows, size, on_tokens=on_tokens)) for text in material.texts
    ]
    results = [
        ask_teacher_forced(model, prompts.prompts, prompts.encoded, size, on_tokens) for prompts in material.prompt_sets
    ]
    return Measured(tuple(texts), _tasks_figures(model, tokenizer, material, results, on_tokens))


def compare(
    reference: PreTrainedModel,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    material: Material,
    on_tokens: OnTokens,
) -> tuple[Measured, Measured]:
    """Figures of `reference` and of `model`, these with KL(reference || model).

    Raises:
        RequestError, RunError: see `forward_tokens` and `ask_by_generation`.
    """
    size = material.batch_size
    texts = [
        (text.name, compare_text(reference, model, text.windows, size, on_tokens=on_tokens)) for text in material.texts
    ]
    pairs = [
        compare_teacher_forced(reference, model, prompts.prompts, prompts.encoded, size, on_tokens)
        for prompts in material.prompt_sets
    ]
    before, after = (
        _tasks_figures(asked, tokenizer, material, [pair[side] for pair in pairs], on_tokens)
        for side, asked in enumerate((reference, model))
    )
    return (
        Measured(tuple(NamedText(name, pair[0]) for name, pair in texts), before),
        Measured(tuple(NamedText(name, pair[1]) for name, pair in texts), after),
    )


def _tasks_figures(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    material: Material,
    results: Sequence[Sequence[PromptResult]],
    on_tokens: OnTokens,
) -> tuple[TaskFigures, ...]:
    """Figures of every prompt set from its teacher-forced `results`, and from generation where that is asked for."""
    sets = material.prompt_sets
    generated = (
        _generate(model, tokenizer, material, on_tokens) if material.mode == "generation" else [None] * len(sets)
    )
    return tuple(_task_figures(*parts) for parts in zip(sets, results, generated, strict=True))


def _generate(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, material: Material, on_tokens: OnTokens
) -> list[list[float]]:
    """Scores of greedy generation, a list a prompt set. All are asked together, so that batches are of like length."""
    sets = material.prompt_sets
    answers = ask_by_generation(
        model,
        tokenizer,
        [prompt for each in sets for prompt in each.prompts],
        [tokens for each in sets for tokens in each.encoded],
        {each.task.name: each.task.tokens_to_generate for each in sets},
        material.batch_size,
        on_tokens,
    )
    scores = iter(answer.score for answer in answers)
    return [list(islice(scores, len(each.prompts))) for each in sets]


def _task_figures(
    prompts: PromptSet, results: Sequence[PromptResult], generated: Sequence[float] | None
) -> TaskFigures:
    scores = [result.score for result in results] if generated is None else list(generated)
    kl = [result.kl for result in results if result.kl is not None]
    kl_answers = [result.kl_answers for result in results if result.kl_answers is not None]
    return TaskFigures(
        task=prompts.task.name,
        length=prompts.length,
        samples=len(results),
        seen=prompts.seen,
        mode="teacher-forced" if generated is None else "generation",
        prompts_sha256=prompts.sha256,
        score=score_of(scores),
        token_accuracy=score_of([result.token_accuracy for result in results]),
        kl=score_of(kl) if kl else None,
        kl_answers=score_of(kl_answers) if kl_answers else None,
        scores=tuple(scores),
    )
