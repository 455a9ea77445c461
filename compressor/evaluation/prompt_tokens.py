"""Prompts as token ids, and where their answers stand in them."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from compressor.errors import RequestError
from compressor.evaluation.token_spans import token_span
from compressor.prompts.base import CountsTogether, Prompt
from compressor.tokenization import (
    EncodedText,
    Span,
    encode_texts,
    require_embedding,
    special_prefix,
    with_prefix,
)

TAIL_CHARACTERS = 64
"""Characters of a prompt's end that are encoded together with its completion."""

PROMPTS_PER_CALL = 64
"""Prompts given to the tokenizer at once, which encodes them in parallel."""


@dataclass(frozen=True)
class PromptTokens:
    """`prompt` int64 [P] is what a model reads first, `whole` int64 [P + C] that and the ideal completion.

    `answers` are the half-open ranges in `whole` of the tokens that carry a character of each answer.
    """

    prompt: Tensor
    whole: Tensor
    answers: tuple[Span, ...]


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    vocab_size: int,
    known: Mapping[str, Sequence[int]] | None = None,
) -> list[PromptTokens]:
    """Token ids for a model with `vocab_size` embeddings. `known` are the ids of texts, as `TokenCounter` has them.

    A prompt gets the tokens that the tokenizer puts before a sequence (BOS) once, and none at its end.
    `whole` begins with `prompt`, so it is what a model goes through that reads the prompt and then
    generates the completion.

    Raises:
        RequestError: the tokenizer gives no tokens for a prompt, a completion or an answer, or a token
            that has no embedding.
        ValueError: an answer does not occur in the completion after the one before it.
    """
    prefix = special_prefix(tokenizer)
    encoded: list[PromptTokens] = []
    for start in range(0, len(prompts), PROMPTS_PER_CALL):
        encoded.extend(_encode_group(tokenizer, prompts[start : start + PROMPTS_PER_CALL], prefix, known or {}))
    highest = max((int(tokens.whole.max()) for tokens in encoded), default=-1)
    require_embedding(tokenizer, highest, vocab_size)
    return encoded


class TokenCounter(CountsTogether):
    """Counts the tokens that `encode_prompts` makes of a prompt's text.

    `known`, where it is not None, gets the ids of every text that is counted, without the prefix: a prompt's text is
    the last of several that were counted for it, and need not be encoded again.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, known: dict[str, Sequence[int]] | None = None) -> None:
        self._tokenizer = tokenizer
        self._prefix = special_prefix(tokenizer)
        self._known = known

    def many(self, texts: Sequence[str]) -> list[int]:
        encoded = encode_texts(self._tokenizer, texts)
        if self._known is not None:
            self._known.update((each.text, array("q", each.ids)) for each in encoded)
        return [len(with_prefix(each.ids, self._prefix)) for each in encoded]


def _encode_group(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    prefix: list[int],
    known: Mapping[str, Sequence[int]],
) -> Iterator[PromptTokens]:
    """The completion is encoded behind the last characters of its prompt, as tokenizers treat a text's start apart."""
    tails = encode_texts(tokenizer, [prompt.text[-TAIL_CHARACTERS:] for prompt in prompts])
    behind = [tail.text + prompt.completion for tail, prompt in zip(tails, prompts, strict=True)]
    joined = encode_texts(tokenizer, behind, offsets=True)
    unknown = [prompt.text for prompt in prompts if prompt.text not in known]
    if unknown:
        known = {**known, **{each.text: each.ids for each in encode_texts(tokenizer, unknown)}}
    for prompt, tail, both in zip(prompts, tails, joined, strict=True):
        ids = list(known[prompt.text])
        _require_tokens(prompt, prompt.text, ids)
        question = with_prefix(ids, prefix)
        if both.ids[: len(tail.ids)] == tail.ids:
            yield _behind_prompt(tokenizer, prompt, question, both, len(tail.text), len(tail.ids))
        else:
            # A token would reach over the prompt's end, and a model that has read the prompt cannot choose it any more.
            (apart,) = encode_texts(tokenizer, [prompt.completion], offsets=True)
            yield _behind_prompt(tokenizer, prompt, question, apart, 0, 0)


def _behind_prompt(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Prompt,
    question: list[int],
    encoded: EncodedText,
    characters: int,
    tokens: int,
) -> PromptTokens:
    """`encoded` is the completion, behind `characters` and `tokens` that belong to the prompt."""
    completion = encoded.ids[tokens:]
    _require_tokens(prompt, prompt.completion, completion)
    answers = []
    for begin, stop in _answer_characters(prompt):
        first, last = token_span(tokenizer, encoded, characters + begin, characters + stop)
        first = max(first, tokens)
        _require_tokens(prompt, prompt.completion[begin:stop], encoded.ids[first:last])
        answers.append((first - tokens + len(question), last - tokens + len(question)))
    return PromptTokens(torch.tensor(question), torch.tensor(question + completion), tuple(answers))


def _answer_characters(prompt: Prompt) -> Iterator[Span]:
    """Where each answer stands in the completion, behind the one before it."""
    begin = 0
    for answer in prompt.answers:
        begin = prompt.completion.find(answer, begin)
        if begin < 0 or not answer:
            raise ValueError(f"{prompt.task}: the completion {prompt.completion!r} lacks the answer {answer!r}")
        yield begin, begin + len(answer)
        begin += len(answer)


def _require_tokens(prompt: Prompt, text: str, ids: list[int]) -> None:
    if not ids:
        raise RequestError(
            f'the tokenizer gives no tokens for "{text[:40]}", {len(text)} characters of a prompt of {prompt.task}; '
            "put the tokenizer that the model was trained with into its folder."
        )
