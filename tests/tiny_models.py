"""Tiny random checkpoints of every family, built on the spot with the stock classes.

`VARIANTS` lists them by name. `save_tiny` writes one as a stock checkpoint folder; `edit_config`, `read_weights` and
`write_weights` change such a folder afterwards, the way a broken or unusual checkpoint differs from a plain one.
Weights are fp32 draws of a private generator state: the global one is left as it was.
"""

from __future__ import annotations

import importlib
import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file


@dataclass(frozen=True)
class Variant:
    """Stock config class, stock model class (both by import path) and the config fields of one tiny model."""

    config_class: str
    model_class: str
    fields: Mapping[str, Any] = field(default_factory=dict)


_FLA = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_heads": 2,
    "intermediate_size": 48,
    "initializer_range": 0.2,
}
_GATED_DELTANET = _FLA | {"head_dim": 16, "expand_v": 1.0}
_QWEN_LINEAR = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 48,
    "initializer_range": 0.2,
}
_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
    "patch_size": 4,
}


def _gated_deltanet(**fields: Any) -> Variant:
    return Variant("fla.models:GatedDeltaNetConfig", "fla.models:GatedDeltaNetForCausalLM", _GATED_DELTANET | fields)


def _delta_net(**fields: Any) -> Variant:
    return Variant("fla.models:DeltaNetConfig", "fla.models:DeltaNetForCausalLM", _FLA | fields)


VARIANTS: dict[str, Variant] = {
    "gated_deltanet": _gated_deltanet(),
    "gated_deltanet_grouped": _gated_deltanet(num_v_heads=4),
    "gated_deltanet_wide_values": _gated_deltanet(expand_v=2.0),
    "gated_deltanet_no_short_conv": _gated_deltanet(use_short_conv=False),
    "gated_deltanet_no_gate": _gated_deltanet(use_gate=False),
    "gated_deltanet_tied": _gated_deltanet(tie_word_embeddings=True),
    "gated_deltanet_negative_eigenvalues": _gated_deltanet(allow_neg_eigval=True),
    "gated_deltanet_hybrid": _gated_deltanet(num_hidden_layers=3, attn={"layers": [1], "num_heads": 2}),
    "delta_net": _delta_net(),
    "delta_net_sum_norm": _delta_net(qk_norm="sum", qk_activation="elu"),
    "delta_net_relu": _delta_net(qk_activation="relu"),
    "delta_net_elu": _delta_net(qk_activation="elu"),
    "delta_net_identity": _delta_net(qk_activation="identity"),
    "delta_net_gate": _delta_net(use_gate=True),
    "delta_net_no_beta": _delta_net(use_beta=False),
    "delta_net_no_short_conv": _delta_net(use_short_conv=False),
    "delta_net_tied": _delta_net(tie_word_embeddings=True),
    "gated_deltaproduct": Variant(
        "fla.models:GatedDeltaProductConfig",
        "fla.models:GatedDeltaProductForCausalLM",
        _GATED_DELTANET | {"num_householder": 2},
    ),
    "q35": Variant("transformers:Qwen3_5TextConfig", "transformers:Qwen3_5ForCausalLM", _QWEN_LINEAR),
    "qw": Variant(
        "transformers:Qwen3_5Config",
        "transformers:Qwen3_5ForConditionalGeneration",
        {
            "text_config": _QWEN_LINEAR | {"tie_word_embeddings": True},
            "vision_config": _VISION,
            "tie_word_embeddings": True,
        },
    ),
    "qn": Variant(
        "transformers:Qwen3NextConfig", "transformers:Qwen3NextForCausalLM", _QWEN_LINEAR | {"num_experts": 0}
    ),
    "nh": Variant(
        "transformers:NemotronHConfig",
        "transformers:NemotronHForCausalLM",
        {
            "vocab_size": 64,
            "hidden_size": 32,
            "layers_block_type": ["linear_attention", "mlp", "linear_attention", "full_attention"],
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "ssm_state_size": 16,
            "n_groups": 2,
            "intermediate_size": 48,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 16,
        },
    ),
    "m2": Variant(
        "transformers:Mamba2Config",
        "transformers:Mamba2ForCausalLM",
        {
            "vocab_size": 64,
            "hidden_size": 32,
            "num_heads": 4,
            "head_dim": 16,
            "state_size": 16,
            "n_groups": 2,
            "num_hidden_layers": 2,
        },
    ),
}


