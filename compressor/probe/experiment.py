"""The truncation experiment: loss on text and on the answers of prompts, by the rank that states are cut to.

Everything is paired: each cut is compared with the model as it is on the same tokens, and standard errors are taken of
the differences, over documents or prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from compressor.evaluation.estimates import Estimate
from compressor.evaluation.forward import TokenFigures
from compressor.evaluation.prompt_sets import PromptSet
from compressor.evaluation.results import Score, score_of
from compressor.evaluation.text_loss import COPY_DISTANCE, PositionBucket, TextFigures, summarise
from compressor.evaluation.windows import Window
from compressor.probe.states import Probed
from compressor.probe.truncation import Cut, Reading, measure_cut

OnTokens = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Loss:
    """Nats a token: all, by the number of tokens read before, and tokens that end a bigram seen long before."""

    all: Estimate
    by_position: tuple[PositionBucket, ...]
    copied: Estimate
    rest: Estimate


@dataclass(frozen=True, slots=True)
class RankOnText:
    """`rank` None is the model as it is, which `difference` is taken to. `exact` is the share of states that took an
    SVD."""

    rank: int | None
    loss: Loss
    difference: Loss | None
    exact: float


@dataclass(frozen=True, slots=True)
class RankOnTask:
    """Prompts of one task, teacher-forced: the match of the answers as `compress evaluate` scores it, and their loss.

    Attributes:
        answer_loss: nats a token of the answers, mean over prompts.
        score_difference, loss_difference: to the model as it is; None for itself.
    """

    task: str
    length: int
    rank: int | None
    score: Score
    answer_loss: Score
    score_difference: Score | None
    loss_difference: Score | None


def truncate_on_text(
    probed: Probed,
    documents: Sequence[Tensor],
    dense: Sequence[TokenFigures],
    ranks: Sequence[int],
    reading: Reading,
    on_tokens: OnTokens,
) -> tuple[RankOnText, ...]:
    """The model as it is, whose figures `dense` of the documents are known, then each rank.

    Raises:
        RunError: a state or a loss is NaN or infinite.
    """
    found = [RankOnText(None, loss_of(documents, dense), None, 0.0)]
    for rank in ranks:
        cut = measure_cut(probed, documents, Cut(rank), reading, on_tokens)
        difference = loss_difference(documents, cut.figures, dense)
        found.append(RankOnText(rank, loss_of(documents, cut.figures), difference, cut.exact))
    return tuple(found)


def truncate_on_tasks(
    probed: Probed,
    prompt_sets: Sequence[PromptSet],
    ranks: Sequence[int],
    reading: Reading,
    on_tokens: OnTokens,
) -> tuple[RankOnTask, ...]:
    """Each task with the model as it is, then with each rank.

    Raises:
        RunError: a state or a loss is NaN or infinite.
    """
    found = []
    for prompts in prompt_sets:
        sequences = [tokens.whole for tokens in prompts.encoded]
        before: tuple[Tensor, Tensor] | None = None
        for rank in (None, *ranks):
            cut = None if rank is None else Cut(rank)
            figures = measure_cut(probed, sequences, cut, reading, on_tokens).figures
            scores, losses = task_scores(prompts, figures), answer_losses(prompts, figures)
            found.append(
                RankOnTask(
                    task=prompts.task.name,
                    length=prompts.length,
                    rank=rank,
                    score=score_of(scores.tolist()),
                    answer_loss=score_of(losses.tolist()),
                    score_difference=None if before is None else score_of((scores - before[0]).tolist()),
                    loss_difference=None if before is None else score_of((losses - before[1]).tolist()),
                )
            )
            before = (scores, losses) if before is None else before
    return tuple(found)


def task_scores(prompts: PromptSet, figures: Sequence[TokenFigures]) -> Tensor:
    """The match of every prompt's answers, float64 [prompts], as teacher-forced evaluation scores it."""
    scores = []
    for prompt, tokens, figure in zip(prompts.prompts, prompts.encoded, figures, strict=True):
        right = [bool(figure.correct[first - 1 : last - 1].all()) for first, last in tokens.answers]
        scores.append(float(any(right)) if prompt.match == "part" else sum(right) / len(right))
    return torch.tensor(scores, dtype=torch.float64)


def answer_losses(prompts: PromptSet, figures: Sequence[TokenFigures]) -> Tensor:
    """Nats a token of every prompt's answers, float64 [prompts]."""
    losses = []
    for tokens, figure in zip(prompts.encoded, figures, strict=True):
        parts = [figure.losses[first - 1 : last - 1].double() for first, last in tokens.answers]
        losses.append(torch.cat(parts).mean())
    return torch.stack(losses)


def loss_of(documents: Sequence[Tensor], figures: Sequence[TokenFigures]) -> Loss:
    """Of all tokens of the documents but the first of each; standard errors are taken over documents."""
    windows = [Window(document, len(document) - 1, number) for number, document in enumerate(documents)]
    summary: TextFigures = summarise(windows, figures, COPY_DISTANCE)
    return Loss(summary.loss, summary.by_position, summary.copied, summary.rest)


def loss_difference(documents: Sequence[Tensor], after: Sequence[TokenFigures], before: Sequence[TokenFigures]) -> Loss:
    """`after` less `before`, of the same tokens: standard errors are those of the differences."""
    return loss_of(documents, [_less(*pair) for pair in zip(after, before, strict=True)])


def _less(figures: TokenFigures, dense: TokenFigures) -> TokenFigures:
    """The same tokens with the change of their losses."""
    return replace(figures, losses=figures.losses.double() - dense.losses.double())
