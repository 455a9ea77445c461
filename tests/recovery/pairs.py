"""Tiny models and what a cut leaves of them, as the refit meets the two."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from compressor.calibration.tokens import TokenBatch, batches, pad_batch
from compressor.evaluation.forward import forward_tokens
from compressor.preparation import open_model, open_source, plan_cut
from compressor.recipe import Recipe
from compressor.recovery.refit import Refit, RefitPair, refit
from compressor.writing import write_checkpoint
from tests.families import TinyCheckpoint, open_tiny, random_selection, tiny_tokens
from tests.tiny_models import read_weights, save_tiny


@dataclass(frozen=True)
class TinyPair:
    original: TinyCheckpoint
    compressed: TinyCheckpoint
    pair: RefitPair


def tiny_pair(
    name: str,
    folder: Path,
    width: int,
    dtype: torch.dtype = torch.float32,
    overrides: Mapping[str, Any] | None = None,
) -> TinyPair:
    """A tiny checkpoint, its random cut to `width` of 16 channels, both loaded in float32."""
    original = open_tiny(save_tiny(name, folder / "source", dtype, overrides=overrides))
    source = open_source(open_model(str(original.folder), None))
    recipe = Recipe.from_settings({"model": str(original.folder), "selection": {"target_dim": width}})
    (folder / "cut").mkdir()
    selection = random_selection(original.mixers, width)
    write_checkpoint(folder / "cut", source, plan_cut(source, recipe, width), selection, 10**9, lambda written: None)
    compressed = open_tiny(folder / "cut")
    dtypes = {tensor: value.dtype for tensor, value in read_weights(compressed.folder).items()}
    pair = RefitPair(original.architecture, original.model, compressed.model, compressed.mixers, dtypes)
    return TinyPair(original, compressed, pair)


def fitting_batches() -> list[TokenBatch]:
    """1,360 tokens: recurrent and chunked lengths, and a batch that is padded on the right."""
    equal = batches(
        [tiny_tokens(length, seed=seed) for seed, length in enumerate((50, 50, 130, 130, 200, 200, 300))], 2
    )
    return [*equal, pad_batch([tiny_tokens(length, seed=length) for length in (120, 90, 90)], pad_token_id=5)]


def held_out_batches() -> list[TokenBatch]:
    return [*batches([tiny_tokens(150, seed=seed) for seed in (100, 101, 102)], 3)]


def sequences_of(token_batches: Sequence[TokenBatch]) -> list[Tensor]:
    """The sequences without their padding."""
    rows = []
    for batch in token_batches:
        masks = batch.attention_mask if batch.attention_mask is not None else torch.ones_like(batch.input_ids).bool()
        rows += [ids[mask] for ids, mask in zip(batch.input_ids, masks, strict=True)]
    return rows


def count_hooks(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def ignore(count: int) -> None:
    """Report to nobody."""


def held_out_kl(original: PreTrainedModel) -> Callable[[PreTrainedModel], float]:
    """Mean KL over the held-out tokens."""

    def divergence(model: PreTrainedModel) -> float:
        figures = forward_tokens(model, sequences_of(held_out_batches()), 4, reference=original)
        return float(torch.cat([one.kl for one in figures if one.kl is not None]).double().mean())

    return divergence


def answers(*values: float) -> Callable[[PreTrainedModel], float]:
    """A divergence that is whatever the test needs."""
    remaining: Iterator[float] = iter(values)
    return lambda model: next(remaining)


def run(pair: RefitPair, divergence: Callable[[PreTrainedModel], float] | None = None) -> Refit:
    return refit(pair, fitting_batches(), held_out_batches(), divergence or held_out_kl(pair.original), ignore)


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def changed(before: dict[str, Tensor], model: nn.Module) -> set[str]:
    return {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}


def one_batch(sequence: Tensor) -> TokenBatch:
    return TokenBatch(sequence[None], None)
