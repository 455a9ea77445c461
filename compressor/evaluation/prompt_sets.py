"""The prompts of an evaluation, made and encoded before any model runs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from compressor.errors import RequestError
from compressor.evaluation.prompt_tokens import PromptTokens, TokenCounter, encode_prompts
from compressor.prompts.base import Prompt, Task
from compressor.prompts.registry import UNSEEN, generate_prompts


@dataclass(frozen=True, slots=True, eq=False)
class PromptSet:
    """Prompts of one form and length, and their tokens in the same order."""

    task: Task
    length: int
    prompts: tuple[Prompt, ...]
    encoded: tuple[PromptTokens, ...]

    @property
    def seen(self) -> bool:
        """Whether calibration, refit or distillation may use the form."""
        return self.task.name not in UNSEEN

    @property
    def tokens(self) -> int:
        return sum(len(prompt.whole) for prompt in self.encoded)

    @property
    def sha256(self) -> str:
        """Over the ids of prompt and completion of every prompt, as little-endian 64-bit integers."""
        digest = hashlib.sha256()
        for prompt in self.encoded:
            for part in (prompt.prompt, prompt.whole):
                digest.update(len(part).to_bytes(8, "little"))
                digest.update(part.numpy().astype("<i8").tobytes())
        return digest.hexdigest()


def make_prompt_sets(
    tasks: Sequence[Task],
    lengths: Sequence[int],
    samples: int,
    seed: int,
    tokenizer: PreTrainedTokenizerBase,
    vocab_size: int,
    on_prompts: Callable[[int], None] = lambda prompts: None,
) -> tuple[PromptSet, ...]:
    """`samples` prompts of every task at every length, of the evaluation split.

    Raises:
        RequestError: a length shorter than a form needs, no samples, or a tokenizer without tokens for them.
    """
    check_lengths(tasks, lengths, tokenizer)
    sets = []
    for length in lengths:
        for task in tasks:
            counted: dict[str, Sequence[int]] = {}
            count_tokens = TokenCounter(tokenizer, counted)
            prompts = generate_prompts(task, samples, length, count_tokens, seed, "evaluation")
            encoded = encode_prompts(tokenizer, prompts, vocab_size, counted)
            sets.append(PromptSet(task, length, prompts, tuple(encoded)))
            on_prompts(samples)
    return tuple(sets)


def check_lengths(
    tasks: Sequence[Task],
    lengths: Sequence[int],
    tokenizer: PreTrainedTokenizerBase,
    lengths_name: str = "lengths",
    tasks_name: str = "tasks",
) -> None:
    """Refuse every length that is too short for one of the tasks, all of them in one message.

    The names are those that the user knows the two as.

    Raises:
        RequestError: as said.
    """
    shortest = min(lengths)
    needs = {task.name: minimum for task, minimum in minimum_lengths(tasks, tokenizer) if minimum > shortest}
    if needs:
        listed = ", ".join(f"{name} {minimum}" for name, minimum in needs.items())
        raise RequestError(
            f"length {shortest} is too short; with this tokenizer these tasks need more tokens for prompt and output: "
            f"{listed}; raise {lengths_name} or leave them out of {tasks_name}."
        )


def minimum_lengths(tasks: Sequence[Task], tokenizer: PreTrainedTokenizerBase) -> list[tuple[Task, int]]:
    """Fewest tokens of each task.

    Raises:
        RequestError: the tokenizer gives no tokens.
    """
    count_tokens = TokenCounter(tokenizer)
    if count_tokens("The grass is green.") <= count_tokens(""):
        raise RequestError("the tokenizer gives no tokens for a sentence; name a model whose tokenizer is complete.")
    return [(task, task.minimum_length(count_tokens)) for task in tasks]
