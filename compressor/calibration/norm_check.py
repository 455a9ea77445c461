"""How large the inputs of the norms are that share the output norm's epsilon."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from compressor.architectures.base import Architecture
from compressor.calibration.tokens import TokenBatch
from compressor.errors import RequestError
from compressor.naming import Naming

SAFETY_FACTOR = 100.0
"""A norm whose smallest mean square is this many times epsilon moves by under 0.5%."""


def refuse_epsilon_near_other_norms(
    architecture: Architecture, model: PreTrainedModel, batch: TokenBatch, new_epsilon: float, name: Naming
) -> float:
    """Refuse a scaled norm epsilon where the larger epsilon would reach other norms.

    The config has one field for all norms of the stack, so scaling it for the mixers' output norm
    moves the others too. Messages call a setting `name(setting)`. Returns the smallest mean square
    seen over tokens and norms.

    Raises:
        RequestError: some norm's input has a mean square below 100 times the new epsilon.
    """
    smallest = _smallest_mean_squares(architecture, model, batch)
    if not smallest:
        return float("inf")
    path = min(smallest, key=lambda name: smallest[name])
    if smallest[path] < SAFETY_FACTOR * new_epsilon:
        given, remedy = (name("selection.norm_epsilon", value) for value in ("scaled", "keep"))
        raise RequestError(
            f"{given} would write {new_epsilon:g}, and {path} reads the same field with inputs of mean "
            f"square {smallest[path]:.3g}, under {SAFETY_FACTOR:g} times that; use {remedy}."
        )
    return smallest[path]


def _smallest_mean_squares(
    architecture: Architecture, model: PreTrainedModel, batch: TokenBatch
) -> Mapping[str, float]:
    smallest: dict[str, float] = {}
    mask = batch.attention_mask

    def watch(path: str) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x: Tensor = args[0] if args else kwargs["x"]
            residual = kwargs.get("residual")
            mean_square = (x if residual is None else x + residual).float().pow(2).mean(-1)
            if mask is not None and mean_square.shape[:2] == mask.shape:
                mean_square = mean_square[mask.to(mean_square.device)]
            smallest[path] = min(smallest.get(path, float("inf")), float(mean_square.min()))

        return hook

    norms = architecture.norms_sharing_epsilon(model)
    handles = [norm.register_forward_pre_hook(watch(path), with_kwargs=True) for path, norm in norms.items()]
    try:
        with torch.inference_mode():
            device = model.device
            architecture.decoder(model)(
                input_ids=batch.input_ids.to(device),
                attention_mask=None if mask is None else mask.to(device),
                use_cache=False,
            )
    finally:
        for handle in handles:
            handle.remove()
    return smallest
