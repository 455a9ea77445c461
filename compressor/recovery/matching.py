"""Match of the mixers' outputs: what a student's mixers add to the residual stream against what the teacher's add.

    error = mean_layers mean_B ( mean (s - t)^2 / mean t^2 )      s, t: outputs of the mixers' output projections

The layers weigh the same, whatever the size of their outputs, and so do the sequences, however they are batched. Each
mixer of the student sees the stream that the student's own layers before it made.

Notation used for tensor shapes:
    B   sequences      T   tokens of a sequence      d   hidden size
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def captured_outputs(model: nn.Module, paths: Sequence[str]) -> Iterator[list[Tensor]]:
    """Collects what the modules of `paths` give, in the order in which they run; the hooks go at the end.

    Leave it before the backward pass: that may run modules once more, to save memory.
    """
    outputs: list[Tensor] = []

    def keep(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        outputs.append(output)

    with ExitStack() as hooks:
        for path in paths:
            hooks.callback(model.get_submodule(path).register_forward_hook(keep).remove)
        yield outputs


def matching_error(student: Sequence[Tensor], teacher: Sequence[Tensor]) -> Tensor:
    """The error of the module's docstring, a scalar of float32, or of float64 for float64 tensors.

    Both have one [B, T, d] a layer; the teacher's may be on another device and get no gradient.

    Raises:
        ValueError: there are no layers, or their numbers differ.
    """
    if not student:
        raise ValueError("there are no outputs to match.")
    return torch.stack([_relative_error(*pair) for pair in zip(student, teacher, strict=True)]).mean()


def _relative_error(student: Tensor, teacher: Tensor) -> Tensor:
    working = torch.promote_types(student.dtype, torch.float32)
    target = teacher.detach().to(device=student.device, dtype=working)
    energy = target.square().mean((1, 2)).clamp_min(torch.finfo(working).tiny)  # a dead mixer gives zeros
    return ((student.to(working) - target).square().mean((1, 2)) / energy).mean()
