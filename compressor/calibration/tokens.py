"""Calibration tokens: documents packed into sequences, and sequences into batches."""

from __future__ import annotations

import hashlib
import random
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from compressor.calibration.documents import ChatDocument
from compressor.calibration.encoding import DocumentEncoder
from compressor.calibration.text import DocumentStream, TextSource, open_documents
from compressor.errors import RequestError

POOL_FACTOR = 4
"""The sequences are drawn from this many times as many, where the source has them."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedTokens:
    """Token sequences of one calibration run; no two of them share a token position of the source.

    Attributes:
        calibration: int64 `[sequence_length]` each; the last may be shorter, where the source ran out.
        held_out: the same for evaluation; may be empty.
        tokens: number of tokens in `calibration`.
        requested_tokens: number of tokens asked for.
        documents: number of documents read for them that had tokens.
        sha256: `token_sha256(calibration)`.
        problems: what to tell the user, one line each.
        retrieval_sequences: how many of `calibration` are made of retrieval prompts instead of text.
        retrieval_prompts: number of prompts that are whole in them.
        retrieval_tasks: names of the forms that they hold.
    """

    calibration: tuple[Tensor, ...]
    held_out: tuple[Tensor, ...]
    tokens: int
    requested_tokens: int
    documents: int
    sha256: str
    problems: tuple[str, ...]
    retrieval_sequences: int = 0
    retrieval_prompts: int = 0
    retrieval_tasks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class TokenBatch:
    """`input_ids` int64 `[B, T]`; `attention_mask` bool `[B, T]`, true at tokens, None where nothing is padded."""

    input_ids: Tensor
    attention_mask: Tensor | None

    @property
    def num_tokens(self) -> int:
        """Number of tokens, padding not counted."""
        return self.input_ids.numel() if self.attention_mask is None else int(self.attention_mask.sum())


def pack_tokens(
    stream: DocumentStream,
    tokenizer: PreTrainedTokenizerBase,
    samples: int,
    sequence_length: int,
    held_out_samples: int,
    seed: int,
    *,
    vocab_size: int,
    minimum_tokens: int = 1,
    other_samples: int = 0,
    held_out_source: TextSource | None = None,
    remedy: str = "raise --calibration-samples or --sequence-length",
) -> PackedTokens:
    """Encode documents, join them with the end-of-sequence token and cut them into sequences.

    The source is read in order up to a pool of `POOL_FACTOR * samples + held_out_samples` sequences. The last
    `held_out_samples` sequences of the pool are held out; `samples` of those before them are drawn with `seed` and
    kept in order. Where the source has fewer, calibration comes first: it is used whole, down to the shorter sequence
    at its end, and what is left after it is held out. With `held_out_source`, those of that source are instead.

    Memory grows with the pool, not with the source. The same arguments give the same tokens. `vocab_size` is the
    model's number of embeddings, `minimum_tokens` the fewest that make sense, whose refusal names `remedy`; those of
    `other_samples` sequences, which do not come from the source, count. `samples` may be 0 where there are such.

    Raises:
        RequestError: fewer than `minimum_tokens` tokens, a source or tokenizer that gives none, a token that the model
            has no embedding for, or a part of the source that cannot be read.
        RunError: a Hub data set broke off.
    """
    requested = samples * sequence_length
    _refuse_small_request(samples + other_samples, sequence_length, minimum_tokens, remedy)
    encoder = DocumentEncoder(tokenizer, vocab_size)
    reserved = 0 if held_out_source else held_out_samples
    pool = _read(stream, encoder, (POOL_FACTOR * samples + reserved) * sequence_length)
    problems = [*stream.problems(), *encoder.problems()]
    calibration, held_out = _split(pool.ids.split(sequence_length), sequence_length, samples, reserved, seed)
    tokens = sum(len(sequence) for sequence in calibration)
    it_has = f"the calibration source {stream.source.name} has"
    _refuse_few(tokens, minimum_tokens - other_samples * sequence_length, it_has, "use a longer text")
    if tokens < requested:
        asked = f"{requested:,} asked for ({samples:,} x {sequence_length:,})"
        problems.append(f"{it_has} {tokens:,} tokens of the {asked}; all of them are used")
    if held_out_source and held_out_samples:
        other = _read(open_documents(held_out_source), encoder, held_out_samples * sequence_length)
        held_out = other.ids.split(sequence_length)
    return PackedTokens(
        calibration=tuple(sequence.long() for sequence in calibration),
        held_out=tuple(sequence.long() for sequence in held_out if len(sequence) > 1),
        tokens=tokens,
        requested_tokens=requested,
        documents=pool.documents,
        sha256=token_sha256(calibration),
        problems=tuple(problems),
    )


def _refuse_small_request(samples: int, sequence_length: int, minimum_tokens: int, remedy: str) -> None:
    asked = f"{samples:,} calibration samples of {sequence_length:,} tokens are"
    _refuse_few(samples * sequence_length, minimum_tokens, asked, remedy)


def _refuse_few(tokens: int, minimum_tokens: int, what_has_them: str, remedy: str) -> None:
    if tokens < minimum_tokens:
        raise RequestError(f"{what_has_them} {tokens:,} tokens and at least {minimum_tokens:,} are needed; {remedy}.")


def token_sha256(sequences: Sequence[Tensor]) -> str:
    """SHA-256 over each sequence's length and ids, as little-endian 64-bit integers."""
    digest = hashlib.sha256()
    for sequence in sequences:
        digest.update(len(sequence).to_bytes(8, "little"))
        digest.update(sequence.numpy().astype("<i8").tobytes())
    return digest.hexdigest()


