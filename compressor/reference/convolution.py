"""Causal depthwise convolution over time, with the state that generation keeps.

    y_t = activation(bias + sum_i weight[:, W - 1 - i] * x_{t-i}) + residual_t        i = 0 .. W - 1

Notation used for tensor shapes: B sequences, T tokens, D channels, W taps. A history is [B, D, W]:
the last W inputs before the first token, oldest first (the oldest is never read). Computed in
float32, or in float64 if the input is float64; differentiable, except `step`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from compressor.reference.activation import activate
from compressor.reference.packing import pack_padded, pad_packed
from compressor.reference.precision import working_dtype


def causal_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    history: Tensor | None = None,
    activation: str | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """x [B, T, D], weight [D, W], bias [D], history [B, D, W] (zeros if None); the result is [B, T, D].

    With `cu_seqlens` [N + 1], x is [1, tokens, D], N packed sequences, and the history is [N, D, W].
    """
    if cu_seqlens is not None:
        padded = causal_convolution(pad_packed(x, cu_seqlens), weight, bias, history, activation)
        return pack_padded(padded, cu_seqlens)
    dtype, tokens = working_dtype(x), x.shape[1]
    inputs = x.to(dtype)
    taps = weight.to(dtype).t().contiguous()  # [W, D]; strided factors would be several times slower
    output = inputs * taps[-1]
    for delay in range(1, min(len(taps), tokens)):
        output[:, delay:].addcmul_(inputs[:, :-delay], taps[-1 - delay])
    if history is not None:
        output = output + _response_to_history(history.to(dtype), taps, tokens)
    if bias is not None:
        output = output + bias.to(dtype)
    return activate(output, activation).to(x.dtype)


def _response_to_history(history: Tensor, taps: Tensor, tokens: int) -> Tensor:
    """What the taps read before the first token, [B, T, D]."""
    reach = len(taps) - 1
    before = history[..., 1:].transpose(1, 2)  # [B, W - 1, D]
    padded = F.pad(before, (0, 0, 0, reach))
    responses = sum((padded[:, tap : tap + reach] * taps[tap] for tap in range(reach)), torch.zeros_like(before))
    return F.pad(responses[:, :tokens], (0, 0, 0, max(tokens - reach, 0)))


def final_history(x: Tensor, width: int, history: Tensor | None = None, cu_seqlens: Tensor | None = None) -> Tensor:
    """The history after x: the last `width` inputs of each sequence, [B, D, width] in the dtype of x.

    x [B, T, D] and history [B, D, width]; with `cu_seqlens` [N + 1], x [1, tokens, D] and N histories.
    """
    if cu_seqlens is None:
        lengths = torch.full((x.shape[0],), x.shape[1], device=x.device)
    else:
        x, lengths = pad_packed(x, cu_seqlens), cu_seqlens.diff()
    before = x.new_zeros(x.shape[0], width, x.shape[2]) if history is None else history.transpose(1, 2).to(x.dtype)
    inputs = torch.cat([before, x], dim=1)
    last = lengths[:, None] + torch.arange(width, device=x.device)  # [B, width]
    return inputs.gather(1, last[..., None].expand(-1, -1, x.shape[2]).long()).transpose(1, 2).contiguous()


def step(
    x: Tensor, history: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None
) -> Tensor:
    """One token a sequence: x [N, D] to [N, D]; the history [N, D, W] takes it in, in place."""
    dtype = working_dtype(x)
    history.copy_(torch.cat([history[..., 1:], x[..., None].to(history.dtype)], dim=-1))
    output = (history.to(dtype) * weight.to(dtype)).sum(-1)
    if bias is not None:
        output = output + bias.to(dtype)
    return activate(output, activation).to(x.dtype)
