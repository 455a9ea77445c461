"""Send calls with CPU tensors to the reference and all others to the kernel they were written for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from torch import Tensor


def on_cpu(*args: object, **kwargs: object) -> tuple[bool, str | None]:
    """Whether every tensor among the arguments is on the CPU, and if not, why not: a verifier of fla's dispatch."""
    for argument in (*args, *kwargs.values()):
        if isinstance(argument, Tensor) and argument.device.type != "cpu":
            return False, f"the reference computes CPU tensors only, and one is on {argument.device}"
    return True, None


@dataclass(frozen=True)
class DeviceSwitch:
    """Stands in a stock module for one of its functions; hands every argument on as it is."""

    reference: Callable[..., Any]
    kernel: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        accepted, _ = on_cpu(*args, **kwargs)
        return self.reference(*args, **kwargs) if accepted else self.kernel(*args, **kwargs)


def switch_global(module: ModuleType, name: str, reference: Callable[..., Any]) -> None:
    """Put a switch between `reference` and what `module` calls by `name` now. Twice is the same as once."""
    current = vars(module)[name]
    if not isinstance(current, DeviceSwitch):
        setattr(module, name, DeviceSwitch(reference, current))
