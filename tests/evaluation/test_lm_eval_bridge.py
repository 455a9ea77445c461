"""lm-eval on a CPU with tasks and data of this folder's own; the oracle is the model's log-softmax, taken here."""

from __future__ import annotations

import copy
import json
import math
import random
import re
import statistics
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from lm_eval.api.metrics import mean_stderr
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from compressor.architectures.registry import find_architecture
from compressor.calibration.tokenizer import load_tokenizer
from compressor.checkpoint.config_file import CONFIG_FILE, read_config
from compressor.errors import RequestError
from compressor.evaluation.lm_eval_bridge import (
    LmEvalFigures,
    LmEvalMetric,
    LmEvalTaskFigures,
    run_lm_eval,
    six_task_average,
)
from compressor.evaluation.lm_eval_samples import document_values, standard_error
from compressor.evaluation.lm_eval_tasks import LmEvalTasks, check_lm_eval_tasks
from compressor.evaluation.task_names import SIX_TASKS
from compressor.loading import load_model
from tests.evaluation.local_lm_eval_tasks import GENERATIONS, PAGES, QUESTIONS, TASKS, write_local_tasks, write_task


@pytest.fixture(scope="module")
def task_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    write_local_tasks(folder)
    return folder


@pytest.fixture(scope="module")
def model(demo_model: Path) -> PreTrainedModel:
    raw_config = read_config(demo_model / CONFIG_FILE)
    architecture = find_architecture(raw_config["model_type"])
    return load_model(architecture, demo_model, raw_config, torch.float32, torch.device("cpu"))


@pytest.fixture(scope="module")
def tokenizer(demo_model: Path) -> PreTrainedTokenizerBase:
    return load_tokenizer(demo_model, trust_remote_code=False)


@pytest.fixture(scope="module")
def tasks(task_folder: Path) -> LmEvalTasks:
    return check_lm_eval_tasks(tuple(TASKS), task_folder)


@pytest.fixture(scope="module")
def figures(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tasks: LmEvalTasks) -> LmEvalFigures:
    return run_lm_eval(model, tokenizer, tasks, batch_size=3)


@torch.no_grad()
def log_probabilities(model: PreTrainedModel, context: Sequence[int], continuation: Sequence[int]) -> torch.Tensor:
    """float64 log p of each continuation token, one sequence, no padding."""
    ids = torch.tensor([[*context, *continuation]])
    rows = model(input_ids=ids, use_cache=False).logits[0, len(context) - 1 : -1].double().log_softmax(-1)
    return rows[torch.arange(len(continuation)), torch.tensor(list(continuation))]


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer(text)["input_ids"])


def continuation_loss(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, context: str, rest: str) -> float:
    whole, start = encode(tokenizer, context + rest), encode(tokenizer, context)
    return float(log_probabilities(model, whole[: len(start)], whole[len(start) :]).sum())


def metric(figures: LmEvalFigures, task: str, name: str) -> LmEvalMetric:
    return figures.tasks[task].metrics[name]