def tiny_config(name: str, overrides: Mapping[str, Any] | None = None) -> Any:
    """Stock config object of `VARIANTS[name]`; `overrides` are merged into its fields, nested mappings too."""
    variant = VARIANTS[name]
    return _stock_class(variant.config_class)(**_merged(variant.fields, overrides or {}))


def stock_model_class(name: str) -> Any:
    """Stock model class of `VARIANTS[name]`."""
    return _stock_class(VARIANTS[name].model_class)


def tiny_model(name: str, overrides: Mapping[str, Any] | None = None, seed: int = 0) -> torch.nn.Module:
    """Stock model in evaluation mode, fp32 on the CPU, every vector (norms, biases, decays) away from its default."""
    config = tiny_config(name, overrides)
    model_class = stock_model_class(name)
    allowed = _fla_construction() if VARIANTS[name].model_class.startswith("fla") else nullcontext()
    with torch.random.fork_rng(devices=[]), allowed:
        torch.manual_seed(seed)
        model = model_class(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.eval()


def save_tiny(
    name: str,
    folder: Path,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str | int | None = None,
    seed: int = 0,
    overrides: Mapping[str, Any] | None = None,
) -> Path:
    """Write `tiny_model` as a stock checkpoint into `folder` and return it; no tokenizer (see `save_tiny_tokenizer`).

    `max_shard_size` in bytes or as "20KB"; None gives a single file.
    """
    model = tiny_model(name, overrides, seed).to(dtype)
    model.save_pretrained(folder, max_shard_size="50GB" if max_shard_size is None else max_shard_size)  # type: ignore[operator]
    return folder


def save_tiny_tokenizer(folder: Path, vocab_size: int = 64) -> Path:
    """Write a character tokenizer (lower-case letters, digits, some punctuation; `<eos>` is 0, `<unk>` is 1)."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = "abcdefghijklmnopqrstuvwxyz 0123456789.,;:!?'\"-()\n"
    vocabulary = {token: index for index, token in enumerate(["<eos>", "<unk>", *characters][:vocab_size])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>").save_pretrained(folder)
    return folder


def edit_config(folder: Path, changes: Mapping[str, Any] | None = None, remove: Sequence[str] = ()) -> Path:
    """Delete the keys `remove` ("text_config.head_dim" reaches into a nested config) and merge `changes` in."""
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    for dotted in remove:
        *parents, key = dotted.split(".")
        holder = config
        for parent in parents:
            holder = holder[parent]
        del holder[key]
    path.write_text(json.dumps(_merged(config, changes or {}), indent=2) + "\n", encoding="utf-8")
    return folder


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of every `*.safetensors` file in `folder`."""
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors.update(load_file(path))
    return tensors


def write_weights(folder: Path, tensors: Mapping[str, torch.Tensor], name: str = "model.safetensors") -> Path:
    """Write `tensors` to `folder/name` with the `format` metadata that stock writers leave; the file's path."""
    separate = {key: value.clone(memory_format=torch.contiguous_format) for key, value in tensors.items()}
    save_file(separate, folder / name, metadata={"format": "pt"})
    return folder / name


def _stock_class(path: str) -> Any:
    module, name = path.split(":")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fla reports missing optional kernels when it is imported
        return getattr(importlib.import_module(module), name)


def _merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in changes.items():
        nested = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = _merged(result[key], value) if nested else value
    return result


@contextmanager
def _fla_construction() -> Iterator[None]:
    """fla warns about `use_short_conv=False`, and its softmax layer refuses to exist without flash-attn."""
    import fla.layers.attn as fla_attention

    installed = fla_attention.flash_attn_func
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fla_attention.flash_attn_func = installed or _absent_kernel
        try:
            yield
        finally:
            fla_attention.flash_attn_func = installed


def _absent_kernel(*_: Any, **__: Any) -> torch.Tensor:
    raise RuntimeError("flash-attn is not installed: this tiny model can be built and saved, not run")
