"""From a ratio or a target to the kept key width."""

from __future__ import annotations

import math

from compressor.errors import RequestError
from compressor.naming import Naming, option_of

_STEP, _RATIO = "selection.round_to", "selection.ratio"


def kept_width(
    head_k_dim: int, ratio: float | None, target_dim: int | None, round_to: int, name: Naming = option_of
) -> int:
    """Channels of each head that stay.

    `ratio` is the share removed; what stays is rounded to the nearest multiple of `round_to`, a tie
    upwards. `target_dim` is taken as it is. A ratio of 0 keeps all channels. Messages call
    a setting `name(setting)`.

    Raises:
        RequestError: the width is 0, not below the present one, or nothing would be removed.
    """
    if target_dim is not None:
        if target_dim > head_k_dim:
            raise RequestError(
                f"{name('selection.target_dim', target_dim)} is more than the {head_k_dim} key channels a head has; "
                f"give 1 to {head_k_dim}."
            )
        return target_dim
    if ratio is None or ratio == 0:
        return head_k_dim
    exact = head_k_dim * (1 - ratio)
    keep = math.floor(exact / round_to + 0.5) * round_to
    if keep == 0:
        raise RequestError(
            f"{name(_RATIO, ratio)} leaves {exact:g} of {head_k_dim} key channels, "
            f"which {name(_STEP, round_to)} rounds to 0; use {_smaller(head_k_dim, exact, name)}."
        )
    if keep >= head_k_dim:
        raise RequestError(
            f"{name(_RATIO, ratio)} leaves {exact:g} of {head_k_dim} key channels, which {name(_STEP, round_to)} "
            f"rounds to {keep}: nothing would be removed; use a larger ratio{_or_step(head_k_dim - exact, name)}."
        )
    return keep


def _smaller(head_k_dim: int, exact: float, name: Naming) -> str:
    most = 1 - 1 / head_k_dim
    if exact < 0.5:
        return f"a ratio of at most {most:g} and {name(_STEP, 1)}"
    return f"a smaller ratio{_or_step(exact, name)}"


def _or_step(channels: float, name: Naming) -> str:
    """A step that helps: the largest power of two that is at most `channels`, or nothing where none does."""
    if channels < 0.5:
        return ""
    return f" or {name(_STEP, 1 if channels < 2 else 2 ** int(math.log2(channels)))}"


def known_allocation(name: str) -> None:
    """Whether layers can have such widths: `uniform`, the same for all, is what a config can say.

    Raises RequestError for another, the reason named for `per-layer`.
    """
    if name == "per-layer":
        raise RequestError(
            "per-layer gives each layer a key width of its own, and the configs of flash-linear-attention and "
            "transformers have one for all layers, so that no stock class would load the result; leave it at uniform. "
            "benchmarks/allocation.py simulates what it would gain."
        )
    if name != "uniform":
        raise RequestError(f'"{name}" is none; give uniform, the same width for all layers.')


def check_allocation(name: str) -> None:
    """The same for the option. Raises RequestError, which names it."""
    try:
        known_allocation(name)
    except RequestError as error:
        raise RequestError(f"--allocation {error}") from None


def width_within(head_k_dim: int, channel_bytes: int, target: int, round_to: int, name: Naming = option_of) -> int:
    """The largest multiple of `round_to` below the present width whose state takes at most `target` bytes.

    `channel_bytes` is what one channel of every head takes of a sequence's state, all layers together.

    Raises:
        RequestError: not even `round_to` channels fit, or nothing would be removed.
    """
    asked = f"{name('selection.target_state_bytes')} asks for {target:,} bytes a sequence"
    smallest = round_to * channel_bytes
    if target >= head_k_dim * channel_bytes:
        raise RequestError(
            f"{asked} and the state takes {head_k_dim * channel_bytes:,} now: nothing would be removed; ask for less."
        )
    keep = target // smallest * round_to
    if keep == 0:
        finer = "" if round_to == 1 else f", or a smaller {name(_STEP)} (a channel takes {channel_bytes:,} bytes)"
        channels = f"{round_to} of {head_k_dim} key channels a head, the fewest that {name(_STEP, round_to)} keeps"
        raise RequestError(f"{asked} and {channels}, take {smallest:,}; ask for at least that{finer}.")
    return keep
