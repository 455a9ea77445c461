"""Packed batches: N sequences of any length one after another, [1, tokens, ...].

`cu_seqlens` [N + 1] holds the cumulative lengths 0, t_1, t_1 + t_2, ..., tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


def pad_packed(packed: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[1, tokens, ...] to [N, T, ...] with T the greatest length; zeros after the end of each sequence.

    Raises:
        ValueError: more than one row, or lengths that do not add up to the tokens.
    """
    lengths = cu_seqlens.diff().tolist()
    if packed.shape[0] != 1 or sum(lengths) != packed.shape[1]:
        raise ValueError(f"a packed batch has shape [1, {sum(lengths)}, ...] here, got {list(packed.shape)}")
    return pad_sequence(packed[0].split(lengths), batch_first=True)


def pack_padded(padded: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Inverse of `pad_packed`: [N, T, ...] to [1, tokens, ...]."""
    positions = torch.arange(padded.shape[1], device=padded.device)
    return padded[positions < cu_seqlens.diff().to(padded.device)[:, None]].unsqueeze(0)