def test_multiple_choice_is_the_largest_log_likelihood(
    figures: LmEvalFigures, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    right, right_norm = [], []
    for row in QUESTIONS:
        scores = [continuation_loss(model, tokenizer, row["question"], f" {choice}") for choice in row["choices"]]
        per_byte = [score / len(choice) for score, choice in zip(scores, row["choices"], strict=True)]
        right.append(float(scores.index(max(scores)) == row["gold"]))
        right_norm.append(float(per_byte.index(max(per_byte)) == row["gold"]))
    assert right != right_norm  # else the test would not tell the two apart
    assert metric(figures, "local_choice", "acc").documents == tuple(right)
    assert metric(figures, "local_choice", "acc_norm").documents == tuple(right_norm)
    assert metric(figures, "local_choice", "acc").value == pytest.approx(statistics.fmean(right))
    assert metric(figures, "local_choice", "acc").standard_error == pytest.approx(mean_stderr(right))


def test_rolling_perplexity_is_that_of_the_model(
    figures: LmEvalFigures, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    start = tokenizer.bos_token_id
    losses = [-float(log_probabilities(model, [start], encode(tokenizer, row["page"])).sum()) for row in PAGES]
    words = sum(len(re.split(r"\s+", row["page"])) for row in PAGES)
    size = sum(len(row["page"].encode()) for row in PAGES)
    total = math.fsum(losses)
    assert metric(figures, "local_page", "word_perplexity").value == pytest.approx(math.exp(total / words), rel=1e-5)
    assert metric(figures, "local_page", "byte_perplexity").value == pytest.approx(math.exp(total / size), rel=1e-5)
    assert metric(figures, "local_page", "bits_per_byte").value == pytest.approx(total / size / math.log(2), rel=1e-5)
    for name in ("word_perplexity", "byte_perplexity", "bits_per_byte"):
        figure = metric(figures, "local_page", name)
        assert statistics.fmean(figure.documents) == pytest.approx(figure.value)
        assert figure.standard_error is not None
        assert figure.standard_error > 0


def test_last_word_perplexity_and_accuracy(
    figures: LmEvalFigures, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    scores, right = [], []
    for row in PAGES:
        head, _, last = row["page"].rpartition(" ")
        scores.append(continuation_loss(model, tokenizer, head, f" {last}"))
        right.append(float(greedy(model, tokenizer, head, len(encode(tokenizer, f" {last}"))) == f" {last}"))
    perplexity = metric(figures, "local_last_word", "perplexity")
    assert perplexity.value == pytest.approx(math.exp(-statistics.fmean(scores)), rel=1e-5)
    assert perplexity.standard_error == pytest.approx(
        perplexity.value * statistics.stdev(scores) / math.sqrt(len(PAGES)), rel=1e-4
    )
    assert metric(figures, "local_last_word", "acc").documents == tuple(right)


@torch.no_grad()
def greedy(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str, steps: int) -> str:
    """Greedy continuation without a cache, until a newline."""
    ids = encode(tokenizer, text)
    start = len(ids)
    for _ in range(steps):
        ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return tokenizer.decode(ids[start:], skip_special_tokens=True).split("\n")[0]


def test_generation_is_greedy_decoding(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, task_folder: Path, tmp_path: Path
) -> None:
    wanted = [greedy(model, tokenizer, row["text"], 12) for row in GENERATIONS]
    assert len({len(encode(tokenizer, row["text"])) for row in GENERATIONS}) < len(GENERATIONS)  # one batch has two
    rows = [row | {"value": text} for row, text in zip(GENERATIONS, wanted, strict=True)]
    rows[1]["value"] = "something else"
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    fields = TASKS["local_generation"][1] | {"dataset_kwargs": {"data_files": {"test": str(data)}}}
    fields["metric_list"] = [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}]
    fields["target_delimiter"] = ""
    write_task(tmp_path, "greedy", fields)
    found = run_lm_eval(model, tokenizer, check_lm_eval_tasks(["greedy"], tmp_path), batch_size=4)
    assert metric(found, "greedy", "exact_match").documents == (1.0, 0.0, 1.0, 1.0)


@pytest.mark.slow
def test_a_second_run_and_another_batch_size_give_the_same(
    figures: LmEvalFigures, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tasks: LmEvalTasks
) -> None:
    again = run_lm_eval(model, tokenizer, tasks, batch_size=1)
    assert again.tasks.keys() == figures.tasks.keys() == TASKS.keys()
    for task, found in again.tasks.items():
        for name, value in found.metrics.items():
            assert value.value == pytest.approx(metric(figures, task, name).value, rel=1e-5)


def test_a_run_leaves_model_tokenizer_and_generators_alone(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tasks: LmEvalTasks
) -> None:
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    before = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())  # type: ignore[index]
    pad, tokenizer_pad = tokenizer.pad_token, None
    tokenizer.pad_token = tokenizer_pad
    try:
        run_lm_eval(model, tokenizer, tasks, limit=1)
        assert tokenizer.pad_token is None
    finally:
        tokenizer.pad_token = pad
    after = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())  # type: ignore[index]
    assert before == after
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


