"""`--retrieval-share`: how many sequences are retrieval prompts, where they stand among the text, what reports say."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from compressor.calibration.text import TextSource, held_out_source, open_documents
from compressor.calibration.tokenizer import load_tokenizer
from compressor.calibration.tokens import PackedTokens, pack_tokens, token_sha256
from compressor.cli import main
from compressor.demo import calibration_text_path
from compressor.errors import RequestError
from compressor.flat_settings import names_of_flat
from compressor.naming import key_of
from compressor.planning import RunOptions, pack_plan_tokens, plan_run
from compressor.prompts.registry import UNSEEN
from compressor.recipe import CalibrationSection, Recipe, RecoverySection
from compressor.retrieval_shares import too_small_share_note, too_small_training_share_note
from compressor.retrieval_tokens import interleave, retrieval_sequences

VOCAB_SIZE = 8192


@pytest.fixture(scope="module")
def tokenizer(demo_model: Path) -> PreTrainedTokenizerBase:
    return load_tokenizer(demo_model, trust_remote_code=False)


def test_interleaving() -> None:
    draws = random.Random(0)
    for _ in range(200):
        text, prompts = draws.randrange(12), draws.randrange(12)
        mixed = interleave([torch.tensor([n]) for n in range(text)], [torch.tensor([-1 - n]) for n in range(prompts)])
        values = [int(tensor) for tensor in mixed]
        assert [value for value in values if value >= 0] == list(range(text))
        assert [-1 - value for value in values if value < 0] == list(range(prompts))
        for first in range(1, len(values) + 1):
            assert abs(sum(value < 0 for value in values[:first]) - first * prompts / len(values)) <= 0.5


def packed(output: Path, share: float, samples: int = 7, source: str = "demo", evaluate: bool = True) -> PackedTokens:
    """Of a plan for the bundled model, whose 64 channels take 640 tokens."""
    calibration = {"source": source, "samples": samples, "sequence_length": 512, "retrieval_share": share}
    settings = {
        "output_dir": str(output),
        "selection": {"ratio": 0.5},
        "calibration": calibration,
        "runtime": {"device": "cpu"},
        "recovery": {"refit": False},
        "evaluation": {"tasks": ["niah_single_1"]},
        "export": {"evaluate": evaluate},
    }
    return pack_plan_tokens(plan_run(Recipe.from_settings(settings), RunOptions()))


def demo_text(tokenizer: PreTrainedTokenizerBase, samples: int) -> PackedTokens:
    source = TextSource("demo")
    return pack_tokens(
        open_documents(source), tokenizer, samples, 512, 8, 0, vocab_size=VOCAB_SIZE,
        held_out_source=held_out_source(source),
    )  # fmt: skip


@pytest.mark.parametrize(("share", "prompts"), [(0.0, 0), (0.05, 0), (0.25, 2), (0.5, 4), (0.9, 6), (1.0, 7)])
def test_share(share: float, prompts: int, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    tokens = packed(tmp_path / "out", share)
    text = demo_text(tokenizer, 7 - prompts) if prompts < 7 else None
    retrieval = retrieval_sequences(tokenizer, VOCAB_SIZE, prompts, 512, 0)
    expected = interleave(() if text is None else text.calibration, retrieval.sequences)
    assert len(tokens.calibration) == 7
    assert all(map(torch.equal, tokens.calibration, expected))
    assert tokens.sha256 == token_sha256(expected)
    assert tokens.tokens == tokens.requested_tokens == 7 * 512
    assert tokens.retrieval_sequences == prompts
    assert (tokens.retrieval_prompts, tokens.retrieval_tasks) == (retrieval.prompts, retrieval.tasks)
    assert (tokens.retrieval_prompts > 0) == (tokens.retrieval_tasks != ()) == (prompts > 0)
    assert all(map(torch.equal, tokens.held_out, demo_text(tokenizer, 1).held_out))
    assert len(tokens.held_out) == 8
    if not prompts:
        assert text is not None
        assert tokens.sha256 == text.sha256


def test_prompts_alone_need_the_text_only_to_hold_it_out(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(calibration_text_path().read_text(encoding="utf-8")[:16_000], encoding="utf-8")
    tokens = packed(tmp_path / "out", 1.0, source=str(text))
    assert (tokens.retrieval_sequences, len(tokens.calibration)) == (7, 7)
    assert 1 < len(tokens.held_out) <= 8
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"text": "one"}\n{"text": "tw\n')
    assert packed(tmp_path / "out", 1.0, source=str(broken), evaluate=False).held_out == ()
    with pytest.raises(RequestError, match=r"broken\.jsonl, line 2"):
        packed(tmp_path / "out", 0.9, source=str(broken), evaluate=False)


def test_the_fewest_tokens_count_both(tmp_path: Path) -> None:
    assert packed(tmp_path / "out", 0.5, samples=2).tokens == 1024
    with pytest.raises(RequestError, match="^1 calibration samples of 512 tokens are 512 tokens and at least 640 are"):
        packed(tmp_path / "out", 1.0, samples=1)
    text = tmp_path / "short.txt"
    text.write_text("A short text. " * 10)
    with pytest.raises(RequestError, match=r"short\.txt has \d\d tokens and at least 128 are needed; use a longer"):
        packed(tmp_path / "out", 0.5, samples=2, source=str(text))


def test_a_share_that_rounds_to_nothing_is_said(tmp_path: Path) -> None:
    calibration = {"source": "demo", "samples": 20, "sequence_length": 512, "retrieval_share": 0.02}
    settings = {"selection": {"ratio": 0.5}, "runtime": {"device": "cpu"}, "export": {"evaluate": False}}
    given = Recipe.from_settings({**settings, "calibration": calibration, "output_dir": str(tmp_path / "out")})
    plan = plan_run(given, RunOptions(name=names_of_flat({"retrieval_share": 0.02}, recipe=True)))
    assert plan.notes == (
        "calibrated on text alone: --retrieval-share 0.02 of calibration.samples: 20 rounds to no retrieval prompt; "
        "26 samples or a share of 0.05 would give one.",
    )
    # A refit would hold out nearly everything to have both kinds among it.
    assert plan.recipe.calibration.retrieval_share == 0


@pytest.mark.parametrize(
    ("share", "samples", "least", "larger"),
    [(0.5, 1, 2, 1), (0.05, 7, 11, 0.143), (0.1, 3, 6, 0.334), (1e-7, 7, 5_000_001, 0.143)],
)
def test_what_would_give_a_prompt(share: float, samples: int, least: int, larger: float) -> None:
    note = too_small_share_note(share, samples, key_of)
    assert note.endswith(f"; {least:,} samples or a share of {larger:g} would give one.")
    prompts = [
        CalibrationSection(retrieval_share=part, samples=count).retrieval_samples
        for part, count in ((share, samples), (share, least - 1), (share, least), (larger, samples))
    ]
    assert prompts == [0, 0, 1, 1]


def test_more_samples_than_can_be_are_not_advised() -> None:
    note = too_small_share_note(5e-324, 7, key_of)
    assert note.endswith("rounds to no retrieval prompt; a share of 0.143 would give one.")


def test_a_share_of_a_training_that_is_less_than_one_prompt() -> None:
    section = RecoverySection(retrieval_share=0.01, sequences=20, batch_size=2)
    note = too_small_training_share_note(section)
    assert note == (
        "trained on text alone: a retrieval share of 0.01 of 20 sequences is less than one prompt; 100 sequences or a "
        "share of 0.05 would give one."
    )


@pytest.mark.parametrize("share", ["1.5", "-0.5", "nan"])
def test_a_share_outside_its_range_is_refused(share: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--ratio", "0.5", f"--retrieval-share={share}"]) == 2
    assert "--retrieval-share" in capsys.readouterr().err


def test_a_run_says_what_it_was_calibrated_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "out"
    words = ["--ratio", "0.5", "--device", "cpu", "--calibration-samples", "4", "--sequence-length", "512"]
    words += ["--retrieval-share", "0.5", "--output-dir", str(output), "--no-evaluate", "--no-verify"]
    assert main([*words, "--dry-run"]) == 0
    assert re.search(r"retrieval prompts\W+share 0\.5\W+2 of 4 sequences", capsys.readouterr().out)
    assert main(words) == 0
    calibration = json.loads((output / "compression.json").read_text())["calibration"]
    assert (calibration["retrieval_share"], calibration["retrieval_sequences"]) == (0.5, 2)
    assert calibration["tokens"] == calibration["requested_tokens"] == 2048
    assert calibration["retrieval_prompts"] >= 2
    assert not UNSEEN & set(calibration["retrieval_tasks"])
    assert calibration["sha256"] == packed(tmp_path / "other", 0.5, samples=4).sha256
    assert "tokens of `demo` and, in 50% of the sequences, retrieval prompts" in (output / "README.md").read_text()
    assert "retrieval_share: 0.5" in (output / "recipe.yaml").read_text()
