"""Whether the numbers of one record belong together, which its types alone do not tell."""

from __future__ import annotations

import math
from collections.abc import Iterator

from compressor.evaluation.results import ModelFigures, TaskFigures
from compressor.evaluation.text_loss import TextFigures

_ROUNDING = 1e-9


def inconsistencies(figures: ModelFigures) -> Iterator[str]:
    """One phrase each; none where `compress evaluate` can have written the record."""
    if figures.key_dim < 1 or figures.state_bytes_per_sequence < 1:
        yield f"a key width of {figures.key_dim} and a state of {figures.state_bytes_per_sequence} bytes"
    forms = [(task.task, task.length, task.mode) for task in figures.tasks]
    names = [text.name for text in figures.texts]
    if len(set(forms)) < len(forms) or len(set(names)) < len(names):
        yield "a task or a text that stands there twice"
    for task in figures.tasks:
        yield from (f"{task.task} at {task.length}: {problem}" for problem in _of_task(task))
    for text in figures.texts:
        yield from (f"{text.name}: {problem}" for problem in _of_text(text.figures))


def _of_task(task: TaskFigures) -> Iterator[str]:
    shares = (*task.scores, task.score.mean, task.token_accuracy.mean)
    wrong = [share for share in shares if not 0 <= share <= 1]
    if wrong:
        yield f"a score of {wrong[0]}, outside 0 to 1"
    elif len(task.scores) != task.samples or not task.scores:
        yield f"{len(task.scores)} scores for {task.samples} prompts"
    elif abs(math.fsum(task.scores) / len(task.scores) - task.score.mean) > _ROUNDING:
        yield f"a mean of {task.score.mean} that its scores do not have"


def _of_text(text: TextFigures) -> Iterator[str]:
    tokens = [window.tokens for window in text.window_losses]
    if len(tokens) != text.windows or sum(tokens) != text.tokens or min(tokens, default=0) < 1:
        yield f"losses of {len(tokens)} windows and {sum(tokens)} tokens for {text.windows} and {text.tokens}"
    elif text.loss.mean is None:
        yield "no loss"
    else:
        total = math.fsum(window.loss for window in text.window_losses)
        if not math.isclose(total / text.tokens, text.loss.mean, rel_tol=_ROUNDING, abs_tol=_ROUNDING):
            yield f"a loss of {text.loss.mean} that its windows do not have"
