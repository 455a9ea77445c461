"""Streaming sums of squares of what the key and query projections read.

Notation: L mixers, n tokens. Sums over tokens are float64 whatever the inputs' dtype, and memory does not grow with
the number of tokens.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from compressor.architectures.base import Architecture, Mixer
from compressor.architectures.projections import projections
from compressor.errors import RunError

_STREAMS = ("query", "key")
_TOKENS_PER_STEP = 16384


class InputAccumulator:
    """Sums x^2 over tokens of the inputs x of the query and the key projection of every mixer.

    The mixers must agree in the width of the inputs. `squares` is float64 [2, L, inputs], queries first.
    """

    def __init__(
        self, architecture: Architecture, model: nn.Module, mixers: Sequence[Mixer], device: torch.device
    ) -> None:
        self._layers = [mixer.layer for mixer in mixers]
        self._rows: dict[str, list[tuple[int, int]]] = defaultdict(list)  # of `squares`, by the module that fills them
        for position, mixer in enumerate(mixers):
            for projection in projections(architecture, mixer):
                self._rows[projection.module].append((_STREAMS.index(projection.stream), position))
        self._modules = {path: model.get_submodule(path) for path in self._rows}
        width = next(iter(self._modules.values())).get_parameter("weight").shape[1]
        self.squares = torch.zeros(2, len(mixers), width, dtype=torch.float64, device=device)
        self._tokens = torch.zeros(2, len(mixers), dtype=torch.int64)
        self._mask: Tensor | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While active, what the projections read is summed."""
        with ExitStack() as hooks:
            for path, module in self._modules.items():
                hooks.callback(module.register_forward_pre_hook(self._hook(path)).remove)
            yield

    def begin_batch(self, attention_mask: Tensor | None) -> None:
        """`attention_mask` is bool [B, T], True for tokens that count; None when all do."""
        self._mask = attention_mask
        self._tokens.zero_()

    def end_batch(self, batch_tokens: int) -> None:
        """Check that every projection was seen with every token of the batch.

        Raises:
            RunError: names the layer that was not captured.
        """
        for stream, name in enumerate(_STREAMS):
            for position, layer in enumerate(self._layers):
                seen = int(self._tokens[stream, position])
                if seen != batch_tokens:
                    raise RunError(
                        f"layer {layer}: {seen} of {batch_tokens} inputs of the {name} projection were captured; "
                        "the installed library calls its projections in a way this version does not know."
                    )

    def _hook(self, path: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def hook(module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
            inputs = counted(arguments[0], self._mask)
            total = sum_of_squares(inputs).to(self.squares.device)
            for stream, position in self._rows[path]:
                self.squares[stream, position] += total
                self._tokens[stream, position] += len(inputs)

        return hook


def sum_of_squares(inputs: Tensor) -> Tensor:
    """Sum over tokens of x^2: [n, inputs] -> float64 [inputs]. Squares are float32, or float64 where the inputs are."""
    working = torch.promote_types(inputs.dtype, torch.float32)
    blocks = inputs.split(_TOKENS_PER_STEP)
    return torch.stack([block.to(working).square().sum(0, dtype=torch.float64) for block in blocks]).sum(0)


def counted(inputs: Tensor, mask: Tensor | None) -> Tensor:
    """[B, T, inputs] -> [n, inputs] without padding, which a mixer may have removed already."""
    flat = inputs.flatten(0, -2)
    if mask is None or len(flat) == int(mask.sum()):
        return flat
    return flat[mask.flatten().to(flat.device)]
