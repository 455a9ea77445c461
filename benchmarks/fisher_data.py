"""Calibration sequences of the Fisher benchmark, and what its cuts are measured on."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from compressor.calibration.text import TextSource, open_documents
from compressor.calibration.text_file import TextFileChunks
from compressor.calibration.tokenizer import load_tokenizer
from compressor.calibration.tokens import batches, pack_tokens
from compressor.errors import RequestError
from compressor.evaluation.prompt_sets import minimum_lengths
from compressor.evaluation.prompt_tokens import TokenCounter, encode_prompts
from compressor.preparation import Source
from compressor.prompts.registry import UNSEEN, find_task, generate_prompts, task_names
from compressor.retrieval_tokens import interleave, retrieval_sequences

TEXTS = ("prose", "docs", "code")


@dataclass(frozen=True, slots=True, eq=False)
class Data:
    """Batches int64 [B, T]."""

    fit: Sequence[Tensor]
    texts: Mapping[str, Sequence[Tensor]]
    prompts: Sequence[Tensor]


def calibration_and_held_out(source: Source, arguments: argparse.Namespace) -> Data:
    tokenizer = load_tokenizer(source.folder, trust_remote_code=False)
    vocabulary = source.config.get_text_config(decoder=True).vocab_size
    prompts = arguments.samples // 2
    text = pack_tokens(
        open_documents(TextSource(arguments.calibration)), tokenizer, arguments.samples - prompts, arguments.window, 0,
        arguments.seed, vocab_size=vocabulary,
    ).calibration  # fmt: skip
    retrieval = retrieval_sequences(tokenizer, vocabulary, prompts, arguments.window, arguments.seed).sequences

    def batched(sequences: Sequence[Tensor]) -> list[Tensor]:
        return [batch.input_ids for batch in batches(sequences, arguments.batch_size)]

    texts = {
        name: batched(
            list(text_windows(tokenizer, arguments.text / f"test_{name}.txt", arguments.held_out, arguments.window))
        )
        for name in TEXTS
    }
    unseen = prompt_windows(tokenizer, vocabulary, arguments)
    return Data(batched(interleave(text, retrieval)), texts, batched(unseen))


def text_windows(tokenizer: PreTrainedTokenizerBase, path: Path, most: int, window: int) -> Tensor:
    """The first windows of a text, int64 [at most `most`, window]. Raises RequestError where it has none."""
    text = "".join(TextFileChunks(path))
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    count = min(most, len(ids) // window)
    if not count:
        raise RequestError(f"{path} has {len(ids)} tokens, and a window {window}; give a longer text or less --window.")
    return torch.tensor(ids[: count * window]).reshape(count, window)


def prompt_windows(tokenizer: PreTrainedTokenizerBase, vocabulary: int, arguments: argparse.Namespace) -> list[Tensor]:
    """Windows of whole prompts of the evaluation split with their completions, the last one cut; the forms in turn."""
    stream = prompt_ids(tokenizer, vocabulary, arguments)
    separator = [tokenizer.eos_token_id] if isinstance(tokenizer.eos_token_id, int) else []
    windows: list[Tensor] = []
    while len(windows) < arguments.held_out * len(TEXTS):
        ids: list[int] = []
        while len(ids) < arguments.window:
            ids += (separator if ids else []) + next(stream)
        windows.append(torch.tensor(ids[: arguments.window]))
    return windows


def prompt_ids(
    tokenizer: PreTrainedTokenizerBase, vocabulary: int, arguments: argparse.Namespace
) -> Iterator[list[int]]:
    """Prompts of half a window, or of as much of a whole one as a form needs at least."""
    forms = [find_task(name) for name in task_names() if name not in UNSEEN]
    supplies = []
    for form, least in minimum_lengths(forms, tokenizer):
        if least > arguments.window:
            continue
        prompts = generate_prompts(
            form, arguments.held_out * 2, max(arguments.window // 2, least), TokenCounter(tokenizer),
            arguments.seed + 1, "evaluation",
        )  # fmt: skip
        supplies.append([encoded.whole.tolist() for encoded in encode_prompts(tokenizer, prompts, vocabulary)])
    while True:
        for turn in zip(*supplies, strict=True):
            yield from turn
