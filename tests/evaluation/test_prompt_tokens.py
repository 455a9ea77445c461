"""Token ids and answer spans with tokenizers of several kinds."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from compressor.errors import RequestError
from compressor.evaluation.prompt_tokens import TokenCounter, encode_prompts
from compressor.prompts.base import Prompt
from compressor.tokenization import special_prefix
from tests.calibration.tiny_tokenizers import BOS, EOS, ids, trained_tokenizer, word_tokenizer
from tests.evaluation.hand_made_prompts import NEEDLES, completion_prompt

CORPUS = "the special magic number is 1234 5678 9012 while käse and 東京 are words, also: kettle zinc amber " * 4
PROMPTS = [
    completion_prompt("the special magic number is", " 90125678, also 1234.", ("90125678", "1234")),
    completion_prompt("are words:\n", "kettle and amber.", ("kettle", "amber")),
    completion_prompt("magic käse:", " 東京käse, zinc東京 zinc", ("東京", "käse", "東京", "zinc")),
    completion_prompt("the number " * 40 + "is", " 12 12 12", ("12", "12")),
]


class SlowTokenizer(PreTrainedTokenizer):
    """Python code without offsets: tokens of at most three characters, none over a line or the start of a word."""

    def __init__(self) -> None:
        self.known: dict[str, int] = {}
        super().__init__()

    @property
    def vocab_size(self) -> int:
        return len(self.known)

    def get_vocab(self) -> dict[str, int]:
        return dict(self.known)

    def _tokenize(self, text: str) -> list[str]:
        words = re.findall(r" ?[^ \n]+|\s", text)
        return [word[start : start + 3] for word in words for start in range(0, len(word), 3)]

    def _convert_token_to_id(self, token: str) -> int:
        return self.known.setdefault(token, len(self.known))

    def _convert_id_to_token(self, index: int) -> str:
        return list(self.known)[index]


def tokenizers() -> dict[str, PreTrainedTokenizerBase]:
    trained = {kind: trained_tokenizer(kind, CORPUS) for kind in ("byte", "metaspace", "prepend")}
    return {**trained, "slow": SlowTokenizer()}


@pytest.mark.parametrize("kind", ["byte", "metaspace", "prepend", "slow"])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_tokens_are_those_of_the_whole_text(kind: str, prompt: Prompt) -> None:
    tokenizer = tokenizers()[kind]
    (encoded,) = encode_prompts(tokenizer, [prompt], 1000)
    assert encoded.prompt.tolist() == tokenizer(prompt.text)["input_ids"]
    assert encoded.whole.tolist() == tokenizer(prompt.text + prompt.completion)["input_ids"]
    assert TokenCounter(tokenizer)(prompt.text) == len(encoded.prompt)


@pytest.mark.parametrize("kind", ["byte", "prepend", "slow"])
def test_what_was_counted_need_not_be_encoded_again(kind: str) -> None:
    tokenizer = tokenizers()[kind]
    known: dict[str, Sequence[int]] = {}
    TokenCounter(tokenizer, known).many([prompt.text for prompt in PROMPTS[:-1]])
    assert known.keys() == {prompt.text for prompt in PROMPTS[:-1]}
    fresh, reused = (encode_prompts(tokenizer, PROMPTS, 1000, counted) for counted in (None, known))
    for one, other in zip(fresh, reused, strict=True):
        assert (one.prompt.tolist(), one.whole.tolist(), one.answers) == (
            other.prompt.tolist(),
            other.whole.tolist(),
            other.answers,
        )
    # What is known is taken as it is.
    (taken,) = encode_prompts(tokenizer, PROMPTS[:1], 1000, {PROMPTS[0].text: [1, 2, 3]})
    assert taken.prompt.tolist()[-3:] == [1, 2, 3]


@pytest.mark.parametrize("kind", ["byte", "metaspace", "prepend", "slow"])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_answers_are_in_their_spans(kind: str, prompt: Prompt) -> None:
    """A span's text has the answer, and without its first or its last token it has not."""
    tokenizer = tokenizers()[kind]
    (encoded,) = encode_prompts(tokenizer, [prompt], 1000)

    def text(first: int, last: int) -> str:
        kept = encoded.whole[first:last].tolist()
        if kind == "byte":
            return tokenizer.decode(kept, clean_up_tokenization_spaces=False)
        return "".join(tokenizer.convert_ids_to_tokens(kept)).replace("▁", " ")

    assert len(encoded.answers) == len(prompt.answers)
    for answer, (first, last) in zip(prompt.answers, encoded.answers, strict=True):
        assert len(encoded.prompt) <= first < last <= len(encoded.whole)
        assert answer in text(first, last)
        assert answer not in text(first + 1, last)
        assert answer not in text(first, last - 1)
    assert list(encoded.answers) == sorted(encoded.answers)


