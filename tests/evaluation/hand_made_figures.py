"""Records of models that nobody measured."""

from __future__ import annotations

import torch

from compressor.evaluation.forward import TokenFigures
from compressor.evaluation.results import ModelFigures, ModelSource, NamedText, TaskFigures, collect, score_of
from compressor.evaluation.text_loss import summarise
from compressor.evaluation.windows import Window


def task(
    name: str, *scores: float, sha256: str = "same", seen: bool = True, kl: float | None = None, length: int = 512
) -> TaskFigures:
    """Token accuracies are the scores; `kl` is that of every prompt."""
    score, divergence = score_of(scores), None if kl is None else score_of([kl] * len(scores))
    return TaskFigures(
        name, length, len(scores), seen, "teacher-forced", sha256, score, score, divergence, divergence, scores
    )


def text(name: str, losses: list[list[float]], kl: float | None = None, first_token: int = 0) -> NamedText:
    """A window for each list of losses; the same `first_token` is the same text."""
    windows = [
        Window(torch.arange(len(part) + 1) + first_token, len(part), cluster) for cluster, part in enumerate(losses)
    ]
    figures = [
        TokenFigures(
            losses=torch.tensor(part),
            correct=torch.zeros(len(part), dtype=torch.bool),
            kl=None if kl is None else torch.full((len(part),), kl),
        )
        for part in losses
    ]
    return NamedText(name, summarise(windows, figures, 512))


def model(
    name: str,
    *tasks: TaskFigures,
    texts: tuple[NamedText, ...] = (),
    reference: str | None = None,
    given: str | None = None,
    state_bytes: int = 4096,
) -> ModelFigures:
    source = None if given is None else ModelSource(given, None, "0", "0")
    return collect(name, 64, state_bytes, reference, texts, tasks, None, source)
