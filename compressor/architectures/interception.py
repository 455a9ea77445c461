"""Stand between a stock mixer and the recurrence it calls.

The stock layers look their recurrence up as a global of their module. Forward hooks cannot see its
inputs (fla fuses the three convolutions, transformers splits one), so for the length of a context
the global is replaced by a wrapper, and hooks on every mixer tell which layer is running. Another model
of the family that runs meanwhile, such as the one that is compared with, passes untouched.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from compressor.architectures.base import Mixer, RecurrenceTap

Function = Callable[..., Any]


@dataclass(frozen=True)
class EntryPoint:
    """A function global of a stock module.

    kind "recurrence" takes query and key first or by the given names and returns (output, state);
    kind "normalization" is called once with the query, then once with the key, before a recurrence;
    with it, recurrences of the same module only have their output tapped. With `query_for_each_key` the
    query and the output have a place for every key of a token, and only the last of them is read.
    `channel_gate` names a decay of every key channel before its activation, [B, T, H_v, d_k], and its bias [H_v d_k]:
    where a tap makes keys wider, they are filled up with zeros.
    """

    module: str
    name: str
    kind: Literal["recurrence", "normalization"] = "recurrence"
    query: str = "q"
    key: str = "k"
    query_for_each_key: bool = False
    channel_gate: tuple[str, str] | None = None


@dataclass
class Running:
    """The mixer whose forward is under way (layer -1: none), and how many normalisations it has called."""

    layer: int = -1
    num_k_heads: int = 0
    keys_per_token: int = 1
    normalizations: int = 0


@contextmanager
def intercept(
    model: nn.Module, mixers: Sequence[Mixer], entry_points: Sequence[EntryPoint], tap: RecurrenceTap
) -> Iterator[None]:
    """Send what reaches the entry points through `tap` while the context is active."""
    taps_inputs = all(entry.kind == "recurrence" for entry in entry_points)
    with ExitStack() as stack:
        running = stack.enter_context(running_mixer(model, mixers))
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


@contextmanager
def running_mixer(model: nn.Module, mixers: Sequence[Mixer]) -> Iterator[Running]:
    """What is kept up to date, while active, about which mixer of `model` is running."""
    running = Running()
    with ExitStack() as stack:
        for mixer in mixers:
            module = model.get_submodule(mixer.module)
            stack.callback(module.register_forward_pre_hook(_announce(running, mixer)).remove)
            stack.callback(module.register_forward_hook(_end(running), always_call=True).remove)
        yield running


def _announce(running: Running, mixer: Mixer) -> Callable[[nn.Module, tuple[Any, ...]], None]:
    def hook(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        running.layer, running.num_k_heads, running.normalizations = mixer.layer, mixer.num_k_heads, 0
        running.keys_per_token = mixer.keys_per_token

    return hook


def _end(running: Running) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
    def hook(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        running.layer = -1

    return hook


def _recurrence(
    original: Function, entry: EntryPoint, running: Running, tap: RecurrenceTap, taps_inputs: bool
) -> Function:
    def tapped_recurrence(*args: Any, **kwargs: Any) -> Any:
        if running.layer < 0:
            return original(*args, **kwargs)
        places = running.keys_per_token if entry.query_for_each_key else 1
        if taps_inputs and args:
            args = (*_tapped_inputs(tap, running, places, args[0], args[1]), *args[2:])
        elif taps_inputs:
            query, key = kwargs[entry.query], kwargs[entry.key]
            kwargs[entry.query], kwargs[entry.key] = _tapped_inputs(tap, running, places, query, key)
            if entry.channel_gate is not None:
                kwargs |= _widened_gate(kwargs, entry.channel_gate, kwargs[entry.key].shape[-1])
        output, state = original(*args, **kwargs)
        return _at_last_places(partial(tap.on_output, running.layer), output, places), state

    return tapped_recurrence


def _tapped_inputs(
    tap: RecurrenceTap, running: Running, places: int, query: Tensor, key: Tensor
) -> tuple[Tensor, Tensor]:
    """`query` has `places` for each token, `key` the mixer's keys of a token one after the other."""
    tapped_query = _at_last_places(partial(_tapped, tap.on_query, running), query, places)
    return tapped_query, _each_key(partial(_tapped, tap.on_key, running), key, running.keys_per_token)


def _widened_gate(arguments: Mapping[str, Tensor], names: tuple[str, str], width: int) -> dict[str, Tensor]:
    """The gate [B, T, H_v, d_k] and its bias [H_v d_k] for keys of `width` channels."""
    gate, bias = (arguments[name] for name in names)
    missing = width - gate.shape[-1]
    if not missing:
        return {}
    wider_bias = pad(bias.view(gate.shape[-2:]), (0, missing)).flatten()
    return dict(zip(names, (pad(gate, (0, missing)), wider_bias), strict=True))


def _at_last_places(change: Callable[[Tensor], Tensor], activations: Tensor, places: int) -> Tensor:
    """[B, T places, H, d] with the last of each token's `places` changed; zeros at the others, which no one reads."""
    if places == 1:
        return change(activations)
    read = activations[:, places - 1 :: places]
    changed = change(read)
    if changed is read:
        return activations
    spread = changed.new_zeros(changed.shape[0], activations.shape[1], *changed.shape[2:])
    spread[:, places - 1 :: places] = changed
    return spread


def _each_key(change: Callable[[Tensor], Tensor], key: Tensor, keys_per_token: int) -> Tensor:
    """[B, T keys_per_token, H_k, d_k] changed by calls that get one key of every token, [B, T, H_k, d_k]."""
    if keys_per_token == 1:
        return change(key)
    keys = [key[:, number::keys_per_token] for number in range(keys_per_token)]
    changed = [change(each) for each in keys]
    if all(after is before for after, before in zip(changed, keys, strict=True)):
        return key
    return torch.stack(changed, dim=2).flatten(1, 2)


def _normalization(original: Function, running: Running, tap: RecurrenceTap) -> Function:
    def tapped_normalization(x: Any) -> Any:
        if running.layer < 0:
            return original(x)
        running.normalizations += 1
        on_stream = tap.on_query if running.normalizations == 1 else tap.on_key
        return original(_tapped(on_stream, running, x))

    return tapped_normalization


def _tapped(on_stream: Callable[[int, Tensor], Tensor], running: Running, activations: Tensor) -> Tensor:
    """transformers before 5.23 repeats key heads for their value heads first; a tap sees each key head once."""
    group = activations.shape[2] // running.num_k_heads
    if group == 1:
        return on_stream(running.layer, activations)
    heads = activations[:, :, ::group]
    tapped = on_stream(running.layer, heads)
    return activations if tapped is heads else tapped.repeat_interleave(group, dim=2)