def test_bundled_tokenizer(demo_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    for prompt, encoded in zip(NEEDLES, encode_prompts(tokenizer, NEEDLES, len(tokenizer)), strict=True):
        assert encoded.whole.tolist() == tokenizer(prompt.text + prompt.completion)["input_ids"]
        ((first, last),) = encoded.answers
        assert (first, last) == (len(encoded.prompt), len(encoded.whole))
        assert tokenizer.decode(encoded.whole[first:last]) == f" {prompt.answers[0]}"


def test_special_tokens_stand_before_the_prompt_alone() -> None:
    """Once, also where the tokenizer puts EOS at the end, and where the text has BOS already."""
    core = word_tokenizer().backend_tokenizer
    core.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", BOS), ("</s>", EOS)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    prompts = [
        completion_prompt("one two", " three four", ("three",)),
        completion_prompt("<s> one two", " four", ("four",)),
    ]
    first, second = encode_prompts(tokenizer, prompts, 10)
    assert special_prefix(tokenizer) == [BOS]
    assert first.prompt.tolist() == second.prompt.tolist() == [BOS, *ids("one two")]
    assert first.whole.tolist() == [BOS, *ids("one two three four")]
    assert first.answers == ((3, 4),)


def test_a_token_over_the_end_of_the_prompt() -> None:
    """The prompt ends with what begins the next word's token: the completion is then encoded by itself."""
    tokenizer = trained_tokenizer("byte", CORPUS)
    prompt = completion_prompt("the special magic number is ", "kettle zinc", ("kettle", "zinc"))
    (encoded,) = encode_prompts(tokenizer, [prompt], 1000)
    question, completion = tokenizer(prompt.text)["input_ids"], tokenizer("kettle zinc")["input_ids"][1:]
    assert tokenizer(prompt.text + prompt.completion)["input_ids"][: len(question)] != question
    assert encoded.whole.tolist() == question + completion
    assert [tokenizer.decode(encoded.whole[first:last]) for first, last in encoded.answers] == ["kettle", " zinc"]


def test_refusals() -> None:
    prompt = completion_prompt("one two", " three four", ("four",))
    with pytest.raises(RequestError) as caught:
        encode_prompts(word_tokenizer(), [prompt], 6)
    assert str(caught.value) == (
        'the tokenizer gives token 6 ("four") and the model has embeddings for 6 tokens; put the tokenizer that the '
        "model was trained with into its folder."
    )
    core = Tokenizer(models.WordLevel({"<unk>": 0, "one": 1}, "<unk>"))
    core.normalizer = normalizers.Replace(Regex("[a-z ]+"), "")
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    nothing = PreTrainedTokenizerFast(tokenizer_object=core)
    with pytest.raises(RequestError) as caught:
        encode_prompts(nothing, [prompt], 6)
    assert str(caught.value) == (
        'the tokenizer gives no tokens for "one two", 7 characters of a prompt of by_hand; put the tokenizer that the '
        "model was trained with into its folder."
    )
    with pytest.raises(RequestError, match='no tokens for "four", 4 characters'):
        encode_prompts(nothing, [completion_prompt("one 2", "3 four", ("four",))], 6)
    with pytest.raises(ValueError, match="lacks the answer 'five'"):
        encode_prompts(word_tokenizer(), [completion_prompt("one", " two", ("five",))], 10)
    assert encode_prompts(word_tokenizer(), [], 10) == []
