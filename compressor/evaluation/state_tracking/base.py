"""What a state-tracking task is.

Notation used for tensor shapes:
    B  sequences of a batch        T  tokens of the longest sequence asked for
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from compressor.errors import RequestError

IGNORED = -100
"""Label where nothing is asked: after the end of a sequence, or inside an expression."""


@dataclass(frozen=True)
class LabelledBatch:
    """tokens, labels: int64 [B, T] on the CPU. A label is the class due after its own token is read (no shift).

    Sequences are padded on the right, which no causal model sees before its end.
    """

    tokens: Tensor
    labels: Tensor


class StateTrackingTask(ABC):
    """Sequences of tokens 0 .. vocab_size - 1 with classes 0 .. num_classes - 1 as labels."""

    name: str
    vocab_size: int
    num_classes: int
    minimum_length: int

    @property
    def chance(self) -> float:
        """Accuracy of a guess among all classes."""
        return 1 / self.num_classes

    def draw(self, batch_size: int, shortest: int, longest: int, generator: torch.Generator) -> LabelledBatch:
        """Sequences whose lengths are uniform on shortest .. longest, padded to `longest`.

        The same state of `generator`, which is on the CPU, gives the same batch.

        Raises:
            RequestError: the lengths are out of order or shorter than the task's shortest sequence.
        """
        if not self.minimum_length <= shortest <= longest:
            raise RequestError(
                f"{self.name} cannot have lengths {shortest} to {longest}: the first must be at least "
                f"{self.minimum_length} and at most the second."
            )
        lengths = torch.randint(shortest, longest + 1, (batch_size,), generator=generator)
        return self._draw(lengths, longest, generator)

    @abstractmethod
    def _draw(self, lengths: Tensor, longest: int, generator: torch.Generator) -> LabelledBatch:
        """lengths int64 [B], each at most `longest`."""


def ignore_padding(labels: Tensor, lengths: Tensor) -> Tensor:
    """`labels` [B, T] with IGNORED from position `lengths` [B] on."""
    return labels.masked_fill(torch.arange(labels.shape[1]) >= lengths[:, None], IGNORED)
