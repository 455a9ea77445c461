"""Stand between a stock mixer and the recurrence it calls.

The stock layers look their recurrence up as a global of their module. Forward hooks cannot see its
inputs (fla fuses the three convolutions, transformers splits one), so for the length of a context
the global is replaced by a wrapper, and hooks on every mixer tell which layer is running. Another model
of the family that runs meanwhile, such as the one that is compared with, passes untouched.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from compressor.architectures.base import Mixer, RecurrenceTap

Function = Callable[..., Any]


@dataclass(frozen=True)
class EntryPoint:
    """A function global of a stock module.

    kind "recurrence" takes query and key first or by the given names and returns (output, state);
    kind "normalization" is called once with the query, then once with the key, before a recurrence;
    with it, recurrences of the same module only have their output tapped.
    """

    module: str
    name: str
    kind: Literal["recurrence", "normalization"] = "recurrence"
    query: str = "q"
    key: str = "k"


@dataclass
class _Running:
    """The mixer whose forward is under way (layer -1: none), and how many normalisations it has called."""

    layer: int = -1
    num_k_heads: int = 0
    normalizations: int = 0


@contextmanager
def intercept(
    model: nn.Module, mixers: Sequence[Mixer], entry_points: Sequence[EntryPoint], tap: RecurrenceTap
) -> Iterator[None]:
    """Send what reaches the entry points through `tap` while the context is active."""
    running = _Running()
    taps_inputs = all(entry.kind == "recurrence" for entry in entry_points)
    with ExitStack() as stack:
        for mixer in mixers:
            module = model.get_submodule(mixer.module)
            stack.callback(module.register_forward_pre_hook(_announce(running, mixer)).remove)
            stack.callback(module.register_forward_hook(_end(running), always_call=True).remove)
        for entry in entry_points:
            namespace = importlib.import_module(entry.module)
            original: Function = vars(namespace)[entry.name]
            if entry.kind == "recurrence":
                replacement = _recurrence(original, entry, running, tap, taps_inputs)
            else:
                replacement = _normalization(original, running, tap)
            setattr(namespace, entry.name, replacement)
            stack.callback(setattr, namespace, entry.name, original)
        yield


def _announce(running: _Running, mixer: Mixer) -> Callable[[nn.Module, tuple[Any, ...]], None]:
    def hook(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        running.layer, running.num_k_heads, running.normalizations = mixer.layer, mixer.num_k_heads, 0

    return hook


def _end(running: _Running) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
    def hook(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        running.layer = -1

    return hook


def _recurrence(
    original: Function, entry: EntryPoint, running: _Running, tap: RecurrenceTap, taps_inputs: bool
) -> Function:
    def tapped_recurrence(*args: Any, **kwargs: Any) -> Any:
        if running.layer < 0:
            return original(*args, **kwargs)
        if taps_inputs and args:
            args = (_tapped(tap.on_query, running, args[0]), _tapped(tap.on_key, running, args[1]), *args[2:])
        elif taps_inputs:
            kwargs[entry.query] = _tapped(tap.on_query, running, kwargs[entry.query])
            kwargs[entry.key] = _tapped(tap.on_key, running, kwargs[entry.key])
        output, state = original(*args, **kwargs)
        return tap.on_output(running.layer, output), state

    return tapped_recurrence


def _normalization(original: Function, running: _Running, tap: RecurrenceTap) -> Function:
    def tapped_normalization(x: Any) -> Any:
        if running.layer < 0:
            return original(x)
        running.normalizations += 1
        on_stream = tap.on_query if running.normalizations == 1 else tap.on_key
        return original(_tapped(on_stream, running, x))

    return tapped_normalization


def _tapped(on_stream: Callable[[int, Tensor], Tensor], running: _Running, activations: Tensor) -> Tensor:
    """transformers before 5.23 repeats key heads for their value heads first; a tap sees each key head once."""
    group = activations.shape[2] // running.num_k_heads
    if group == 1:
        return on_stream(running.layer, activations)
    heads = activations[:, :, ::group]
    tapped = on_stream(running.layer, heads)
    return activations if tapped is heads else tapped.repeat_interleave(group, dim=2)