def test_what_was_run_is_recorded(
    figures: LmEvalFigures, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tasks: LmEvalTasks
) -> None:
    assert figures.tasks["local_choice"].version == "3.0"
    assert (figures.tasks["local_choice"].samples, figures.tasks["local_choice"].available) == (4, 4)
    assert figures.max_length == model.config.max_position_embeddings
    limited = run_lm_eval(model, tokenizer, tasks, limit=2, max_length=64)
    assert (limited.tasks["local_choice"].samples, limited.tasks["local_choice"].available) == (2, 4)
    assert (limited.limit, limited.max_length, limited.six_task_average) == (2, 64, None)


def test_six_task_average_takes_the_papers_metrics() -> None:
    def task(index: int) -> LmEvalTaskFigures:
        metrics = {
            name: LmEvalMetric(value, None, True, ()) for name, value in (("acc", index), ("acc_norm", 10 * index))
        }
        return LmEvalTaskFigures("1", 0, 1, 1, metrics)

    names = ["arc_easy", "arc_challenge", "hellaswag", "piqa", "winogrande", "lambada_openai"]
    assert list(SIX_TASKS) == names
    found = {name: task(index) for index, name in enumerate(names)}
    assert six_task_average(found) == pytest.approx((0 + 10 + 20 + 30 + 4 + 5) / 6)
    del found["piqa"]
    assert six_task_average(found) is None


@pytest.mark.parametrize("kind", ["mean", "perplexity", "weighted", "bits"])
def test_standard_errors_are_those_of_resampling(kind: str) -> None:
    generator = np.random.default_rng(7)
    weights = generator.integers(20, 200, 400).astype(float)
    losses = -weights * generator.gamma(4.0, 0.3, 400)

    def aggregate(rows: np.ndarray) -> float:
        ratio = losses[rows].sum() / weights[rows].sum()
        rate = losses[rows] / weights[rows]
        return {
            "mean": float(rate.mean()),
            "perplexity": math.exp(-rate.mean()),
            "weighted": math.exp(-ratio),
            "bits": -ratio / math.log(2),
        }[kind]

    value = aggregate(np.arange(400))
    pairs = list(zip(losses.tolist(), weights.tolist(), strict=True))
    samples = pairs if kind in ("weighted", "bits") else [a / b for a, b in pairs]
    resampled = statistics.stdev(aggregate(generator.integers(0, 400, 400)) for _ in range(2000))
    documents = document_values(samples, value)
    assert statistics.fmean(documents) == pytest.approx(value)
    assert standard_error(documents) == pytest.approx(resampled, rel=0.1)


def test_unknown_aggregates_have_no_standard_error() -> None:
    assert document_values([1.0, 0.0, 0.5], 0.77) == ()
    assert document_values([(1.0, 2.0)], 0.77) == ()
    assert standard_error(()) is None
    assert standard_error((0.5,)) is None


def test_numbers_that_are_too_small(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tasks: LmEvalTasks
) -> None:
    with pytest.raises(RequestError, match="the limit of lm-eval is 0, and it must be at least 1; give a larger one."):
        run_lm_eval(model, tokenizer, tasks, limit=0)
    with pytest.raises(RequestError, match="the batch size of lm-eval is -1, and it must be at least 1"):
        run_lm_eval(model, tokenizer, tasks, batch_size=-1)


def test_a_tokenizer_without_a_first_token(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tasks: LmEvalTasks
) -> None:
    bare = copy.deepcopy(tokenizer)
    bare.bos_token = bare.eos_token = None
    with pytest.raises(RequestError, match="the tokenizer has neither a BOS nor an EOS token, and lm-eval needs one"):
        run_lm_eval(model, bare, tasks)
