"""Checkpoints that would be misread: quantised weights, a head drawn at random, names and shapes that do not fit."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from compressor.checkpoint.config_file import decoder_config
from compressor.checkpoint.headers import TensorIndex
from compressor.checkpoint.layout import listed
from compressor.checkpoint.parts import Patterns, refuse_broken_parts
from compressor.errors import RequestError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

# Where writers note it: transformers and compressed-tensors, older compressed-tensors, MLX.
_QUANTISATION_FIELDS = ("quantization_config", "compression_config", "quantization")
_PLAIN_DTYPES = frozenset({"F64", "F32", "F16", "BF16"})
# Last part of the name of what stands beside a quantised weight, or in its place: GPTQ and AWQ, FP8 of DeepSeek and
# Qwen, compressed-tensors and ModelOpt, bitsandbytes in 4 and in 8 bits, torchao.
_QUANTISED_PARTS = frozenset(
    {
        *("qweight", "qzeros", "g_idx"),
        *("weight_scale_inv", "weight_scale", "weight_scale_2", "input_scale", "weight_packed", "weight_zero_point"),
        *("absmax", "quant_map", "nested_absmax", "nested_quant_map", "SCB", "weight_format"),
    }
)
_QUANTISED_NAME = re.compile(r"\.quant_state\.|bitsandbytes__|:qdata$|:scale$|_weight_qdata$|_weight_scale$")
_HEAD = "lm_head.weight"


def refuse_quantized(raw_config: Mapping[str, Any], index: TensorIndex) -> None:
    """Weights whose stored numbers are not the weights.

    Raises:
        RequestError: the config names a quantisation method, a weight is stored in an integer or 8-bit
            dtype, or a tensor's name is one that a quantiser writes.
    """
    refuse_quantized_config(raw_config)
    for name, entry in index.entries.items():
        part = name.rpartition(".")[2]
        if part in _QUANTISED_PARTS or _QUANTISED_NAME.search(name):
            raise _quantised(f"{name} ({entry.dtype}) is a tensor that a quantiser writes")
        if entry.dtype.startswith(("F8_", "F6_", "F4")) or (part == "weight" and entry.dtype not in _PLAIN_DTYPES):
            raise _quantised(f"{name} is stored as {entry.dtype}")


def refuse_quantized_config(raw_config: Mapping[str, Any]) -> None:
    """The part of `refuse_quantized` that needs no weights.

    Raises:
        RequestError: the config, or a nested one, names a quantisation method.
    """
    nested = [value for value in raw_config.values() if isinstance(value, dict)]
    for config in (raw_config, *nested):
        for field in _QUANTISATION_FIELDS:
            settings = config.get(field)
            if isinstance(settings, dict) and settings:
                method = settings.get("quant_method") or settings.get("quant_type") or "method not named"
                raise _quantised(f"config.json has {field} ({method})")


def refuse_broken_tie(raw_config: dict[str, Any], index: TensorIndex) -> None:
    """An output head that is neither stored nor tied; a field that is left out counts as the class's own default.

    Raises:
        RequestError: stock transformers would draw the head at random.
    """
    if any(name == _HEAD or name.endswith(f".{_HEAD}") for name in index.entries):
        return
    text_config = decoder_config(raw_config)
    top_level, text = raw_config.get("tie_word_embeddings"), text_config.get("tie_word_embeddings")
    if text is True and top_level is not True:
        raise RequestError(
            f"text_config ties the embeddings, the top level does not, and {_HEAD} is missing: stock transformers "
            "would draw a random output head. Set tie_word_embeddings to true at the top level."
        )
    if top_level is False:
        raise RequestError(
            f"tie_word_embeddings is false and {_HEAD} is missing: stock transformers would draw a random output "
            f"head. Restore {_HEAD}, or set tie_word_embeddings to true if the model was trained so."
        )


def meta_model(config: PretrainedConfig, model_class: type[PreTrainedModel]) -> PreTrainedModel:
    """The model on the meta device: names and shapes of everything, no memory for any of it."""
    with torch.device("meta"):
        return model_class(config)


def compare_with_skeleton(index: TensorIndex, model: PreTrainedModel) -> dict[str, str]:
    """Hold the headers against the names and shapes of the stock model, with the stock loader's own rules.

    Those are: the renamings of its checkpoint conversions, the base model's prefix added or taken away,
    tied tensors that may be left out, and patterns of names that it ignores.

    Args:
        model: of the stock class, as `meta_model` gives it.

    Returns:
        Name in the files -> name in the model, for every tensor that the stock loader would load.

    Raises:
        RequestError: a tensor is missing, unexpected, of another shape, or holds no numbers of floating point where
            the model does.
    """
    stock = model.state_dict()
    expected = {name: tuple(tensor.shape) for name, tensor in stock.items()}
    names, converted = _stock_names(index, model, expected)
    loaded = {name: target for name, target in names.items() if target in expected}
    _refuse_shapes(index, model, expected, {n: t for n, t in loaded.items() if n not in converted})
    _refuse_name_clash({n: t for n, t in loaded.items() if n not in converted})
    missing = _missing(expected, set(loaded.values()), model)
    unexpected = _unexpected(index, names, expected, model)
    if missing or unexpected:
        raise RequestError(_misfit(missing, unexpected, model))
    _refuse_whole_numbers(index, {name: stock[target] for name, target in loaded.items()})
    refuse_broken_parts(index, {n: t for n, t in loaded.items() if n in converted}, converted, expected)
    return loaded


def _stock_names(
    index: TensorIndex, model: PreTrainedModel, expected: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, str], dict[str, Patterns]]:
    """Name in the files -> name that the stock loader looks for; and the parts beside those that are only a part."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    transforms = get_model_conversion_mapping(model)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    prefix, known = model.base_model_prefix, dict(expected)
    names: dict[str, str] = {}
    converted: dict[str, Patterns] = {}
    siblings = {pattern: tuple(each.source_patterns) for each in converters for pattern in each.source_patterns}
    for name in index.entries:
        target, pattern = rename_source_key(name, renamings, converters, prefix, known)
        if target not in expected and name in expected:
            target, pattern = rename_source_key(name, [], [], prefix, known)
        names[name] = target
        if pattern is not None:
            converted[name] = siblings[pattern]
    return names, converted


