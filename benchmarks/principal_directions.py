"""Principal directions of the key and query activations, and what becomes of a per-channel filter in their basis.

Notation used for tensor shapes:
    H   heads            d     key/query channels of one head
    T   [H, d, d] float64, the directions of a head in its rows, the leading one first

With y = w * u for a filter w of every channel, the rotated T y is a filter of T u only where all channels of a head
have the same one: at each tap the exact operator T diag(w) T^T is a full matrix. Neither does T commute with an
activation function. Two diagonals stand in for that matrix here. All results are float64.
"""

from __future__ import annotations

import torch
from torch import Tensor


def principal_directions(gram: Tensor) -> Tensor:
    """Orthonormal rows [H, d, d], by falling share of the squares that `gram` [H, d, d] sums.

    The largest entry of a direction is positive: the sign matters where an activation function follows, and a
    direction that is a channel has to be that channel.
    """
    directions = torch.linalg.eigh(gram.double()).eigenvectors.mT.flip(-2)
    largest = directions.gather(-1, directions.abs().argmax(-1, keepdim=True))
    return directions * largest.sign()


def retained_squares(gram: Tensor, directions: Tensor, keep: int) -> Tensor:
    """Share [H] of the squares that `gram` [H, d, d] sums which lies in the `keep` leading directions."""
    wide, leading = gram.double(), directions[:, :keep]
    return ((leading @ wide) * leading).sum((-2, -1)) / wide.diagonal(dim1=-2, dim2=-1).sum(-1)


def rotate(channels: Tensor, directions: Tensor) -> Tensor:
    """What is linear in a channel, [H, d, ...], in the basis of the directions."""
    return torch.einsum("hij,hj...->hi...", directions, channels.double())


def nearest_filters(filters: Tensor, directions: Tensor) -> Tensor:
    """(T*T) w for `filters` w [H, d, ...]: at each tap the diagonal that is nearest to T diag(w) T^T.

    T*T is the elementwise square. The first k rows are also the diagonal D that minimises |D T_k - T_k diag(w)| in the
    Frobenius norm, with T_k the k leading directions.
    """
    return torch.einsum("hij,hj...->hi...", directions.square(), filters.double())


def shared_filters(filters: Tensor, directions: Tensor) -> Tensor:
    """One filter for all channels of a head, the mean of its `filters` [H, d, ...], which every rotation leaves."""
    return filters.double().mean(1, keepdim=True).expand_as(filters)
