"""Which of several processes this one is, as torch's and accelerate's launchers say. Imports no torch."""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import dataclass
from typing import NoReturn, final

SECONDS_FOR_THE_FIRST = 10.0
"""How long a process that cannot begin lets the first one say why: the launcher ends all when that one has ended."""

_OF_LAUNCHERS = frozenset(
    {
        *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME"),
        *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    }
)


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


def act_alone() -> None:
    """Forget the launcher: what this process and those that it starts do from here on waits for no other."""
    for name in [name for name in os.environ if name in _OF_LAUNCHERS or name.startswith("TORCHELASTIC_")]:
        del os.environ[name]


def fully_sharded_version() -> str | None:
    """Of the FSDP that accelerate was launched for; None where it was for none."""
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() != "true":
        return None
    return os.environ.get("FSDP_VERSION", "1")


def let_first_speak() -> None:
    """Before an error that all processes make alike, such as a wrong option, wait until the first one has said it."""
    if launch().index > 0:
        time.sleep(SECONDS_FOR_THE_FIRST)


@final
class LaunchedParser(argparse.ArgumentParser):
    """Of the verbs whose work several processes share: a mistake is said by the first of them."""

    def error(self, message: str) -> NoReturn:
        let_first_speak()
        super().error(message)
