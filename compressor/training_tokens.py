"""What recovery trains on: batches of text and retrieval prompts, each found again by the number of its step."""

from __future__ import annotations

import hashlib
import random
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from transformers import PreTrainedTokenizerBase

from compressor.calibration.documents import ChatDocument
from compressor.calibration.encoding import DocumentEncoder
from compressor.calibration.text import DocumentStream, TextSource, open_documents
from compressor.errors import RequestError
from compressor.recipe import CalibrationSection, RecoverySection
from compressor.retrieval_tokens import retrieval_sequences

SHUFFLED_SEQUENCES = 256
"""Text sequences that are put into a random order together: neighbours come from one document."""

PROMPTS_AT_ONCE = 32
"""Sequences of retrieval prompts that are made together, since every call measures its forms first."""

_WHOLE_DOCUMENT = 2**62


@dataclass(frozen=True, slots=True, eq=False)
class TrainingTokens(IterableDataset[Tensor]):
    """Batches int64 [batch_size, sequence_length] of the steps after `first_step`, to the last of `steps`.

    The text is read in order, packed with its end-of-sequence tokens and shuffled in blocks; where it ends, it begins
    again in another order. `retrieval_share` of all rows are retrieval prompts of the calibration split, the first ones
    of their batches; where that is less than one a batch, of every so many batches one has a prompt.
    """

    documents: DocumentStream
    tokenizer: PreTrainedTokenizerBase
    vocab_size: int
    steps: int
    batch_size: int
    sequence_length: int
    retrieval_share: float
    seed: int
    first_step: int = 0

    def __iter__(self) -> Iterator[Tensor]:
        text = self._text()
        asked = self.prompts_before(self.first_step)
        for _ in range(self.first_step * self.batch_size - asked):
            next(text)
        prompts = self._prompts(asked)
        for step in range(self.first_step, self.steps):
            count = self.prompts_before(step + 1) - self.prompts_before(step)
            rows = [next(prompts) for _ in range(count)] + [next(text) for _ in range(self.batch_size - count)]
            yield torch.stack(rows)

    def prompts_before(self, step: int) -> int:
        """Rows of retrieval prompts in the first `step` batches."""
        return int(step * self.batch_size * self.retrieval_share + 1e-9)

    def after(self, finished_steps: int) -> TrainingTokens:
        """The batches that are left."""
        return replace(self, first_step=finished_steps)

    def loaded(self, workers: int) -> Iterator[Tensor]:
        """The same batches, made in a process of their own where `workers` is 1."""
        return iter(DataLoader(self, batch_size=None, num_workers=workers, prefetch_factor=8 if workers else None))

    def _prompts(self, first: int) -> Iterator[Tensor]:
        block, skipped = divmod(first, PROMPTS_AT_ONCE)
        while True:
            # A block has a seed of its own, so that a resumed run need not make those before it.
            digest = hashlib.sha256(f"{self.seed}/recovery/{block}".encode()).digest()
            made = retrieval_sequences(
                self.tokenizer,
                self.vocab_size,
                PROMPTS_AT_ONCE,
                self.sequence_length,
                int.from_bytes(digest[:7], "big"),
            )
            yield from made.sequences[skipped:]
            block, skipped = block + 1, 0

    def _text(self) -> Iterator[Tensor]:
        generator = random.Random(self.seed)
        while True:
            block: list[Tensor] = []
            count = 0
            for sequence in self._packed():
                block.append(sequence)
                count += 1
                if len(block) == SHUFFLED_SEQUENCES:
                    generator.shuffle(block)
                    yield from block
                    block = []
            generator.shuffle(block)
            yield from block
            if not count:
                raise RequestError(
                    f"the text {self.documents.source.name} has fewer than the {self.sequence_length:,} tokens of one "
                    "sequence; use a longer text or shorter sequences."
                )

    def _packed(self) -> Iterator[Tensor]:
        """Whole sequences of the text, once through; what is left at its end is dropped."""
        encoder = DocumentEncoder(self.tokenizer, self.vocab_size)
        ids = array("i")
        for document in self.documents:
            encoded = encoder.encode(document, _WHOLE_DOCUMENT)
            separable = ids and encoded and not isinstance(document, ChatDocument)
            if separable and encoder.separator is not None and encoder.separator not in (ids[-1], encoded[0]):
                ids.append(encoder.separator)
            ids.extend(encoded)
            while len(ids) >= self.sequence_length:
                yield torch.tensor(ids[: self.sequence_length], dtype=torch.int64)
                del ids[: self.sequence_length]


def open_training_text(section: RecoverySection, calibration: CalibrationSection) -> DocumentStream:
    """What a training reads: its own text, or else that of the calibration.

    Raises:
        RequestError: it cannot be read.
    """
    if section.source is None:
        source = TextSource(calibration.source, calibration.column, calibration.config, calibration.split)
    else:
        source = TextSource(section.source, section.column, section.config, section.split, use="training")
    return open_documents(source)
