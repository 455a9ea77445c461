"""The loaded model on tasks of the installed lm-eval (Gao et al., github.com/EleutherAI/lm-evaluation-harness)."""

from __future__ import annotations

import copy
import logging
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from compressor.errors import RequestError, RunError
from compressor.evaluation.lm_eval_samples import document_values, standard_error
from compressor.evaluation.lm_eval_tasks import LmEvalTasks
from compressor.evaluation.task_names import SIX_TASKS

DEFAULT_MAX_LENGTH = 2048
"""lm-eval's own, for models whose config names no context length."""


@dataclass(frozen=True)
class LmEvalMetric:
    """`value` as lm-eval aggregates it, in its unit: shares in [0, 1], perplexities a token, word or byte, bits.

    `documents` are one number a document, in the order of the data set, with mean `value`: their
    differences between two models give the standard error of the difference. Empty, and
    `standard_error` None, for groups and for metrics that are no mean, perplexity or bits.
    """

    value: float
    standard_error: float | None
    higher_is_better: bool | None
    documents: tuple[float, ...]


@dataclass(frozen=True)
class LmEvalTaskFigures:
    """One task or group: metrics by lm-eval's name, with `,FILTER` after it where a filter is not `none`.

    `samples` documents were asked of the `available` ones.
    """

    version: str
    num_fewshot: int | None
    samples: int
    available: int
    metrics: Mapping[str, LmEvalMetric]


@dataclass(frozen=True)
class LmEvalFigures:
    """Figures by task or group. `max_length` is the window in tokens: `wikitext` depends on it.

    `six_task_average` is the paper's, a share in [0, 1]; None where one of the six is missing.
    """

    tasks: Mapping[str, LmEvalTaskFigures]
    six_task_average: float | None
    lm_eval_version: str
    max_length: int
    limit: int | None
    seed: int


def run_lm_eval(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tasks: LmEvalTasks,
    limit: int | None = None,
    batch_size: int = 8,
    seed: int = 1234,
    max_length: int | None = None,
) -> LmEvalFigures:
    """Hand the model to `lm_eval.simple_evaluate`; `limit` is the most documents a task.

    Log-probabilities are taken in float32 whatever the model's dtype. `max_length` None is the config's
    `max_position_embeddings`, or 2048. The few-shot examples follow `seed`; global random states are put back.
    Texts without context are read after the tokenizer's BOS token, or its EOS token where it has none.
    lm-eval draws its progress on stderr.

    Raises:
        RequestError: a number is too small, or the tokenizer has neither BOS nor EOS token.
        RunError: lm-eval refused the tasks or what they returned.
    """
    for name, number in (("limit", limit), ("batch size", batch_size), ("maximum length", max_length)):
        if number is not None and number < 1:
            raise RequestError(f"the {name} of lm-eval is {number}, and it must be at least 1; give a larger one.")
    if tokenizer.bos_token_id is None and tokenizer.eos_token_id is None:
        raise RequestError("the tokenizer has neither a BOS nor an EOS token, and lm-eval needs one; name one in it.")
    window = max_length or _context_length(model)
    with _quiet_library(), _global_random_states(model.device):
        results = _simple_evaluate(model, copy.deepcopy(tokenizer), tasks, limit, batch_size, seed, window)
    figures = {name: _task_figures(results, name) for name in results["results"]}
    return LmEvalFigures(figures, six_task_average(figures), version("lm_eval"), window, limit, seed)


def six_task_average(tasks: Mapping[str, LmEvalTaskFigures]) -> float | None:
    """Mean of the six accuracies of `SIX_TASKS`; None where one is missing."""
    if not all(task in tasks and metric in tasks[task].metrics for task, metric in SIX_TASKS.items()):
        return None
    return sum(tasks[task].metrics[metric].value for task, metric in SIX_TASKS.items()) / len(SIX_TASKS)


def _simple_evaluate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tasks: LmEvalTasks,
    limit: int | None,
    batch_size: int,
    seed: int,
    max_length: int,
) -> dict[str, Any]:
    import lm_eval

    from compressor.evaluation.lm_eval_model import UnpaddedGeneration

    language_model = UnpaddedGeneration(
        pretrained=model,
        backend="causal",
        tokenizer=tokenizer,
        batch_size=batch_size,
        max_length=max_length,
        softmax_dtype="float32",
    )
    try:
        results: dict[str, Any] = lm_eval.simple_evaluate(
            model=language_model,
            tasks=list(tasks.loaded),
            limit=limit,
            # Its own standard errors would resample perplexities 100,000 times, in a pool of processes.
            bootstrap_iters=0,
            log_samples=True,
            random_seed=seed,
            numpy_random_seed=seed,
            torch_random_seed=seed,
            fewshot_random_seed=seed,
        )
    except (AssertionError, LookupError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise RunError(
            f"lm-eval failed on {', '.join(tasks.names)} ({type(error).__name__}: {reason}); run its tasks one by one."
        ) from error
    return results


def _context_length(model: PreTrainedModel) -> int:
    length: int | None = model.config.get_text_config().to_dict().get("max_position_embeddings")
    return length or DEFAULT_MAX_LENGTH


def _task_figures(results: Mapping[str, Any], name: str) -> LmEvalTaskFigures:
    row = results["results"][name]
    samples = results["samples"].get(name, [])
    count = results["n-samples"].get(name)
    direction = results["higher_is_better"].get(name) or {}
    metrics = {}
    for key, value in row.items():
        metric, comma, filter_name = key.partition(",")
        if comma and not metric.endswith("_stderr") and isinstance(value, int | float):
            documents = document_values(_values(samples, metric, filter_name), float(value))
            shown = metric if filter_name == "none" else key
            metrics[shown] = LmEvalMetric(float(value), standard_error(documents), direction.get(metric), documents)
    return LmEvalTaskFigures(
        version=str(results["versions"].get(name)),
        num_fewshot=results["n-shot"].get(name),
        samples=count["effective"] if count else row["sample_len"],
        available=count["original"] if count else row["sample_len"],
        metrics=metrics,
    )


def _values(samples: Sequence[Mapping[str, Any]], metric: str, filter_name: str) -> list[Any]:
    return [sample[metric] for sample in samples if sample["filter"] == filter_name and metric in sample["metrics"]]


@contextmanager
def _quiet_library() -> Iterator[None]:
    """lm-eval warns on every run that it was given a model and not a name."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextmanager
def _global_random_states(device: torch.device) -> Iterator[None]:
    """lm-eval seeds the generators of Python, NumPy and torch; give them their states back."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
