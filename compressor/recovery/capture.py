"""What enters or leaves modules of a model, without running what comes after the last of them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from compressor.errors import RunError


class Batch(Protocol):
    """`input_ids` int64 [B, T]; `attention_mask` bool [B, T], true at tokens, None where nothing is padded."""

    @property
    def input_ids(self) -> Tensor: ...

    @property
    def attention_mask(self) -> Tensor | None: ...

    @property
    def num_tokens(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Point:
    """The first input, or the output, of the module at `path`."""

    path: str
    side: Literal["input", "output"]


class _LastReached(Exception):  # noqa: N818  (no error: it ends a pass)
    """Ends a forward pass at the last point."""


@torch.inference_mode()
def activations_at(model: nn.Module, decoder: nn.Module, points: Sequence[Point], batch: Batch) -> list[Tensor]:
    """The activations [tokens, channels] at `points` of `model`, named in the order in which they are computed.

    Padding is removed. The pass through `decoder` ends at the last point: before its module runs where
    that is an input, behind it where it is an output.

    Raises:
        RunError: the pass ended without the last point.
    """
    device = next(decoder.parameters()).device
    mask = None if batch.attention_mask is None else batch.attention_mask.to(device)
    seen: list[Tensor] = []
    with ExitStack() as hooks:
        for point in points:
            hooks.callback(_watch(model, point, seen, point == points[-1]).remove)
        try:
            decoder(input_ids=batch.input_ids.to(device), attention_mask=mask, use_cache=False)
        except _LastReached:
            return [_counted(activations, mask) for activations in seen]
    raise RunError(
        f"{points[-1].path} was not run in a forward pass; the installed library computes the layer in a way this "
        "version does not know."
    )


def _watch(model: nn.Module, point: Point, seen: list[Tensor], last: bool) -> RemovableHandle:
    def keep(activations: Tensor) -> None:
        seen.append(activations)
        if last:
            raise _LastReached

    module = model.get_submodule(point.path)
    if point.side == "input":

        def before(module: nn.Module, args: tuple[Any, ...]) -> None:
            keep(args[0])

        return module.register_forward_pre_hook(before)

    def after(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        keep(output)

    return module.register_forward_hook(after)


def _counted(activations: Tensor, mask: Tensor | None) -> Tensor:
    """[B, T, C] -> [tokens, C] without padding; fla passes [1, tokens, C], padding already removed."""
    flat = activations.flatten(0, 1)
    if mask is None or len(flat) == int(mask.sum()):
        return flat
    return flat[mask.flatten().to(flat.device)]
