"""Which of several processes this one is, as torch's and accelerate's launchers say. Imports no torch."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Launch:
    """`index` of `count` processes of one run, `local_count` of which are on this machine."""

    index: int = 0
    count: int = 1
    local_count: int = 1


def launch() -> Launch:
    """Of this process; one alone where no launcher says otherwise."""
    if "LOCAL_RANK" not in os.environ:
        return Launch()
    count = int(os.environ.get("WORLD_SIZE", "1"))
    return Launch(int(os.environ.get("RANK", "0")), count, int(os.environ.get("LOCAL_WORLD_SIZE", str(count))))
