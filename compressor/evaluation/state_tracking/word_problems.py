"""Group word problems: read group elements, say their product so far.

Tokens are drawn uniformly from the group, or from the elements that move few points. The label at
position t is the product x_0 x_1 ... x_t, "apply x_0 first, then x_1, ..." (`groups`).

Source: Merrill, Petty, Sabharwal, "The Illusion of State in State-Space Models" (arXiv:2404.08819), and
Siems et al., "DeltaProduct" (arXiv:2502.10297), whose published runs train at 128 tokens and test at 512:
one layer of width 128, 8 heads of 32 channels, no short convolution, no gates, batches of 2048, AdamW with
learning rate 1e-3, weight decay 1e-6 and a cosine schedule, 100 epochs of 100,000 sequences.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from compressor.evaluation.state_tracking.base import LabelledBatch, StateTrackingTask, ignore_padding
from compressor.evaluation.state_tracking.groups import PermutationGroup


@final
class GroupWordProblem(StateTrackingTask):
    """`letters` int64 [count]: the elements that words are made of; None for all. Padding is the identity."""

    minimum_length = 1

    def __init__(self, name: str, group: PermutationGroup, letters: Tensor | None = None) -> None:
        self.name = name
        self.group = group
        self.letters = torch.arange(group.order) if letters is None else letters
        self.vocab_size = self.num_classes = group.order

    def _draw(self, lengths: Tensor, longest: int, generator: torch.Generator) -> LabelledBatch:
        shape = (len(lengths), longest)
        tokens = self.letters[torch.randint(len(self.letters), shape, generator=generator)]
        tokens = tokens.masked_fill(torch.arange(longest) >= lengths[:, None], 0)
        return LabelledBatch(tokens, ignore_padding(cumulative_product(self.group, tokens), lengths))


def cumulative_product(group: PermutationGroup, tokens: Tensor) -> Tensor:
    """The element x_0 x_1 ... x_t at each position t; tokens int64 [B, T], and so the result.

    By doubling (Hillis and Steele 1986): after the step of width w, position t holds the product of
    the last min(2w, t + 1) elements up to t.
    """
    products, width = tokens, 1
    while width < tokens.shape[1]:
        joined = group.products[products[:, :-width], products[:, width:]]
        products, width = torch.cat([products[:, :width], joined], dim=1), 2 * width
    return products
