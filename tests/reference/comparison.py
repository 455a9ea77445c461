"""Values and gradients of two functions, held against each other in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from tests.reference.formulas import relative_error

Function = Callable[..., Tensor | tuple[Tensor, ...]]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def randomized(module: nn.Module, seed: int = 9) -> nn.Module:
    """In float64, with every parameter drawn anew."""
    with torch.no_grad():
        for offset, parameter in enumerate(module.parameters()):
            parameter.copy_(draw(*parameter.shape, seed=seed + offset))
    return module.double()


def assert_same(actual: Function, expected: Function, inputs: Sequence[Tensor]) -> None:
    """Outputs and gradients of both, for random output gradients, in float64."""
    results = []
    for function in (actual, expected):
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        outputs = function(*leaves)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        weights = [draw(*output.shape, seed=5 + i) for i, output in enumerate(outputs)]
        results.append([*outputs, *torch.autograd.grad(outputs, leaves, weights)])
    assert len(results[0]) == len(results[1])
    for index, (a, b) in enumerate(zip(*results, strict=True)):
        assert relative_error(a, b) < 1e-12, f"output or gradient {index}"
