"""What an evaluation found: one record a model, which JSON holds and two of which can be paired."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from compressor.evaluation.lm_eval_bridge import LmEvalFigures
from compressor.evaluation.text_loss import TextFigures

Mode = Literal["teacher-forced", "generation"]
"""How prompts are asked: one pass over the ideal completion, or greedy generation with the cache."""


@dataclass(frozen=True, slots=True)
class Score:
    """A mean and its standard error; None with fewer than two values."""

    mean: float
    standard_error: float | None


@dataclass(frozen=True, slots=True)
class TaskFigures:
    """One prompt form at one length.

    Attributes:
        seen: whether calibration, refit or distillation may use the form.
        prompts_sha256: hash of the prompts' tokens; scores of two models pair where it is the same.
        score: mean of `scores`, in [0, 1], the task's own match of the answers (RULER's).
        token_accuracy: share of the ideal completion's tokens that are the model's most probable ones.
        kl, kl_answers: KL(reference || model) in nats a token over prompt and completion, and over the
            completion alone; None without a reference.
        scores: one a prompt.
    """

    task: str
    length: int
    samples: int
    seen: bool
    mode: Mode
    prompts_sha256: str
    score: Score
    token_accuracy: Score
    kl: Score | None
    kl_answers: Score | None
    scores: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class NamedText:
    """Figures of one text source."""

    name: str
    figures: TextFigures


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Which model was measured.

    `given` is the folder or Hub id as the user wrote it, None for the bundled model; `revision` the commit of a
    Hub model. `weights_sha256` is `checkpoint.fingerprint`'s, `tokenizer_sha256` `tokenizer_identity`'s.
    """

    given: str | None
    revision: str | None
    weights_sha256: str
    tokenizer_sha256: str


@dataclass(frozen=True, slots=True)
class ModelFigures:
    """Everything measured of one model.

    `reference` is the model that divergences are taken to, None where there is none. `seen` and `unseen`
    are mean scores over the tasks of those kinds, None where there is no such task. `source` is None in a
    run's own report, which names the models elsewhere.
    """

    model: str
    key_dim: int
    state_bytes_per_sequence: int
    reference: str | None
    texts: tuple[NamedText, ...]
    tasks: tuple[TaskFigures, ...]
    seen: Score | None
    unseen: Score | None
    kl_text: float | None
    kl_prompts: float | None
    lm_eval: LmEvalFigures | None = None
    source: ModelSource | None = None


@dataclass(frozen=True, slots=True)
class Difference:
    """`after` - `before` of one figure; `paired` where both models were asked the same."""

    name: str
    before: float
    after: float
    difference: float
    standard_error: float | None
    paired: bool


def score_of(values: Sequence[float]) -> Score:
    """Mean and standard error of independent values, at least one."""
    mean = math.fsum(values) / len(values)
    if len(values) < 2:
        return Score(mean, None)
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return Score(mean, math.sqrt(variance / len(values)))


def mean_of_scores(scores: Sequence[Score]) -> Score | None:
    """Mean over tasks, whose prompts are independent of each other; None over none."""
    if not scores:
        return None
    mean = math.fsum(score.mean for score in scores) / len(scores)
    errors = [score.standard_error for score in scores if score.standard_error is not None]
    if len(errors) < len(scores):
        return Score(mean, None)
    return Score(mean, math.hypot(*errors) / len(scores))


def collect(
    model: str,
    key_dim: int,
    state_bytes_per_sequence: int,
    reference: str | None,
    texts: Sequence[NamedText],
    tasks: Sequence[TaskFigures],
    lm_eval: LmEvalFigures | None = None,
    source: ModelSource | None = None,
) -> ModelFigures:
    """The record of one model, with the means over its texts and tasks."""
    text_kl = [text.figures.kl.mean for text in texts if text.figures.kl is not None]
    prompt_kl = [task.kl.mean for task in tasks if task.kl is not None]
    return ModelFigures(
        model=model,
        key_dim=key_dim,
        state_bytes_per_sequence=state_bytes_per_sequence,
        reference=reference,
        texts=tuple(texts),
        tasks=tuple(tasks),
        seen=mean_of_scores([task.score for task in tasks if task.seen]),
        unseen=mean_of_scores([task.score for task in tasks if not task.seen]),
        kl_text=_mean([value for value in text_kl if value is not None]),
        kl_prompts=_mean(prompt_kl),
        lm_eval=lm_eval,
        source=source,
    )


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None
