"""Figures of every token against float64 formulas on the stock model's own logits, one sequence at a time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from compressor.errors import RequestError, RunError
from compressor.evaluation import forward
from compressor.evaluation.forward import forward_tokens
from compressor.reference.backend import enable_for_fla, enable_for_transformers
from tests.families import tiny_checkpoint, tiny_tokens
from tests.tiny_models import VARIANTS, tiny_model

LENGTHS = (2, 37, 130, 64, 66, 200, 65, 129, 3)
"""On both sides of 64 and 128 tokens, where fla's layers change from one kernel to another."""


def ragged_sequences() -> list[Tensor]:
    return [tiny_tokens(length, seed=number) for number, length in enumerate(LENGTHS)]


def runnable_model(name: str, seed: int = 0) -> PreTrainedModel:
    """A tiny model whose kernels run on a CPU; softmax layers too."""
    enable_for_fla()
    for family in ("qwen3_5", "qwen3_5_moe", "qwen3_next", "olmo_hybrid"):
        enable_for_transformers(f"transformers.models.{family}.modeling_{family}")
    model = tiny_model(name, seed=seed)
    assert isinstance(model, PreTrainedModel)
    return model


@torch.inference_mode()
def stock_log_probabilities(model: PreTrainedModel, sequence: Tensor) -> Tensor:
    """Of the tokens after the first, float64 [T - 1, vocabulary]; the model runs in its own dtype."""
    logits: Tensor = model(input_ids=sequence[None], use_cache=False).logits
    logits = logits[0, :-1].double()
    return logits - logits.exp().sum(-1, keepdim=True).log()


@pytest.mark.parametrize("name", VARIANTS)
def test_batches_of_ragged_lengths_change_nothing(name: str) -> None:
    model, sequences = runnable_model(name), ragged_sequences()
    expected = [stock_log_probabilities(model, sequence) for sequence in sequences]
    losses = [-rows[torch.arange(len(rows)), tokens[1:]] for rows, tokens in zip(expected, sequences, strict=True)]
    mean = float(torch.cat(losses).mean())
    for batch_size in (1, 2, 4, 64):
        found = forward_tokens(model, sequences, batch_size)
        assert float(torch.cat([figures.losses for figures in found]).double().mean()) == pytest.approx(mean, rel=1e-6)
        for figures, loss, rows, tokens in zip(found, losses, expected, sequences, strict=True):
            # A sequence has as few as one prediction: no mean over many hides the rounding of one.
            torch.testing.assert_close(figures.losses.double(), loss, rtol=5e-6, atol=1e-5)
            assert torch.equal(figures.correct, rows.argmax(-1) == tokens[1:])


@pytest.mark.parametrize("batch_size", [1, 4])
def test_divergence_from_a_reference(batch_size: int) -> None:
    model, reference = runnable_model("q35", seed=0), runnable_model("q35", seed=1)
    sequences = ragged_sequences()
    for sequence, figures in zip(
        sequences, forward_tokens(model, sequences, batch_size, reference=reference), strict=True
    ):
        log_p, log_q = stock_log_probabilities(reference, sequence), stock_log_probabilities(model, sequence)
        assert figures.kl is not None
        assert figures.reference is not None
        torch.testing.assert_close(figures.kl.double(), (log_p.exp() * (log_p - log_q)).sum(-1), rtol=2e-5, atol=1e-5)
        losses = -log_p[torch.arange(len(sequence) - 1), sequence[1:]]
        torch.testing.assert_close(figures.reference.losses.double(), losses, rtol=2e-5, atol=1e-6)
        assert torch.equal(figures.reference.correct, log_p.argmax(-1) == sequence[1:])


def test_a_model_does_not_diverge_from_itself() -> None:
    model = runnable_model("delta_net")
    for figures in forward_tokens(model, ragged_sequences(), 4, reference=model):
        assert figures.kl is not None
        assert figures.reference is not None
        assert figures.kl.abs().max() < 1e-6
        assert torch.equal(figures.losses, figures.reference.losses)


def test_small_steps_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model, reference, sequences = runnable_model("q35"), runnable_model("q35", seed=1), ragged_sequences()
    whole = forward_tokens(model, sequences, 4, reference=reference)
    monkeypatch.setattr(forward, "LOGITS_PER_STEP", 64 * 7)
    for one, other in zip(whole, forward_tokens(model, sequences, 4, reference=reference), strict=True):
        assert one.kl is not None
        assert other.kl is not None
        assert torch.equal(one.losses, other.losses)
        assert torch.equal(one.kl, other.kl)


def test_batches_hold_no_more_logits_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    model, sequences = runnable_model("gated_deltanet"), ragged_sequences()
    shapes: list[tuple[int, int]] = []
    model.get_output_embeddings().register_forward_pre_hook(lambda _, inputs: shapes.append(inputs[0].shape[:2]))
    monkeypatch.setattr(forward, "LOGITS_PER_BATCH", 64 * 260)
    forward_tokens(model, sequences, batch_size=3)
    assert max(rows for rows, _ in shapes) == 3
    assert all(rows == 1 or rows * length <= 260 for rows, length in shapes)
    assert sum(rows for rows, _ in shapes) == len(sequences)


def test_progress_counts_every_token_once() -> None:
    counted: list[int] = []
    forward_tokens(runnable_model("delta_net"), ragged_sequences(), 4, on_tokens=counted.append)
    assert sum(counted) == sum(LENGTHS)
    assert len(counted) == 3


def test_no_sequences_no_figures() -> None:
    assert forward_tokens(runnable_model("delta_net"), [], 4) == []


@pytest.mark.parametrize("length", [0, 1])
def test_a_sequence_without_a_prediction_is_refused(length: int) -> None:
    sequences = [tiny_tokens(30), tiny_tokens(length)]
    with pytest.raises(RequestError, match=f"^a sequence has {length} tokens and at least 2 are needed"):
        forward_tokens(runnable_model("delta_net"), sequences, 4)


def test_a_token_without_embedding_is_refused() -> None:
    sequences = [tiny_tokens(30), torch.tensor([3, 64, 5])]
    with pytest.raises(RequestError, match="^the tokenizer gives token 64 and the model has embeddings for 64 tokens"):
        forward_tokens(runnable_model("delta_net"), sequences, 4)


def test_models_of_two_vocabularies_are_refused() -> None:
    other = tiny_model("delta_net", {"vocab_size": 80})
    assert isinstance(other, PreTrainedModel)
    with pytest.raises(RequestError, match="a vocabulary of 64 tokens and the one it is compared with of 80"):
        forward_tokens(runnable_model("delta_net"), [tiny_tokens(30)], 4, reference=other)


def test_a_broken_model_is_no_figure(tmp_path: Path) -> None:
    tiny = tiny_checkpoint("gated_deltanet", tmp_path)
    with torch.no_grad():
        tiny.model.get_output_embeddings().weight[5] = torch.nan
    with pytest.raises(RunError, match=r"^29 of 29 tokens have a loss or a divergence that is NaN or infinite"):
        forward_tokens(tiny.model, [tiny_tokens(30)], 4)
