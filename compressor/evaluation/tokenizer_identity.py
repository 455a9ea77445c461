"""Whether two tokenizers make the same tokens of a text."""

from __future__ import annotations

import hashlib
import json

from transformers import PreTrainedTokenizerBase

from compressor.tokenization import encode_texts

SAMPLE_TEXT = (
    "The state of a layer is 4,096 numbers; it doesn't grow.\n"
    "\n"
    "  def read(path: Path) -> str:\n"
    "\treturn path.read_text(encoding='utf-8')  # 100%\n"
    "ÜBER naïve façade — “quoted” … 3.14159 ≈ π\n"
    "Привет, мир. 你好,世界。こんにちは。مرحبا 🙂\n"
    "<|endoftext|> [SEP] </s> https://example.org/a_b?c=d&e=f\n"
)
"""Prose, code, numbers, scripts, white space and spellings of special tokens: what tokenizers differ in."""


def tokenizer_sha256(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hex SHA-256 over the vocabulary with its ids, and the ids of `SAMPLE_TEXT` with special tokens and without.

    Two tokenizers of one vocabulary may still cut a text differently, since merges and normalisation differ.
    """
    ids = [encode_texts(tokenizer, [SAMPLE_TEXT], special)[0].ids for special in (False, True)]
    content = {"vocabulary": sorted(tokenizer.get_vocab().items()), "sample": ids}
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()
