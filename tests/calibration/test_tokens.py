"""Packing: which tokens, in which sequences, and what is said about it."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path

import pytest
import torch
from tokenizers import Regex, normalizers
from torch import Tensor

from compressor.calibration.documents import TextDocument
from compressor.calibration.text import DEMO_HELD_OUT, DocumentStream, TextSource, held_out_source, open_documents
from compressor.calibration.tokenizer import load_tokenizer
from compressor.calibration.tokens import (
    POOL_FACTOR,
    PackedTokens,
    batches,
    pack_tokens,
    pad_batch,
    token_sha256,
)
from compressor.errors import RequestError
from tests.calibration.tiny_tokenizers import BOS, CHAT_TEMPLATE, EOS, ids, number_tokenizer, word_tokenizer

VOCAB_SIZE = 10


def rows(folder: Path, *texts: object) -> DocumentStream:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return open_documents(TextSource(str(path)))


def lists(sequences: tuple[Tensor, ...]) -> list[list[int]]:
    assert all(sequence.dtype == torch.int64 and sequence.dim() == 1 for sequence in sequences)
    return [sequence.tolist() for sequence in sequences]


def numbers(folder: Path, count: int, documents: int = 1) -> DocumentStream:
    """The numbers below `count` as so many documents of equal length, for `number_tokenizer`."""
    length = count // documents
    return rows(folder, *(" ".join(map(str, range(at, at + length))) for at in range(0, count, length)))


def pack_demo(demo_model: Path, samples: int, length: int, held_out: int, seed: int = 0) -> PackedTokens:
    tokenizer = load_tokenizer(demo_model, trust_remote_code=False)
    source = TextSource("demo")
    return pack_tokens(
        open_documents(source),
        tokenizer,
        samples,
        length,
        held_out,
        seed,
        vocab_size=8192,
        held_out_source=held_out_source(source),
    )


def test_documents_are_joined_by_eos_and_cut_into_sequences(tmp_path: Path) -> None:
    stream = rows(tmp_path, "one two", "", "three", "   ", "<s> four four")
    packed = pack_tokens(stream, word_tokenizer(), 10, 4, 0, 0, vocab_size=VOCAB_SIZE)
    joined = [BOS, *ids("one two"), EOS, BOS, *ids("three"), EOS, BOS, *ids("four four")]
    assert lists(packed.calibration) == [joined[:4], joined[4:8], joined[8:]]
    assert packed.held_out == ()
    assert packed.documents == 3
    assert packed.tokens == 10
    assert packed.requested_tokens == 40
    assert packed.problems == (
        "2 of 5 rows have no text in 'text' (first: line 2)",
        f"the calibration source {tmp_path / 'rows.jsonl'} has 10 tokens of the 40 asked for (10 x 4); "
        "all of them are used",
    )


@pytest.mark.parametrize(
    ("bos", "eos", "expected"),
    [
        (False, False, ids("one two")),
        (False, True, [*ids("one"), EOS, *ids("two")]),
        (True, False, [BOS, *ids("one"), BOS, *ids("two")]),
    ],
)
def test_tokenizers_that_lack_bos_or_eos(tmp_path: Path, bos: bool, eos: bool, expected: list[int]) -> None:
    packed = pack_tokens(rows(tmp_path, "one", "two"), word_tokenizer(bos, eos), 1, 9, 0, 0, vocab_size=VOCAB_SIZE)
    assert lists(packed.calibration) == [expected]


def test_one_separator_where_bos_and_eos_are_the_same_token(tmp_path: Path) -> None:
    tokenizer = word_tokenizer(bos=True)
    tokenizer.eos_token = "<s>"
    packed = pack_tokens(rows(tmp_path, "one <s>", "two", "<s> three"), tokenizer, 1, 9, 0, 0, vocab_size=VOCAB_SIZE)
    assert lists(packed.calibration) == [[BOS, *ids("one"), BOS, BOS, *ids("two"), BOS, *ids("three")]]
    plain = word_tokenizer(bos=False)
    packed = pack_tokens(rows(tmp_path, "one </s>", "two", "</s> three"), plain, 1, 9, 0, 0, vocab_size=VOCAB_SIZE)
    assert lists(packed.calibration) == [[*ids("one"), EOS, *ids("two"), EOS, *ids("three")]]


def test_conversations_are_packed_as_their_template_renders_them(tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl"
    line = json.dumps({"messages": [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]})
    path.write_text(f"{line}\n{line.replace('assistant', 'critic')}\n{line.replace('one', 'four')}\n")
    tokenizer = word_tokenizer(chat_template=CHAT_TEMPLATE.replace("endfor %}", "endfor %}</s>"))
    packed = pack_tokens(open_documents(TextSource(str(path))), tokenizer, 1, 99, 0, 0, vocab_size=VOCAB_SIZE)
    first, second = (ids(f"user {word} assistant two </s>") for word in ("one", "four"))
    assert lists(packed.calibration) == [[BOS, *first, BOS, *second]]
    assert packed.problems[0] == "the chat template refused 1 of 3 conversations (first: unknown role critic)"


def test_a_source_of_refused_conversations_says_so(tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "critic", "content": "one"}]}) + "\n")
    tokenizer = word_tokenizer(chat_template=CHAT_TEMPLATE)
    with pytest.raises(RequestError, match=r"gives no token .* \(the chat template refused 1 of 1 conversations"):
        pack_tokens(open_documents(TextSource(str(path))), tokenizer, 1, 9, 0, 0, vocab_size=VOCAB_SIZE)


def test_nothing_overlaps_and_the_seed_decides(tmp_path: Path) -> None:
    samples, length, held_out = 6, 8, 3
    pool = POOL_FACTOR * samples * length

    def pack(seed: int) -> PackedTokens:
        stream = numbers(tmp_path, 500, documents=20)
        return pack_tokens(stream, number_tokenizer(500), samples, length, held_out, seed, vocab_size=500)

    drawn = [pack(seed) for seed in range(5)]
    for packed in drawn:
        first = [int(sequence[0]) for sequence in packed.calibration]
        assert first == sorted(set(first))
        assert len(first) == samples
        assert max(first) < pool
        assert all(at % length == 0 for at in first)
        assert lists(packed.calibration) == [list(range(at, at + length)) for at in first]
        assert lists(packed.held_out) == [list(range(at, at + length)) for at in range(pool, pool + 24, length)]
        assert packed.problems == ()
        assert packed.tokens == packed.requested_tokens == samples * length
        assert packed.documents == 9  # 216 tokens in documents of 25
    assert len({packed.sha256 for packed in drawn}) == 5
    assert lists(pack(3).calibration) == lists(drawn[3].calibration)
    assert pack(3).sha256 == drawn[3].sha256


@pytest.mark.parametrize(
    ("tokens", "calibration", "held_out"),
    [
        (3, [3], []),
        (4, [4], []),
        (11, [4, 4, 3], []),
        (12, [4, 4, 4], []),
        (13, [4, 4, 4], []),  # one token alone predicts nothing
        (14, [4, 4, 4], [2]),
        (19, [4, 4, 4], [4, 3]),
        (20, [4, 4, 4], [4, 4]),
        (23, [4, 4, 4], [4, 4]),
        (200, [4, 4, 4], [4, 4]),
    ],
)
def test_calibration_comes_first_where_the_source_is_short(
    tmp_path: Path, tokens: int, calibration: list[int], held_out: list[int]
) -> None:
    stream = numbers(tmp_path, tokens)
    packed = pack_tokens(stream, number_tokenizer(tokens), 3, 4, 2, 7, vocab_size=tokens)
    assert [len(sequence) for sequence in packed.calibration] == calibration
    assert [len(sequence) for sequence in packed.held_out] == held_out
    assert packed.tokens == sum(calibration)
    assert (packed.problems != ()) == (tokens < 12)
    used = [token for sequence in lists(packed.calibration + packed.held_out) for token in sequence]
    assert used == sorted(set(used))
    if tokens < 20:
        assert used == list(range(len(used)))


def test_a_file_of_one_line_is_packed_as_far_as_it_is_needed(tmp_path: Path) -> None:
    path = tmp_path / "line.txt"
    path.write_text("one two " * 4_000_000 + "b")
    stream = open_documents(TextSource(str(path)))
    packed = pack_tokens(stream, word_tokenizer(eos=False), 2, 4, 1, 0, vocab_size=9)  # "b" has no embedding
    assert packed.tokens == 8
    assert len(packed.held_out) == 1


def test_a_long_row_is_packed_as_far_as_it_is_needed(tmp_path: Path) -> None:
    stream = rows(tmp_path, "one two", "one two " * 4_000_000 + "b")
    packed = pack_tokens(stream, word_tokenizer(eos=False), 2, 4, 0, 0, vocab_size=9)
    assert packed.tokens == 8


def test_the_file_with_mark_and_crlf_gives_the_same_tokens(tmp_path: Path, demo_model: Path) -> None:
    tokenizer = load_tokenizer(demo_model, trust_remote_code=False)
    texts = ("Fröhlich\nzwei", "three  \n\n four")
    hashes = set()
    for suffix in (".jsonl", ".txt"):
        lines = [json.dumps({"text": text}) for text in texts] if suffix == ".jsonl" else list(texts)
        clean = ("\n".join(lines) + "\n").encode()
        for data in (clean, b"\xef\xbb\xbf" + clean.replace(b"\n", b"\r\n")):
            path = tmp_path / f"text{suffix}"
            path.write_bytes(data)
            stream = open_documents(TextSource(str(path)))
            hashes.add(pack_tokens(stream, tokenizer, 1, 99, 0, 0, vocab_size=8192).sha256)
    assert len(hashes) == 2, "one for each format"


def test_too_few_tokens_are_refused_with_both_numbers(tmp_path: Path) -> None:
    tokenizer = number_tokenizer(30)
    pack_tokens(numbers(tmp_path, 30), tokenizer, 5, 8, 0, 0, vocab_size=30, minimum_tokens=30)
    with pytest.raises(RequestError) as caught:
        pack_tokens(numbers(tmp_path, 30), tokenizer, 5, 8, 0, 0, vocab_size=30, minimum_tokens=31)
    assert str(caught.value) == (
        f"the calibration source {tmp_path / 'rows.jsonl'} has 30 tokens and at least 31 are needed; use a longer text."
    )
    with pytest.raises(RequestError) as caught:
        pack_tokens(numbers(tmp_path, 30), tokenizer, 2, 8, 0, 0, vocab_size=30, minimum_tokens=31)
    assert str(caught.value) == (
        "2 calibration samples of 8 tokens are 16 tokens and at least 31 are needed; "
        "raise --calibration-samples or --sequence-length."
    )


def test_a_tokenizer_that_gives_no_token_is_refused(tmp_path: Path) -> None:
    tokenizer = word_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace(Regex("."), "")
    with pytest.raises(RequestError, match=r"the model's tokenizer gives no token for the calibration source .*; use"):
        pack_tokens(rows(tmp_path, "one"), tokenizer, 1, 8, 0, 0, vocab_size=VOCAB_SIZE)


def test_demo_holds_out_a_text_of_its_own(demo_model: Path) -> None:
    packed = pack_demo(demo_model, samples=4, length=512, held_out=3)
    assert [len(sequence) for sequence in packed.calibration + packed.held_out] == [512] * 7
    tokenizer = load_tokenizer(demo_model, trust_remote_code=False)
    beginning = next(iter(open_documents(TextSource(DEMO_HELD_OUT))))
    assert isinstance(beginning, TextDocument)
    assert tokenizer.decode(packed.held_out[0])[:200] == "".join(beginning.chunks)[:200]
    whole = pack_demo(demo_model, samples=1000, length=512, held_out=1000)
    assert whole.tokens == sum(len(sequence) for sequence in whole.calibration)
    assert whole.tokens > 35_000
    assert whole.documents == 5
    assert len(whole.held_out) > 30
    assert "of the 512,000 asked for (1,000 x 512); all of them are used" in whole.problems[0]


def test_hash_is_of_the_tokens_and_their_division() -> None:
    one = [torch.tensor([1, 2]), torch.tensor([3])]
    assert token_sha256(one) == hashlib.sha256(struct.pack("<5q", 2, 1, 2, 1, 3)).hexdigest()
    assert token_sha256(one) == token_sha256([part.int() for part in one])
    assert token_sha256(one) != token_sha256([torch.tensor([1]), torch.tensor([2, 3])])


def test_batches_hold_equal_lengths_and_no_padding() -> None:
    sequences = [torch.arange(4) + 10 * row for row in range(5)] + [torch.arange(3)]
    made = list(batches(sequences, 2))
    assert [tuple(batch.input_ids.shape) for batch in made] == [(2, 4), (2, 4), (1, 4), (1, 3)]
    assert all(batch.attention_mask is None for batch in made)
    assert [row.tolist() for batch in made for row in batch.input_ids] == [row.tolist() for row in sequences]
    assert [batch.num_tokens for batch in made] == [8, 8, 4, 3]
    assert list(batches([], 2)) == []


def test_padding_stands_on_the_right_and_is_masked() -> None:
    batch = pad_batch([torch.tensor([1, 2]), torch.tensor([3, 4, 5]), torch.tensor([6])], pad_token_id=9)
    assert batch.input_ids.tolist() == [[1, 2, 9], [3, 4, 5], [6, 9, 9]]
    assert batch.attention_mask is not None
    assert batch.attention_mask.tolist() == [[True, True, False], [True, True, True], [True, False, False]]
    assert batch.num_tokens == 6
