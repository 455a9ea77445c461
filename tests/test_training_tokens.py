"""What recovery trains on: every batch is found again by its step, text and prompts in their shares."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from torch import Tensor

from compressor.calibration.text import TextSource, open_documents
from compressor.calibration.tokenizer import load_tokenizer
from compressor.demo import calibration_text_path, demo_model_path
from compressor.errors import RequestError
from compressor.training_tokens import TrainingTokens


def tokens(path: Path | None = None, share: float = 0.25, **changes: int) -> TrainingTokens:
    settings = {"steps": 6, "batch_size": 4, "sequence_length": 300, "seed": 0} | changes
    tokenizer = load_tokenizer(demo_model_path(), trust_remote_code=False)
    source = TextSource(str(path) if path else "demo")
    return TrainingTokens(open_documents(source), tokenizer, vocab_size=8192, retrieval_share=share, **settings)


def test_batches_are_found_again_by_their_step() -> None:
    whole = list(tokens(steps=10))
    assert [batch.shape for batch in whole] == [(4, 300)] * 10
    for first in (1, 8, 9):
        rest = list(tokens(steps=10).after(first))
        assert len(rest) == 10 - first
        assert all(torch.equal(one, other) for one, other in zip(rest, whole[first:], strict=True))
    assert not any(torch.equal(one, other) for one, other in zip(whole, tokens(steps=10, seed=1), strict=True))


def test_a_process_of_its_own_makes_the_same() -> None:
    alone, worker = list(tokens(steps=3)), list(tokens(steps=3).loaded(workers=1))
    assert all(torch.equal(one, other) for one, other in zip(alone, worker, strict=True))


def test_rows_are_prompts_and_text_in_their_shares() -> None:
    data = tokens(share=0.5, steps=3)
    for batch in data:
        texts = [data.tokenizer.decode(row) for row in batch]
        asked = [
            "?" in text and any(word in text for word in ("number", "uuid", "variable", "key", "word"))
            for text in texts
        ]
        assert all(asked[:2])
    assert all(len(row) == 300 for batch in tokens(share=0.0, steps=2) for row in batch)


def _rows(data: TrainingTokens, count: int) -> list[Tensor]:
    return list(itertools.islice((row for batch in data for row in batch), count))


def test_the_text_is_read_once_through_before_it_begins_again(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text(calibration_text_path().read_text(encoding="utf-8")[:12_000], encoding="utf-8")
    data = tokens(path, share=0.0, batch_size=1, steps=30)
    encoded = data.tokenizer(path.read_text(encoding="utf-8"), verbose=False)["input_ids"]
    epoch = len(encoded) // 300
    rows = _rows(data, 2 * epoch)
    expected = {tuple(encoded[at : at + 300]) for at in range(0, epoch * 300, 300)}
    assert epoch > 5
    assert {tuple(row.tolist()) for row in rows[:epoch]} == expected
    assert {tuple(row.tolist()) for row in rows[epoch:]} == expected
    assert [row.tolist() for row in rows[:epoch]] != [row.tolist() for row in rows[epoch:]]


def test_a_text_shorter_than_a_sequence_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_text("A few words.", encoding="utf-8")
    with pytest.raises(RequestError, match="fewer than the 300 tokens of one sequence"):
        next(iter(tokens(path)))


def test_a_share_below_one_row_a_batch_is_kept_over_the_batches() -> None:
    data = tokens(share=0.25, batch_size=2, steps=8)
    assert [data.prompts_before(step) for step in range(9)] == [0, 0, 1, 1, 2, 2, 3, 3, 4]
    whole = list(data)
    for first in (1, 2, 5):
        assert all(torch.equal(one, other) for one, other in zip(data.after(first), whole[first:], strict=True))
