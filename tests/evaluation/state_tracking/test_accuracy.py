from __future__ import annotations

import math

import pytest
import torch

from compressor.errors import RequestError
from compressor.evaluation.state_tracking.accuracy import accuracy_by_position, count_answers, scaled_accuracy
from compressor.evaluation.state_tracking.base import IGNORED
from compressor.evaluation.state_tracking.parity import Parity
from compressor.reference.backend import enable_for_fla
from tests.tiny_models import tiny_model


def test_counts_by_hand():
    labels = torch.tensor([[0, 1, 2, IGNORED], [2, 2, IGNORED, 0], [1, 1, 2, 2]])
    predictions = torch.tensor([[0, 1, 0, 0], [2, 0, 0, 0], [1, 1, 2, 2]])
    counts = count_answers(predictions, labels, num_classes=3)
    assert counts.asked.tolist() == [3, 3, 2, 2]
    assert counts.correct.tolist() == [3, 2, 1, 2]
    assert counts.flawless.tolist() == [3, 2, 1, 1]
    assert counts.labels.tolist() == [2, 3, 5]
    assert counts.accuracy(1, 4) == pytest.approx(8 / 10)
    assert counts.accuracy(2, 3) == pytest.approx(3 / 5)
    assert counts.sequence_accuracy(2) == pytest.approx(2 / 3)
    assert counts.constant_accuracy() == pytest.approx(1 / 2)
    assert counts.by_bucket(3) == pytest.approx([6 / 8, 1.0])


def test_positions_that_nothing_is_asked_at_have_no_accuracy():
    counts = count_answers(torch.zeros(2, 3, dtype=torch.int64), torch.tensor([[IGNORED, 0, 1]] * 2), 2)
    assert math.isnan(counts.accuracy(1, 1))


def test_scaled_accuracy():
    assert scaled_accuracy(0.2, 0.2) == 0
    assert scaled_accuracy(1.0, 0.2) == 1
    assert scaled_accuracy(0.6, 0.2) == pytest.approx(0.5)


def test_a_model_is_scored_on_its_own_predictions():
    enable_for_fla()
    model = tiny_model("delta_net")
    counts = accuracy_by_position(model, Parity(), 5, 9, 7, 3, torch.Generator().manual_seed(4))
    generator = torch.Generator().manual_seed(4)
    correct, asked = torch.zeros(9, dtype=torch.int64), torch.zeros(9, dtype=torch.int64)
    for size in (3, 3, 1):
        batch = Parity().draw(size, 5, 9, generator)
        for tokens, labels in zip(batch.tokens, batch.labels, strict=True):
            length = int((labels != IGNORED).sum())
            with torch.no_grad():
                logits = model(input_ids=tokens[None, :length], use_cache=False).logits[0, :, :2]
            asked[:length] += 1
            correct[:length] += logits.argmax(-1) == labels[:length]
    assert torch.equal(counts.asked, asked)
    assert torch.equal(counts.correct, correct)
    assert counts.sequences == 7


def test_no_samples_are_refused():
    with pytest.raises(RequestError, match="0 samples give no accuracy; ask for at least 1."):
        accuracy_by_position(tiny_model("delta_net"), Parity(), 5, 9, 0, 3, torch.Generator())
