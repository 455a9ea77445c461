"""Tiny random checkpoints of every family, built on the spot with the stock classes.

`VARIANTS` (tests/tiny_variants.py) lists them by name. `save_tiny` writes one as a stock checkpoint folder;
`edit_config`, `read_weights` and `write_weights` change such a folder afterwards, the way a broken or unusual
checkpoint differs from a plain one.
Weights are fp32 draws of a private generator state: the global one is left as it was.
"""

from __future__ import annotations

import importlib
import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.tiny_variants import VARIANTS


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
    model.save_pretrained(  # type: ignore[operator]
        folder,
        max_shard_size="50GB" if max_shard_size is None else max_shard_size,
        save_original_format=VARIANTS[name].published_names,
    )
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
