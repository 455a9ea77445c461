"""Tokenizers made on the spot."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<unk>", "<s>", "</s>"]
UNK, BOS, EOS = range(3)
WORDS = ["one", "two", "three", "four", "user", "a", "b"]

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role not in ['user', 'assistant'] %}{{ raise_exception('unknown role ' + message.role) }}{% endif %}"
    "{{ message.role }} {{ message.content }} {% endfor %}"
)


def ids(text: str) -> list[int]:
    """What the word tokenizers below make of `text`, by hand; punctuation does not occur."""
    vocabulary = SPECIAL + WORDS
    return [vocabulary.index(word) if word in vocabulary else UNK for word in text.split()]


def word_tokenizer(bos: bool = True, eos: bool = True, chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """One token a word; with `bos` the post-processor puts `<s>` before every sequence."""
    core = Tokenizer(models.WordLevel({word: index for index, word in enumerate(SPECIAL + WORDS)}, "<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if bos:
        core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        unk_token="<unk>",
        bos_token="<s>" if bos else None,
        eos_token="</s>" if eos else None,
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def number_tokenizer(count: int) -> PreTrainedTokenizerFast:
    """Token `n` is the word `n` below `count`: the ids of the text "0 1 2 ..." say where they stand. No BOS, no EOS."""
    core = Tokenizer(models.WordLevel({str(number): number for number in range(count)}, "0"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=core)


def trained_tokenizer(kind: str, text: str) -> PreTrainedTokenizerFast:
    """A BPE tokenizer of 400 tokens.

    `kind` is "byte" (GPT-2's splitting), "metaspace" (a space before the text, unless it begins
    with one) or "prepend" (Llama 2's normalizer: a space before any text).
    """
    core = Tokenizer(models.BPE(unk_token="<unk>"))
    words = [text]
    if kind == "byte":
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        core.decoder = decoders.ByteLevel()
    elif kind == "metaspace":
        core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    else:
        core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        words = text.split(" ")  # nothing else keeps its merges inside words
    core.train_from_iterator(
        words, trainers.BpeTrainer(vocab_size=400, special_tokens=list(SPECIAL), show_progress=False)
    )
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
