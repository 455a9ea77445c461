"""Figures of a text against brute force over its tokens, and against lm-eval's own run of the demo model."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoTokenizer

from compressor.architectures.registry import find_architecture
from compressor.checkpoint.config_file import CONFIG_FILE, read_config
from compressor.demo import held_out_text_path
from compressor.errors import RequestError
from compressor.evaluation.forward import TokenFigures
from compressor.evaluation.text_loss import (
    bigram_distances,
    compare_text,
    loss_difference,
    measure_text,
    summarise,
)
from compressor.evaluation.windows import (
    Document,
    Window,
    disjoint_windows,
    encode_document,
    rolling_windows,
    sliding_windows,
)
from compressor.loading import load_model


def random_tokens(length: int, vocabulary: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, vocabulary, (length,), generator=torch.Generator().manual_seed(seed))


def random_windows() -> list[Window]:
    documents = [Document(random_tokens(length, 9, seed)) for seed, length in enumerate((400, 90, 333, 2))]
    return sliding_windows(documents, 150, 100)


def random_figures(windows: list[Window], seed: int = 0) -> list[TokenFigures]:
    generator = torch.Generator().manual_seed(seed)
    return [
        TokenFigures(
            losses=torch.rand(len(window.tokens) - 1, generator=generator) * 5,
            correct=torch.zeros(len(window.tokens) - 1, dtype=torch.bool),
            kl=torch.rand(len(window.tokens) - 1, generator=generator),
        )
        for window in windows
    ]


def predictions(windows: list[Window], figures: list[TokenFigures]) -> Iterator[tuple[Window, int, float]]:
    """Window, position and loss of every predicted token, one at a time."""
    for window, figure in zip(windows, figures, strict=True):
        for position in range(len(window.tokens) - window.predicted, len(window.tokens)):
            yield window, position, float(figure.losses[position - 1])


def last_distance(tokens: list[int], position: int) -> int:
    """Tokens back to the nearest earlier occurrence of the bigram that ends at `position`; 0 without one."""
    for earlier in range(position - 1, 0, -1):
        if tokens[earlier - 1 : earlier + 1] == tokens[position - 1 : position + 1]:
            return position - earlier
    return 0


@pytest.mark.parametrize(("length", "vocabulary"), [(1, 3), (2, 3), (200, 2), (300, 7), (300, 40)])
def test_bigram_distances(length: int, vocabulary: int) -> None:
    tokens = random_tokens(length, vocabulary)
    expected = [0, *(last_distance(tokens.tolist(), position) for position in range(1, length))]
    assert bigram_distances(tokens).tolist() == expected


def test_figures_against_a_loop_over_tokens() -> None:
    windows = random_windows()
    figures = random_figures(windows)
    found = summarise(windows, figures, copy_distance=20)
    every = [loss for _, _, loss in predictions(windows, figures)]
    assert found.tokens == len(every) == 399 + 89 + 332 + 1
    assert found.windows == len(windows)
    assert found.clusters == 4
    assert found.loss.mean == pytest.approx(sum(every) / len(every), rel=1e-12)
    assert found.token_perplexity == pytest.approx(math.exp(sum(every) / len(every)), rel=1e-12)
    assert (found.words, found.bytes, found.word_perplexity, found.bits_per_byte) == (None,) * 4

    copied: list[float] = []
    rest: list[float] = []
    for window, position, loss in predictions(windows, figures):
        (copied if last_distance(window.tokens.tolist(), position) > 20 else rest).append(loss)
    assert len(copied) > 100
    assert len(rest) > 100
    assert (found.copied.tokens, found.rest.tokens) == (len(copied), len(rest))
    assert found.copied.mean == pytest.approx(sum(copied) / len(copied), rel=1e-12)
    assert found.rest.mean == pytest.approx(sum(rest) / len(rest), rel=1e-12)

    assert [(bucket.start, bucket.stop) for bucket in found.by_position] == [(0, 64), (64, 128), (128, 256)]
    for bucket in found.by_position:
        inside = [loss for _, position, loss in predictions(windows, figures) if bucket.start <= position < bucket.stop]
        assert bucket.loss.tokens == len(inside)
        assert bucket.loss.mean == pytest.approx(sum(inside) / len(inside), rel=1e-12)

    for window, figure, kept in zip(windows, figures, found.window_losses, strict=True):
        assert kept.tokens == window.predicted
        assert kept.cluster == window.cluster
        assert kept.loss == pytest.approx(float(figure.losses[-window.predicted :].double().sum()), rel=1e-12)


def test_standard_error_is_taken_over_documents() -> None:
    windows = random_windows()
    figures = random_figures(windows)
    found = summarise(windows, figures, copy_distance=20)
    sums, counts = [0.0] * 4, [0] * 4
    for window, _, loss in predictions(windows, figures):
        sums[window.cluster] += loss
        counts[window.cluster] += 1
    mean = sum(sums) / sum(counts)
    squares = sum((total - mean * count) ** 2 for total, count in zip(sums, counts, strict=True))
    assert found.loss.standard_error == pytest.approx(math.sqrt(4 / 3 * squares) / sum(counts), rel=1e-9)


def test_words_of_a_language_without_spaces_do_not_overflow() -> None:
    tokens = torch.arange(1, 2001)
    document = Document(tokens, torch.nn.functional.one_hot(torch.tensor(1999), 2000), torch.full((2000,), 3))
    windows = disjoint_windows([document], 500)
    found = summarise(windows, random_figures(windows), copy_distance=20)
    assert found.words == 1
    assert found.word_perplexity is None
    assert found.bits_per_byte is not None
    assert found.byte_perplexity is not None
    assert found.byte_perplexity == pytest.approx(2**found.bits_per_byte)


def test_difference_of_two_models_is_paired() -> None:
    windows = random_windows()
    figures = random_figures(windows)
    shifted = [replace(figure, losses=figure.losses + 0.25 + 0.01 * number) for number, figure in enumerate(figures)]
    before, after = summarise(windows, figures, 20), summarise(windows, shifted, 20)
    found = loss_difference(before, after)
    expected = sum((0.25 + 0.01 * number) * window.predicted for number, window in enumerate(windows))
    assert found.tokens == before.tokens
    assert found.mean is not None
    assert found.mean == pytest.approx(expected / before.tokens, rel=1e-6)
    sums, counts = [0.0] * 4, [0] * 4
    for number, window in enumerate(windows):
        sums[window.cluster] += (0.25 + 0.01 * number) * window.predicted
        counts[window.cluster] += window.predicted
    squares = sum((total - found.mean * count) ** 2 for total, count in zip(sums, counts, strict=True))
    assert found.standard_error == pytest.approx(math.sqrt(4 / 3 * squares) / sum(counts), rel=1e-6)
    assert loss_difference(before, before).standard_error == 0


def test_models_measured_on_different_text_cannot_be_paired() -> None:
    windows = random_windows()
    before = summarise(windows, random_figures(windows), 20)
    after = summarise(windows[:-1], random_figures(windows[:-1]), 20)
    with pytest.raises(RequestError, match=r"^the two models were measured on different text \(821 and 820 tokens"):
        loss_difference(before, after)


@pytest.fixture(scope="module")
def demo(demo_model: Path) -> SimpleNamespace:
    """The demo model in float32, its tokenizer and three documents of held-out text."""
    raw_config = read_config(demo_model / CONFIG_FILE)
    architecture = find_architecture(raw_config["model_type"])
    model = load_model(architecture, demo_model, raw_config, torch.float32, torch.device("cpu"))
    text = held_out_text_path().read_text(encoding="utf-8")
    texts = [text[:1500], text[2000:2400], text[3000:4800]]
    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    documents = [encode_document(tokenizer, text) for text in texts]
    return SimpleNamespace(model=model, tokenizer=tokenizer, texts=texts, documents=documents)


def test_figures_are_those_of_lm_eval(demo: SimpleNamespace) -> None:
    """Word and byte perplexity and bits per byte as the `wikitext` task defines them."""
    huggingface = pytest.importorskip("lm_eval.models.huggingface")
    metrics = pytest.importorskip("lm_eval.api.metrics")
    theirs = huggingface.HFLM(pretrained=demo.model, tokenizer=demo.tokenizer, max_length=128, batch_size=4)
    requests = [SimpleNamespace(args=(text,)) for text in demo.texts]
    likelihoods = theirs.loglikelihood_rolling(requests, disable_tqdm=True)
    words = [len(re.split(r"\s+", text)) for text in demo.texts]
    sizes = [len(text.encode("utf-8")) for text in demo.texts]

    windows = rolling_windows(demo.documents, 128, prefix=theirs.prefix_token_id)
    found = measure_text(demo.model, windows, batch_size=4)
    assert (found.words, found.bytes) == (sum(words), sum(sizes))
    by_word, by_byte = list(zip(likelihoods, words, strict=True)), list(zip(likelihoods, sizes, strict=True))
    assert found.word_perplexity == pytest.approx(metrics.weighted_perplexity(by_word), rel=1e-5)
    assert found.byte_perplexity == pytest.approx(metrics.weighted_perplexity(by_byte), rel=1e-5)
    assert found.bits_per_byte == pytest.approx(metrics.bits_per_byte(by_byte), rel=1e-5)


def test_batch_size_does_not_move_the_figures(demo: SimpleNamespace) -> None:
    windows = sliding_windows(demo.documents, 128, 64)
    one, other = (measure_text(demo.model, windows, batch_size) for batch_size in (1, 5))
    assert one.loss.mean == pytest.approx(other.loss.mean, rel=1e-6)
    assert one.bits_per_byte == pytest.approx(other.bits_per_byte, rel=1e-6)


def test_an_unchanged_model_is_no_worse(demo: SimpleNamespace) -> None:
    windows = disjoint_windows(demo.documents, 128)
    before, after = compare_text(demo.model, demo.model, windows, batch_size=4)
    assert before.kl is None
    assert after.kl is not None
    assert after.kl.mean is not None
    assert abs(after.kl.mean) < 1e-6
    assert replace(after, kl=None) == before == measure_text(demo.model, windows, batch_size=4)


def test_figures_are_json(demo: SimpleNamespace) -> None:
    figures = compare_text(demo.model, demo.model, disjoint_windows(demo.documents, 128), batch_size=4)[1]
    stored = json.loads(json.dumps(asdict(figures), allow_nan=False))
    assert stored["kl"]["mean"] == figures.kl.mean  # type: ignore[union-attr]
    assert stored["by_position"][0]["loss"]["tokens"] == figures.by_position[0].loss.tokens
