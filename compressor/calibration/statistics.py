"""Streaming second moments of the key and query activations.

Notation: L mixers, H_k key heads, d_k channels, n tokens. The Gram matrix of activations X
[n, d_k] is X^T X [d_k, d_k]; their energy is the sum over tokens of x^2 / |x|^2 [d_k], with |x| the L2 norm of
one token's activations of a head. Sums over tokens are float64 whatever the activations' dtype, and memory does not
grow with the number of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from compressor.architectures.base import Mixer, RecurrenceTap
from compressor.errors import NOT_FINITE_REMEDY, RunError

TOKENS_PER_PRODUCT = 512
"""Rows of one low-precision product: tensor cores lose digits in proportion to the rows they sum."""
TOKENS_PER_STEP = 16384
"""Rows multiplied at once; bounds what the products of one step take."""
TOKENS_PER_ENERGY = 4096
"""Rows squared at once, in copies of float32."""


class GramAccumulator(RecurrenceTap):
    """Sums X^T X of every head of every mixer, for queries and keys apart, and their energy where it is asked for.

    The mixers must agree in H_k, d_k and keys a token. `grams` is float64 [2, L, H_k, d_k, d_k], queries first;
    `energies` is float64 [2, L, H_k, d_k] or None; `tokens` is int64 [2, L]. A token counts once for each of its keys.
    """

    def __init__(self, mixers: Sequence[Mixer], device: torch.device, with_energy: bool = False) -> None:
        first = mixers[0]
        self._position = {mixer.layer: position for position, mixer in enumerate(mixers)}
        self._layers = [mixer.layer for mixer in mixers]
        self._seen_per_token = (1, first.keys_per_token)
        shape = (2, len(mixers), first.num_k_heads, first.head_k_dim, first.head_k_dim)
        self.grams = torch.zeros(shape, dtype=torch.float64, device=device)
        self.energies = torch.zeros(shape[:-1], dtype=torch.float64, device=device) if with_energy else None
        self.tokens = torch.zeros(2, len(mixers), dtype=torch.int64)
        self._mask: Tensor | None = None

    def begin_batch(self, attention_mask: Tensor | None) -> None:
        """`attention_mask` is bool [B, T], True for tokens that count; None when all do."""
        self._mask = attention_mask

    def on_query(self, layer: int, query: Tensor) -> Tensor:
        self._add(0, layer, query)
        return query

    def on_key(self, layer: int, key: Tensor) -> Tensor:
        self._add(1, layer, key)
        return key

    def end_batch(self, expected_tokens: int) -> None:
        """Check that every mixer was seen with every token, and that all sums are finite.

        Raises:
            RunError: names the layer that was not captured, or the layer and head with NaN or
                infinite activations.
        """
        for stream, name in enumerate(("query", "key")):
            for position, layer in enumerate(self._layers):
                seen, expected = int(self.tokens[stream, position]), expected_tokens * self._seen_per_token[stream]
                if seen != expected:
                    raise RunError(
                        f"layer {layer}: {seen} of {expected} {name} activations were captured; "
                        "the installed library calls its recurrence in a way this version does not know."
                    )
        finite = torch.isfinite(self.grams.diagonal(dim1=-2, dim2=-1)).all(-1)
        if not bool(finite.all()):
            stream, position, head = (int(index) for index in (~finite).nonzero()[0])
            raise RunError(
                f"layer {self._layers[position]}, head {head}: {('query', 'key')[stream]} activations are NaN or "
                f"infinite; {NOT_FINITE_REMEDY}."
            )

    def _add(self, stream: int, layer: int, activations: Tensor) -> None:
        position = self._position[layer]
        by_head = _counted_by_head(activations, self._mask)
        self.tokens[stream, position] += by_head.shape[1]
        for block in by_head.split(TOKENS_PER_STEP, dim=1):
            self.grams[stream, position] += gram(block).to(self.grams.device)
        if self.energies is not None:
            for block in by_head.split(TOKENS_PER_ENERGY, dim=1):
                self.energies[stream, position] += energy(block).to(self.energies.device)


def gram(block: Tensor) -> Tensor:
    """X^T X of each head: [H, n, d] -> float64 [H, d, d].

    float64 throughout on a CPU. On a GPU, blocks of 512 rows are multiplied in float32 and summed
    in float64: products of half-precision activations are exact there, and float32 activations are
    multiplied in full float32.
    """
    if block.device.type == "cpu":
        wide = block.double()
        return torch.bmm(wide.mT, wide)
    num_heads, tokens, head_dim = block.shape
    whole = tokens - tokens % TOKENS_PER_PRODUCT
    pieces = block[:, :whole].reshape(-1, TOKENS_PER_PRODUCT, head_dim)
    total = _product(pieces).unflatten(0, (num_heads, -1)).sum(1, dtype=torch.float64)
    if whole < tokens:
        total += _product(block[:, whole:])
    return total


def energy(block: Tensor) -> Tensor:
    """Sum over tokens of x^2 / |x|^2 of each head: [H, n, d] -> float64 [H, d]. A token that is zero adds nothing.

    Quotients are taken in float32, or float64 where the activations are.
    """
    squares = block.to(torch.promote_types(block.dtype, torch.float32)).square()
    totals = squares.sum(-1, keepdim=True)
    return squares.div_(torch.where(totals > 0, totals, 1.0)).sum(1, dtype=torch.float64)


def _product(pieces: Tensor) -> Tensor:
    """X^T X of each piece [n, d] in float32."""
    if pieces.dtype in (torch.bfloat16, torch.float16):
        return torch.bmm(pieces.mT, pieces, out_dtype=torch.float32)
    return torch.bmm(pieces.float().mT, pieces.float())


def _counted_by_head(activations: Tensor, mask: Tensor | None) -> Tensor:
    """[B, T, H, d] -> [H, n, d] without padding; fla passes [1, n, H, d], padding already removed.

    The heads come first in one copy, whatever the memory layout of the activations is.
    """
    by_head = activations.permute(2, 0, 1, 3).flatten(1, 2)
    if mask is None or by_head.shape[1] == int(mask.sum()):
        return by_head
    return by_head[:, mask.flatten().to(by_head.device)]
