"""Configs of published models, whose weights the benchmarks draw at random."""

from __future__ import annotations

QWEN35_08B = {
    "vocab_size": 248320, "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 24,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 16,
    "linear_num_value_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "tie_word_embeddings": True,
}  # fmt: skip
"""The text tower of Qwen3.5-0.8B, as its config's fields."""
