"""One pass of token sequences through a model: loss, greedy agreement and divergence of every predicted token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from compressor.errors import RequestError, RunError

LOGITS_PER_BATCH = 2**28
"""Logits that a model may return at once; a sequence that needs more runs alone."""

LOGITS_PER_STEP = 2**24
"""Logits whose float32 log-probabilities are alive at once: flat memory for large vocabularies."""

GPU_LENGTH_MULTIPLE = 256
"""On a GPU lengths are padded to a multiple of this, and batches to one number of rows a length: fla tunes kernels
anew, for minutes, for every other number of tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenFigures:
    """What a model makes of the tokens of one sequence after the first; every tensor is on the CPU.

    Attributes:
        losses: float32 [T - 1], -log p(token) in nats.
        correct: bool [T - 1], whether the token is the most probable one.
        kl: float32 [T - 1], KL(reference || model) in nats; None without a reference.
        reference: the reference's own figures from the same pass; None without a reference.
    """

    losses: Tensor
    correct: Tensor
    kl: Tensor | None
    reference: TokenFigures | None = None


def _ignore(tokens: int) -> None:
    """Report to nobody."""


@torch.inference_mode()
def forward_tokens(
    model: PreTrainedModel,
    sequences: Sequence[Tensor],
    batch_size: int,
    reference: PreTrainedModel | None = None,
    on_tokens: Callable[[int], None] = _ignore,
) -> list[TokenFigures]:
    """Figures of every sequence (int64 [T] each, T >= 2), in the order of `sequences`.

    Sequences of like length share a batch of at most `batch_size`, padded on the right; a causal model
    cannot see what stands to the right of a token, so no mask is needed. The last token of a sequence is
    predicted and not read. Log-probabilities are taken in float32. `on_tokens` gets the number of tokens
    of each batch, padding left out.

    Raises:
        RequestError: a sequence of fewer than two tokens, a token that a model has no embedding for, or
            two models of different vocabularies.
        RunError: a loss or a divergence is NaN or infinite.
    """
    vocabulary = _vocabulary(model, reference)
    lengths = [len(sequence) for sequence in sequences]
    _require_tokens(sequences, lengths, vocabulary)
    figures: dict[int, TokenFigures] = {}
    on_gpu = model.device.type == "cuda"
    multiple = GPU_LENGTH_MULTIPLE if on_gpu else 1
    read = [-(-(length - 1) // multiple) * multiple for length in lengths]
    limit = LOGITS_PER_BATCH // vocabulary
    for batch in _batches(read, batch_size, limit):
        longest = read[batch[0]]
        rows = max(1, min(batch_size, limit // longest)) if on_gpu else len(batch)
        members = [sequences[index] for index in batch]
        figures.update(zip(batch, _forward_batch(model, members, (rows, longest), reference), strict=True))
        on_tokens(sum(len(member) for member in members))
    return [figures[index] for index in range(len(sequences))]


def _vocabulary(model: PreTrainedModel, reference: PreTrainedModel | None) -> int:
    vocabulary: int = model.config.get_text_config().vocab_size
    other: int = vocabulary if reference is None else reference.config.get_text_config().vocab_size
    if vocabulary != other:
        raise RequestError(
            f"the model has a vocabulary of {vocabulary:,} tokens and the one it is compared with of {other:,}; a "
            "divergence needs two models of one tokenizer."
        )
    return vocabulary


def _require_tokens(sequences: Sequence[Tensor], lengths: Sequence[int], vocabulary: int) -> None:
    shortest = min(lengths, default=2)
    if shortest < 2:
        raise RequestError(
            f"a sequence has {shortest} tokens and at least 2 are needed to predict one from another; use longer texts."
        )
    highest = max((int(sequence.max()) for sequence in sequences), default=0)
    if highest >= vocabulary:
        raise RequestError(
            f"the tokenizer gives token {highest} and the model has embeddings for {vocabulary:,} tokens; put the "
            "tokenizer that the model was trained with into its folder."
        )


def _batches(lengths: Sequence[int], batch_size: int, tokens: int) -> Iterator[list[int]]:
    """Indices of `lengths`, longest first, at most `batch_size` and at most `tokens` with padding to a batch."""
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if batch and (len(batch) == batch_size or (len(batch) + 1) * lengths[batch[0]] > tokens):
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def _forward_batch(
    model: PreTrainedModel, sequences: Sequence[Tensor], shape: tuple[int, int], reference: PreTrainedModel | None
) -> list[TokenFigures]:
    """Figures of sequences that the models read as [rows, tokens] of `shape`, padded."""
    rows, read = shape
    lengths = torch.zeros(rows, dtype=torch.int64)
    tokens = torch.zeros(rows, read + 1, dtype=torch.int64)
    for row, sequence in enumerate(sequences):
        tokens[row, : len(sequence)] = sequence
        lengths[row] = len(sequence) - 1
    places = (torch.arange(read) < lengths[:, None]).flatten().nonzero()[:, 0]
    targets = tokens[:, 1:].flatten()[places].to(model.device)
    logits = _logits(model, tokens)
    references = None if reference is None else _logits(reference, tokens).to(logits.device)
    whole = _token_figures(logits, references, places.to(logits.device), targets)
    return _split(whole, lengths[: len(sequences)].tolist())


def _logits(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """Logits [B * (T - 1), vocabulary], in the model's dtype, for `tokens` int64 [B, T] after the first of each row."""
    logits: Tensor = model(input_ids=tokens[:, :-1].to(model.device), use_cache=False).logits
    return logits.flatten(0, 1)


def _token_figures(logits: Tensor, references: Tensor | None, rows: Tensor, targets: Tensor) -> TokenFigures:
    """Figures of `rows` int64 [N] of logits [., vocabulary] against `targets` int64 [N], a few rows at a time."""
    losses, correct = torch.empty(len(rows)), torch.empty(len(rows), dtype=torch.bool)
    reference_losses, reference_correct = losses.clone(), correct.clone()
    kl = torch.zeros(len(rows))
    step = max(1, LOGITS_PER_STEP // logits.shape[-1])
    for start in range(0, len(rows), step):
        part = slice(start, start + step)
        log_q = logits[rows[part]].float().log_softmax(-1)
        losses[part], correct[part] = _against(log_q, targets[part])
        if references is not None:
            log_p = references[rows[part]].float().log_softmax(-1)
            reference_losses[part], reference_correct[part] = _against(log_p, targets[part])
            kl[part] = (log_p.exp() * (log_p - log_q)).sum(-1).cpu()
    _require_finite(losses, kl)
    if references is None:
        return TokenFigures(losses, correct, None)
    return TokenFigures(losses, correct, kl, TokenFigures(reference_losses, reference_correct, None))


def _against(log_probabilities: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """-log p of each target, and whether it is the most probable token."""
    losses = -log_probabilities.gather(-1, targets[:, None])[:, 0]
    return losses.cpu(), (log_probabilities.argmax(-1) == targets).cpu()


def _require_finite(losses: Tensor, kl: Tensor) -> None:
    broken = int((~(losses.isfinite() & kl.isfinite())).sum())
    if broken:
        raise RunError(
            f"{broken:,} of {len(losses):,} tokens have a loss or a divergence that is NaN or infinite; check the "
            "weights, or run in float32."
        )


def _split(whole: TokenFigures, counts: list[int]) -> list[TokenFigures]:
    losses, correct = whole.losses.split(counts), whole.correct.split(counts)
    figures = [TokenFigures(*pair, None) for pair in zip(losses, correct, strict=True)]
    if whole.kl is None or whole.reference is None:
        return figures
    references = _split(whole.reference, counts)
    return [
        replace(figure, kl=kl, reference=reference)
        for figure, kl, reference in zip(figures, whole.kl.split(counts), references, strict=True)
    ]