def batches(sequences: Sequence[Tensor], batch_size: int) -> Iterator[TokenBatch]:
    """Consecutive sequences of equal length, at most `batch_size` together; nothing is padded."""
    group: list[Tensor] = []
    for sequence in sequences:
        if group and (len(group) == batch_size or len(group[0]) != len(sequence)):
            yield TokenBatch(torch.stack(group), None)
            group = []
        group.append(sequence)
    if group:
        yield TokenBatch(torch.stack(group), None)


def pad_batch(sequences: Sequence[Tensor], pad_token_id: int) -> TokenBatch:
    """One batch of sequences of any lengths, padded on the right to the longest."""
    input_ids = torch.nn.utils.rnn.pad_sequence(list(sequences), batch_first=True, padding_value=pad_token_id)
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    return TokenBatch(input_ids, torch.arange(input_ids.shape[1]) < lengths[:, None])


@dataclass(frozen=True, slots=True, eq=False)
class _Pool:
    ids: Tensor  # int32 [tokens]
    documents: int


def _read(stream: DocumentStream, encoder: DocumentEncoder, limit: int) -> _Pool:
    if not limit:
        return _Pool(torch.empty(0, dtype=torch.int32), 0)
    separator = encoder.separator
    ids = array("i")
    documents = 0
    for document in stream:
        encoded = encoder.encode(document, limit - len(ids))
        if not encoded:
            continue
        documents += 1
        # Chat templates end their conversations themselves. Where the separator also begins documents,
        # or a text holds it there, one is enough.
        separable = ids and not isinstance(document, ChatDocument)
        if separable and separator is not None and separator not in (ids[-1], encoded[0]):
            ids.append(separator)
        ids.extend(encoded)
        if len(ids) >= limit:
            break
    if not ids:
        details = "".join(f" ({problem})" for problem in encoder.problems())
        raise RequestError(
            f"the model's tokenizer gives no token for the calibration source {stream.source.name}{details}; "
            "use another source, or check the tokenizer's files."
        )
    return _Pool(torch.frombuffer(ids, dtype=torch.int32)[:limit], documents)


def _split(
    sequences: Sequence[Tensor], sequence_length: int, samples: int, held_out_samples: int, seed: int
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Divide the pool into calibration and held-out sequences; the last of the pool may be shorter than the others."""
    full = [sequence for sequence in sequences if len(sequence) == sequence_length]
    if len(full) >= samples + held_out_samples:
        sequences = full
    elif len(sequences) <= samples:
        return sequences, ()
    first_held_out = max(samples, len(sequences) - held_out_samples)
    drawn = sorted(random.Random(seed).sample(range(min(first_held_out, len(full))), samples))
    return [sequences[index] for index in drawn], sequences[first_held_out:]
