"""What a cut of benchmarks.selectors is asked, and the original's answers, which are computed once."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput
from transformers.utils.generic import ModelOutput

from benchmarks.cuts import Bench, figures_of
from benchmarks.resumable import Row
from compressor.evaluation.measure import Material, compare, measure
from compressor.evaluation.results import mean_of_scores, score_of

Difference = tuple[float, float | None]
"""Of two memory scores in points, and its standard error."""


class RememberedModel:
    """A causal language model that runs its decoder once for each batch it is asked, and keeps what came out.

    Kept are the last hidden states, on the model's device: a small share of the logits. Those are made anew by the
    model's own class, which may cast and scale on the way there.
    """

    def __init__(self, model: PreTrainedModel, decoder: nn.Module) -> None:
        self._model = model
        self._decoder = decoder
        self._known: dict[tuple[torch.Size, str], ModelOutput] = {}
        self.config: PreTrainedConfig = model.config
        self.device: torch.device = model.device

    def __call__(self, input_ids: Tensor, use_cache: bool) -> CausalLMOutput:
        key = (input_ids.shape, hashlib.sha256(input_ids.cpu().numpy().tobytes()).hexdigest())
        if key not in self._known:
            self._known[key] = self._decoder(input_ids=input_ids, use_cache=use_cache)
        with _giving(self._decoder, self._known[key]):
            answer: CausalLMOutput = self._model(input_ids=input_ids, use_cache=use_cache)
        return answer


@contextmanager
def _giving(module: nn.Module, output: ModelOutput) -> Iterator[None]:
    """Inside, `module` gives `output`, whatever it is asked."""
    forward = module.forward
    module.forward = lambda *arguments, **named: output
    try:
        yield
    finally:
        module.forward = forward


@dataclass(frozen=True, slots=True, eq=False)
class Questions:
    """`original` answers as `bench.original` does. `compared` gives the KL too, `more` scores of further prompts."""

    bench: Bench
    original: PreTrainedModel
    compared: Material
    more: Material | None


def questions(bench: Bench, prompts: int) -> Questions:
    """The texts and the first `prompts` of each task are compared; the others of the bench's are more."""
    material, model = bench.material, bench.original
    first, others = (
        tuple(replace(each, prompts=each.prompts[part], encoded=each.encoded[part]) for each in material.prompt_sets)
        for part in (slice(prompts), slice(prompts, None))
    )
    more = replace(material, texts=(), prompt_sets=others) if all(each.prompts for each in others) else None
    # It has all that a reference is asked for, but is no module.
    original = cast("PreTrainedModel", RememberedModel(model, bench.source.architecture.decoder(model)))
    return Questions(bench, original, replace(material, prompt_sets=first), more)


def answers(asked: Questions, more: bool) -> Row:
    """Figures of `bench.cut` as it stands, as `benchmarks.cuts.measure_cut` has them; memory with `more` prompts.

    `scores` are those of each prompt, a word each.
    """
    bench = asked.bench
    _, measured = compare(asked.original, bench.cut, bench.tokenizer, asked.compared, lambda tokens: None)
    scores = {task.task: list(task.scores) for task in measured.tasks}
    if more and asked.more is not None:
        for task in measure(bench.cut, bench.tokenizer, asked.more, lambda tokens: None).tasks:
            scores[task.task] += task.scores
    memory = mean_of_scores([score_of(values) for values in scores.values()])
    error = None if memory is None else memory.standard_error
    return {
        **figures_of(bench, measured),
        "memory": None if memory is None else round(100 * memory.mean, 2),
        "memory_standard_error": None if error is None else round(100 * error, 2),
        "tasks": {task: round(100 * math.fsum(values) / len(values), 2) for task, values in scores.items()},
        "scores": {task: " ".join(f"{value:.6g}" for value in values) for task, values in scores.items()},
    }


def memory_difference(figures: Mapping[str, Row], others: Mapping[str, Row]) -> Difference | None:
    """`figures` less `others`, paired, over the prompts that both were asked; None where a task lacks such.

    Tasks count alike, and their prompts as independent: the standard error is sqrt(sum SE_t^2) / tasks.
    """
    changes = []
    for task, words in figures["scores"].items():
        both = zip(_values(words), _values(others["scores"].get(task, "")), strict=False)
        values = [one - other for one, other in both]
        if not values:
            return None
        changes.append(score_of(values))
    mean = mean_of_scores(changes)
    if mean is None:
        return None
    return 100 * mean.mean, None if mean.standard_error is None else 100 * mean.standard_error


def _values(words: str) -> Sequence[float]:
    return [float(word) for word in words.split()]
