"""One document to token ids: beginning-of-sequence tokens, conversations, long texts in pieces."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers.normalizers import Replace

from compressor.calibration import encoding
from compressor.calibration.documents import ChatDocument, TextDocument
from compressor.calibration.encoding import DocumentEncoder, pieces
from compressor.calibration.tokenizer import load_tokenizer
from compressor.demo import held_out_text_path
from compressor.errors import RequestError
from tests.calibration.tiny_tokenizers import BOS, CHAT_TEMPLATE, EOS, UNK, ids, trained_tokenizer, word_tokenizer

ALL = 10**9


def text(*chunks: str) -> TextDocument:
    return TextDocument(chunks)


def chat(*turns: tuple[str, object]) -> ChatDocument:
    return ChatDocument(tuple({"role": role, "content": content} for role, content in turns))


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("one two", [BOS, *ids("one two")]),
        ("<s> one two", [BOS, *ids("one two")]),
        ("<s>one two", [BOS, *ids("one two")]),
        ("one <s> two", [BOS, *ids("one <s> two")]),
        ("   ", []),
        ("", []),
    ],
)
def test_one_bos_at_the_beginning_of_a_document(written: str, expected: list[int]) -> None:
    assert DocumentEncoder(word_tokenizer(), 10).encode(text(written), ALL) == expected


def test_a_tokenizer_without_bos() -> None:
    encoder = DocumentEncoder(word_tokenizer(bos=False, eos=False), 10)
    assert encoder.encode(text("one two"), ALL) == ids("one two")
    assert encoder.separator is None


def test_a_conversation_gets_the_bos_of_its_template_only() -> None:
    encoder = DocumentEncoder(word_tokenizer(chat_template=CHAT_TEMPLATE), 10)
    assert encoder.encode(chat(("user", "one\r\ntwo")), ALL) == [BOS, *ids("user one two")]
    silent = DocumentEncoder(word_tokenizer(chat_template=CHAT_TEMPLATE.replace("{{ bos_token }}", "")), 10)
    assert silent.encode(chat(("user", "one")), ALL) == ids("user one")


def test_a_conversation_that_the_template_refuses_is_counted() -> None:
    encoder = DocumentEncoder(word_tokenizer(chat_template=CHAT_TEMPLATE), 10)
    assert encoder.problems() == ()
    assert encoder.encode(chat(("user", "one")), ALL) != []
    assert encoder.encode(chat(("critic", "one")), ALL) == []
    assert encoder.encode(chat(("judge", "one")), ALL) == []
    assert encoder.problems() == ("the chat template refused 2 of 3 conversations (first: unknown role critic)",)


def test_a_conversation_without_a_chat_template_is_refused() -> None:
    with pytest.raises(RequestError, match="holds conversations and the model's tokenizer has no chat template; "):
        DocumentEncoder(word_tokenizer(), 10).encode(chat(("user", "one")), ALL)


@pytest.mark.parametrize(("written", "token"), [("one b a", 9), ("four", 6)])
def test_a_token_without_an_embedding_is_refused(written: str, token: int) -> None:
    with pytest.raises(RequestError, match=rf'gives token {token} \("\w+"\) and the model has embeddings for {token} '):
        DocumentEncoder(word_tokenizer(), token).encode(text(written), ALL)
    assert len(DocumentEncoder(word_tokenizer(), token + 1).encode(text(written), ALL)) > 1


def test_a_separator_without_an_embedding_is_refused() -> None:
    with pytest.raises(RequestError, match=r'gives token 2 \("</s>"\) and the model has embeddings for 2 tokens'):
        DocumentEncoder(word_tokenizer(), EOS)


def test_settings_of_the_tokenizer_file_neither_cut_nor_pad() -> None:
    tokenizer = word_tokenizer()
    tokenizer.backend_tokenizer.enable_truncation(3)
    tokenizer.backend_tokenizer.enable_padding(length=8, pad_id=UNK)
    tokenizer.model_max_length = 3
    assert DocumentEncoder(tokenizer, 10).encode(text("one " * 5), ALL) == [BOS, *ids("one " * 5)]


@pytest.mark.parametrize("chunk", [1, 7, 10_000])
@pytest.mark.parametrize("size", [1, 2, 10, 1000])
def test_pieces_are_the_text_whatever_its_chunks(size: int, chunk: int) -> None:
    whole = "ab cd  ef\ngh\n\n  ij" * 20 + " " * 30 + "x" * 30 + "\n" * 30
    cut = list(pieces([whole[at : at + chunk] for at in range(0, len(whole), chunk)], size))
    assert "".join(cut) == whole
    assert max(map(len, cut)) <= size
    assert cut == list(pieces([whole], size))


def test_pieces_end_between_two_words_or_after_a_line_where_they_can() -> None:
    assert list(pieces(["one two three"], 9)) == ["one two", " three"]
    assert list(pieces(["one  two\nthree"], 10)) == ["one  two\n", "three"]
    assert list(pieces(["abcdefgh"], 3)) == ["abc", "def", "gh"]
    assert list(pieces([""], 3)) == []


@pytest.mark.parametrize("kind", ["byte", "metaspace", "prepend"])
def test_ids_of_a_text_in_pieces_are_the_ids_of_the_whole(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = held_out_text_path().read_text(encoding="utf-8")[:20_000]
    tokenizer = trained_tokenizer(kind, whole)
    expected = tokenizer(whole)["input_ids"]
    monkeypatch.setattr(encoding, "PIECE_CHARACTERS", 300)
    assert len(list(pieces([whole], 300))) > 60
    assert DocumentEncoder(tokenizer, 400).encode(text(whole), ALL) == expected


def test_the_bundled_tokenizer_in_pieces(demo_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = held_out_text_path().read_text(encoding="utf-8")
    tokenizer = load_tokenizer(demo_model, trust_remote_code=False)
    expected = tokenizer(whole)["input_ids"]
    monkeypatch.setattr(encoding, "PIECE_CHARACTERS", 500)
    assert DocumentEncoder(tokenizer, 8192).encode(text(whole), ALL) == expected


def test_a_long_text_is_encoded_only_as_far_as_it_is_needed() -> None:
    def chunks() -> Iterator[str]:
        yield "one two " * 10_000
        pytest.fail("the second chunk is not needed")

    encoder = DocumentEncoder(word_tokenizer(), 9)  # "b" has no embedding: to encode the end is an error
    assert encoder.encode(TextDocument(chunks()), 4) == [BOS, *ids("one two one")]
    assert encoder.encode(text("one two " * 4_000_000 + "b"), 4) == [BOS, *ids("one two one")]
    with pytest.raises(RequestError, match='gives token 9 \\("b"\\)'):
        encoder.encode(text("one two " * 10 + "b"), ALL)


def test_normalizers_see_the_text() -> None:
    tokenizer = word_tokenizer()
    tokenizer.backend_tokenizer.normalizer = Replace("ONE", "one")
    assert DocumentEncoder(tokenizer, 10).encode(text("ONE"), ALL) == [BOS, *ids("one")]
