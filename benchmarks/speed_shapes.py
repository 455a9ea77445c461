"""Models of random weights for `benchmarks.speed`: configs of published sizes, cut to any key width by the adapters.

`gated_deltanet-1.3b` has 16 heads with keys of 128 and values of 256, fla's own default expand_v = 2: the state is
twice as large as the keys make it, 50 MB a sequence. `gated_deltanet-1.3b-narrow` has values of 128, which is what
brings the parameters to 1.3 billion beside the embeddings (1.6 with values of 256), and a state of 25 MB.
`gated_deltanet-1.3b-wide` is fla's default config as it stands: 21 layers with 6 heads, keys of 256 and values of 512,
1.25 billion parameters beside the embeddings and a state of 66 MB.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoConfig

from benchmarks.shapes import QWEN35_08B
from compressor.architectures.registry import architecture_of
from compressor.speed.measure import Subject

_FLA_13B = {"hidden_size": 2048, "num_hidden_layers": 24, "num_heads": 16, "vocab_size": 32000}
_GATED_13B = {"model_type": "gated_deltanet", **_FLA_13B, "head_dim": 128, "max_position_embeddings": 65536}
_QWEN_9B = {
    "vocab_size": 248320, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32,
    "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "tie_word_embeddings": False,
}  # fmt: skip
_TINY = {"hidden_size": 64, "num_hidden_layers": 2, "num_heads": 2, "vocab_size": 64, "intermediate_size": 64}

SHAPES: dict[str, dict[str, Any]] = {
    "gated_deltanet-1.3b": _GATED_13B | {"expand_v": 2.0},
    "gated_deltanet-1.3b-narrow": _GATED_13B | {"expand_v": 1.0},
    "gated_deltanet-1.3b-wide": {"model_type": "gated_deltanet", "max_position_embeddings": 65536},
    "delta_net-1.3b": {"model_type": "delta_net", **_FLA_13B, "max_position_embeddings": 65536},
    "qwen3.5-0.8b": {"model_type": "qwen3_5_text", **QWEN35_08B},
    "qwen3.5-9b": {"model_type": "qwen3_5_text", **_QWEN_9B},
    "tiny": {"model_type": "gated_deltanet", **_TINY, "head_dim": 32, "expand_v": 1.0},
}


def check_key_widths(shape: str, key_widths: Sequence[int]) -> None:
    """Raises RequestError for a width that the shape's config cannot express."""
    raw_config = SHAPES[shape]
    architecture = architecture_of(raw_config)
    architecture.import_stock_classes()
    for key_width in key_widths:
        architecture.cut_config(raw_config, _config(raw_config), key_width, None)


def random_subject(shape: str, key_width: int, device: torch.device, dtype: torch.dtype, seed: int = 0) -> Subject:
    """A model of that shape, cut to `key_width` channels a head, with weights as its class draws them.

    Raises:
        RequestError: the config cannot express the width.
    """
    raw_config = SHAPES[shape]
    architecture = architecture_of(raw_config)
    architecture.import_stock_classes()
    if device.type == "cpu":
        architecture.enable_cpu_backend()
    cut = architecture.cut_config(raw_config, _config(raw_config), key_width, None)
    config = _config(cut)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        torch.manual_seed(seed)
        model = architecture.model_class(cut)(config)
    # Buffers keep their dtype, as in a checkpoint that is loaded: the frequencies of rotary embeddings are float32.
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return Subject(f"{shape} k={key_width}", model.eval(), architecture.mixers(config, ()))


def _config(fields: dict[str, Any]) -> Any:
    return AutoConfig.for_model(**fields)