def _refuse_shapes(
    index: TensorIndex, model: PreTrainedModel, expected: Mapping[str, tuple[int, ...]], loaded: Mapping[str, str]
) -> None:
    wrong = [name for name, target in loaded.items() if index.entries[name].shape != expected[target]]
    if not wrong:
        return
    embedding = model.get_input_embeddings().get_parameter("weight")
    embedding_names = {name for name, value in model.named_parameters() if value is embedding}
    # The embedding says most: its last axis is the hidden size.
    name = next((name for name in wrong if loaded[name] in embedding_names), wrong[0])
    config_shape, file_shape = expected[loaded[name]], index.entries[name].shape
    more = f" (and {len(wrong) - 1} more tensors differ)" if len(wrong) > 1 else ""
    if loaded[name] in embedding_names and config_shape[-1] != file_shape[-1]:
        fact = f"config says hidden size {config_shape[-1]}, {name} has {file_shape[-1]}"
    else:
        fact = f"config says {config_shape} for {name}, the file has {file_shape}"
    raise RequestError(f"{fact}{more}; use the config.json that belongs to these weights.")


def _refuse_whole_numbers(index: TensorIndex, loaded: Mapping[str, torch.Tensor]) -> None:
    """The stock loader converts what it finds, so a decay that was rounded to a whole number would pass unseen."""
    for name, stock in loaded.items():
        if stock.is_floating_point() and index.entries[name].dtype not in _PLAIN_DTYPES:
            raise _quantised(f"{name} is stored as {index.entries[name].dtype}")


def _refuse_name_clash(loaded: Mapping[str, str]) -> None:
    first: dict[str, str] = {}
    for name, target in loaded.items():
        if target in first:
            raise RequestError(
                f"{first[target]} and {name} would both be loaded as {target}; remove the one that is stale."
            )
        first[target] = name


def _missing(expected: Iterable[str], loaded: set[str], model: PreTrainedModel) -> list[str]:
    """Names that the stock loader would initialise: a tied tensor is there when one of those tied to it is."""
    tied: dict[str, set[str]] = {}
    for target, source in model.all_tied_weights_keys.items():
        tied.setdefault(source, {source}).add(target)
    present = loaded.union(*(group for group in tied.values() if group & loaded))
    ignored = _pattern(model._keys_to_ignore_on_load_missing)
    return [name for name in expected if name not in present and not ignored(name)]


def _unexpected(
    index: TensorIndex, names: Mapping[str, str], expected: Mapping[str, tuple[int, ...]], model: PreTrainedModel
) -> list[str]:
    """Names in the files that the stock loader would report; buffers of older versions it drops in silence."""
    patterns = list(model._keys_to_ignore_on_load_unexpected or ())
    buffers = [name for name, _ in model.named_buffers()]
    if any(name.endswith("rotary_emb.inv_freq") for name in buffers):
        patterns.append(r"rotary_emb\.inv_freq")
    if any(name.endswith("position_ids") for name in buffers):
        patterns.append(r"(^|\.)position_ids$")
    ignored = _pattern(patterns)
    return [name for name in index.entries if names[name] not in expected and not ignored(names[name])]


def _pattern(patterns: Iterable[str] | None) -> Any:
    joined = "|".join(f"({pattern})" for pattern in patterns or ())
    compiled = re.compile(joined) if joined else None
    return lambda name: compiled is not None and compiled.search(name) is not None


def _misfit(missing: list[str], unexpected: list[str], model: PreTrainedModel) -> str:
    lists = [f"{kind} {listed(names)}" for kind, names in (("missing", missing), ("unexpected", unexpected)) if names]
    facts = f"the weights do not fit {type(model).__name__}: {', '.join(lists)}"
    renamed = _renamed_part(missing, unexpected)
    if renamed is not None:
        library = type(model).__module__.partition(".")[0]
        old, new = renamed
        return f"{facts}: older {library} layout; rename {old} to {new} in the weight files first."
    if missing:
        return f"{facts}; stock transformers would draw what is missing at random: use weights and config of one model."
    return f"{facts}; stock transformers would drop what is unexpected: use weights and config of one model."


def _renamed_part(missing: list[str], unexpected: list[str]) -> tuple[str, str] | None:
    """(old, new) part of a name, where each missing tensor is there under a name whose one part lacks a prefix."""
    present = set(unexpected)
    pairs = set()
    for name in missing:
        parts = name.split(".")
        olds = [
            (part.partition("_")[2], part)
            for position, part in enumerate(parts)
            if ".".join([*parts[:position], part.partition("_")[2], *parts[position + 1 :]]) in present
        ]
        pairs.add(olds[0] if olds else None)
    only = pairs.pop() if len(pairs) == 1 else None
    return only if only is not None and len(missing) == len(unexpected) else None


def _quantised(fact: str) -> RequestError:
    return RequestError(f"the checkpoint is quantised: {fact}; dequantise first, to bfloat16, float16 or float32.")
