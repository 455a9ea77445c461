"""Rotary position embeddings (Su et al., RoFormer, arXiv:2104.09864)."""

from __future__ import annotations

import torch
from torch import Tensor

from compressor.reference.packing import pack_padded, pad_packed
from compressor.reference.precision import working_dtype


def rotate(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    interleaved: bool = False,
) -> Tensor:
    """Rotates the first 2R channels of x [B, T, heads, D] by the angles of each token's position.

    Args:
        cos, sin: [positions, R].
        offsets: position of the first token, of all sequences or [B]. A token whose position is not
            in the table (padding on the left counts from below 0) becomes zero.
        cu_seqlens: [N + 1], for N sequences packed into a batch of one; `offsets` is [N] then.
        interleaved: pairs are (0, 1), (2, 3), ... instead of (0, R), (1, R + 1), ...

    Computed in float32, or in float64 if x is float64; returned in the dtype of x.
    """
    if cu_seqlens is not None:
        return pack_padded(rotate(pad_packed(x, cu_seqlens), cos, sin, offsets, None, interleaved), cu_seqlens)
    dtype, rotated = working_dtype(x), 2 * cos.shape[1]
    start = torch.as_tensor(offsets, device=x.device).reshape(-1, 1)
    positions = start + torch.arange(x.shape[1], device=x.device)  # [1 or B, T]
    in_table = ((positions >= 0) & (positions < cos.shape[0]))[..., None, None]
    rows = positions.clamp(0, cos.shape[0] - 1).long()
    cos, sin = cos.to(dtype)[rows][:, :, None], sin.to(dtype)[rows][:, :, None]  # [1 or B, T, 1, R]

    pair_dim = -1 if interleaved else -2
    pairs = x[..., :rotated].to(dtype).unflatten(-1, (-1, 2) if interleaved else (2, -1))
    first, second = pairs.unbind(pair_dim)
    turned = torch.stack([first * cos - second * sin, first * sin + second * cos], dim=pair_dim).flatten(-2)
    return torch.cat([(turned * in_table).to(x.dtype), x[..., rotated:]], dim=-1)
