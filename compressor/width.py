"""From a ratio or a target to the kept key width."""

from __future__ import annotations

import math

from compressor.errors import RequestError


def kept_width(head_k_dim: int, ratio: float | None, target_dim: int | None, round_to: int) -> int:
    """Channels of each head that stay.

    `ratio` is the share removed; what stays is rounded to the nearest multiple of `round_to`, a tie
    upwards. `target_dim` is taken as it is. A ratio of 0 keeps all channels.

    Raises:
        RequestError: the width is 0, not below the present one, or nothing would be removed.
    """
    if target_dim is not None:
        if target_dim > head_k_dim:
            raise RequestError(
                f"--target-dim {target_dim} is more than the {head_k_dim} key channels a head has; "
                f"give 1 to {head_k_dim}."
            )
        return target_dim
    if ratio is None or ratio == 0:
        return head_k_dim
    exact = head_k_dim * (1 - ratio)
    keep = math.floor(exact / round_to + 0.5) * round_to
    if keep == 0:
        raise RequestError(
            f"a ratio of {ratio:g} leaves {exact:g} of {head_k_dim} key channels, "
            f"which --round-to {round_to} rounds to 0; use {_smaller(head_k_dim, exact)}."
        )
    if keep >= head_k_dim:
        raise RequestError(
            f"a ratio of {ratio:g} leaves {exact:g} of {head_k_dim} key channels, which --round-to {round_to} rounds "
            f"to {keep}: nothing would be removed; use a larger ratio{_or_step(head_k_dim - exact)}."
        )
    return keep


def _smaller(head_k_dim: int, exact: float) -> str:
    most = 1 - 1 / head_k_dim
    return f"a ratio of at most {most:g} and --round-to 1" if exact < 0.5 else f"a smaller ratio{_or_step(exact)}"


def _or_step(channels: float) -> str:
    """A --round-to that helps: the largest power of two that is at most `channels`, or nothing where none does."""
    if channels < 0.5:
        return ""
    return f" or --round-to {1 if channels < 2 else 2 ** int(math.log2(channels))}"


def check_allocation(name: str) -> None:
    """Whether layers can have such widths: `uniform`, the same for all, is what a config can say.

    Raises RequestError for another, the reason named for `per-layer`.
    """
    if name == "per-layer":
        raise RequestError(
            "--allocation per-layer gives each layer a key width of its own, and the configs of flash-linear-attention "
            "and transformers have one for all layers, so that no stock class would load the result; leave it at "
            "uniform. benchmarks/allocation.py simulates what it would gain."
        )
    if name != "uniform":
        raise RequestError(f'--allocation "{name}" is none; give uniform, the same width for all layers.')


def width_within(head_k_dim: int, channel_bytes: int, target: int, round_to: int) -> int:
    """The largest multiple of `round_to` below the present width whose state takes at most `target` bytes.

    `channel_bytes` is what one channel of every head takes of a sequence's state, all layers together.

    Raises:
        RequestError: not even `round_to` channels fit, or nothing would be removed.
    """
    asked = f"--target-state-bytes asks for {target:,} bytes a sequence"
    smallest = round_to * channel_bytes
    if target >= head_k_dim * channel_bytes:
        raise RequestError(
            f"{asked} and the state takes {head_k_dim * channel_bytes:,} now: nothing would be removed; ask for less."
        )
    keep = target // smallest * round_to
    if keep == 0:
        finer = "" if round_to == 1 else f", or a smaller --round-to (a channel takes {channel_bytes:,} bytes)"
        channels = f"{round_to} of {head_k_dim} key channels a head, the fewest that --round-to {round_to} keeps"
        raise RequestError(f"{asked} and {channels}, take {smallest:,}; ask for at least that{finer}.")
    return keep
