"""The tensors of saved statistics: which there are, how large, and a hash of what they hold. Of headers, no bytes."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from compressor.abbreviation import cut_word
from compressor.selection.request import Statistic

DTYPE = "F64"
"""Of all tensors, as safetensors calls it."""
FIELD_OF: Mapping[Statistic, str] = {"energy": "energy", "wanda": "input_squares", "gradient": "gradient"}
"""What the file calls a statistic that not every method reads."""
_ELEMENT_BYTES = 8
_HEADER_BYTES = 4096
"""More than the names, shapes and metadata take."""


@dataclass(frozen=True, slots=True)
class TensorSizes:
    """L `layers` of `heads` key heads of `key_dim` channels, whose projections read `input_width` numbers a token."""

    layers: int
    heads: int
    key_dim: int
    input_width: int

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of every field; each stands in the file twice, as `gram_q` and `gram_k`."""
        by_channel = (self.layers, self.heads, self.key_dim)
        return {
            "gram": (*by_channel, self.key_dim),
            "energy": by_channel,
            "input_squares": (self.layers, self.input_width),
            "gradient": by_channel,
        }

    def file_bytes(self, needs: Iterable[Statistic]) -> int:
        """At most what a file of the Gram matrices and of those of `needs` that have a field takes."""
        shapes = self.shapes()
        fields = ["gram", *(FIELD_OF[statistic] for statistic in needs if statistic in FIELD_OF)]
        return 2 * _ELEMENT_BYTES * sum(math.prod(shapes[field]) for field in fields) + _HEADER_BYTES


def pair(field: str) -> tuple[str, str]:
    """The names of a field's tensors, of queries and of keys."""
    return f"{field}_q", f"{field}_k"


def damage(header: Mapping[str, tuple[str, tuple[int, ...]]], sizes: TensorSizes) -> str | None:
    """What is wrong with the tensors' names, dtypes or shapes; None where nothing is."""
    shapes = {name: shape for field, shape in sizes.shapes().items() for name in pair(field)}
    for name, (dtype, shape) in header.items():
        if name not in shapes:
            return f"it holds a tensor {cut_word(name)}, which no statistics have"
        if (dtype, shape) != (DTYPE, shapes[name]):
            return f"its {name} is {dtype} {list(shape)} instead of {DTYPE} {list(shapes[name])}"
    for field in sizes.shapes():
        missing = [name for name in pair(field) if name not in header]
        if missing and (field == "gram" or len(missing) == 1):
            return f"it lacks {' and '.join(missing)}"
    return None


def lacking(names: Collection[str], needs: Collection[Statistic]) -> list[Statistic]:
    """Those of `needs` that a file of tensors `names` does not hold."""
    return [statistic for statistic, field in FIELD_OF.items() if statistic in needs and pair(field)[0] not in names]


def content_sha256(tokens: int, tensors: Mapping[str, Tensor]) -> str:
    """Of the number of tokens and of every tensor's name, shape and bytes. Tensors are contiguous, on the CPU."""
    digest = hashlib.sha256(f"{tokens} tokens\n".encode())
    for name in sorted(tensors):
        digest.update(f"{name} {list(tensors[name].shape)}\n".encode())
        digest.update(tensors[name].reshape(-1).numpy().data)
    return digest.hexdigest()
