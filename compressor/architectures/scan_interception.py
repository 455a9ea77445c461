"""Stand between a stock Mamba-2 mixer and the scan it calls: B is the key, C the query, D x is part of the output.

The stock layers look their scans up as globals of their module, as delta-rule layers do (see `interception`). A third
global computes a whole mixer at once from the projected input, in training and with mamba_ssm alone; nothing can be
seen inside it, so a tapped mixer is kept from it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from compressor.architectures.base import Mixer, RecurrenceTap
from compressor.architectures.interception import Function, Running, running_mixer


@dataclass(frozen=True)
class ScanFunctions:
    """Names of the globals of a stock module.

    Attributes:
        module: its path.
        chunked: takes x, dt, A, B, C first and returns the output, or the output and the last state.
        step: takes the state, x, dt, A, B, C first, without the dimension of the tokens, and returns the output.
    """

    module: str
    chunked: str
    step: str


@contextmanager
def intercept_scans(
    model: nn.Module,
    mixers: Sequence[Mixer],
    functions: ScanFunctions,
    tap: RecurrenceTap,
    replaced: Mapping[str, Callable[[Function, Running], Function]],
) -> Iterator[None]:
    """Send what reaches the scans through `tap` while the context is active.

    `replaced` names further globals of the module, each with what makes its stand-in from the original.
    """
    namespace = importlib.import_module(functions.module)
    with ExitStack() as stack:
        running = stack.enter_context(running_mixer(model, mixers))
        replacements = {
            functions.chunked: _chunked(vars(namespace)[functions.chunked], running, tap),
            functions.step: _step(vars(namespace)[functions.step], running, tap),
            **{name: stand_in(vars(namespace)[name], running) for name, stand_in in replaced.items()},
        }
        for name, replacement in replacements.items():
            stack.callback(setattr, namespace, name, vars(namespace)[name])
            setattr(namespace, name, replacement)
        yield


def intercept_transformers_scans(
    model: nn.Module, mixers: Sequence[Mixer], modeling: str, tap: RecurrenceTap
) -> AbstractContextManager[None]:
    """As `intercept_scans`, for a modelling module of transformers: Mamba-2 and its hybrids call all scans alike."""
    scans = ScanFunctions(modeling, "mamba2_chunk_scan", "mamba2_selective_state_update")
    return intercept_scans(model, mixers, scans, tap, {"mamba2_split_conv1d_scan_combined": _declined})


def _declined(original: Function, running: Running) -> Function:
    """transformers goes on step by step where its fused function returns None."""

    def fused(*args: Any, **kwargs: Any) -> Tensor | None:
        result: Tensor | None = original(*args, **kwargs) if running.layer < 0 else None
        return result

    return fused


def _chunked(original: Function, running: Running, tap: RecurrenceTap) -> Function:
    def tapped(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, *args: Any, **kwargs: Any) -> Any:
        if running.layer < 0:
            return original(x, dt, A, B, C, *args, **kwargs)
        layer = running.layer
        query, key = tap.on_query(layer, C), tap.on_key(layer, B)
        result = original(x, dt, A, key, query, *args, **kwargs)
        if isinstance(result, tuple):
            output, state = result
            return tap.on_output(layer, output), state
        return tap.on_output(layer, result)

    return tapped


def _step(original: Function, running: Running, tap: RecurrenceTap) -> Function:
    def tapped(state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, *args: Any, **kwargs: Any) -> Any:
        if running.layer < 0:
            return original(state, x, dt, A, B, C, *args, **kwargs)
        layer = running.layer
        query, key = tap.on_query(layer, C[:, None])[:, 0], tap.on_key(layer, B[:, None])[:, 0]
        output = original(state, x, dt, A, key, query, *args, **kwargs)
        return tap.on_output(layer, output[:, None])[:, 0]

    return tapped
