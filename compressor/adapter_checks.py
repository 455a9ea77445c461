"""Whether a run gives an adapter to save, and a folder for it that is apart from the output. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from compressor.errors import RequestError
from compressor.home_folders import expanded
from compressor.naming import Naming
from compressor.recipe import RecoverySection

_SETTING = "recovery.save_adapter"


def refuse_no_adapter(section: RecoverySection, trains: bool, name: Naming) -> None:
    """Nothing where none is to be saved. `trains`: whether the run trains.

    Raises:
        RequestError: there will be no adapter.
    """
    if section.save_adapter is None:
        return
    given = name(_SETTING, expanded(section.save_adapter))
    if section.trainable != "lora":
        raise RequestError(
            f"{given}: {name('recovery.trainable', section.trainable)} trains no adapter; use "
            f"{name('recovery.trainable', 'lora')}, or leave {name(_SETTING)} out: the exported checkpoint has all "
            "that was trained."
        )
    if not trains:
        raise RequestError(
            f"{given}: this run trains nothing; add {name('recovery.train', True)} and cut at least one channel, or "
            f"leave {name(_SETTING)} out."
        )


def refuse_nested(given: Path, adapter: Path, output: Path, name: Naming) -> None:
    """`adapter` and `output` are the folders without links on the way; `given` is what the user called the first.

    Raises:
        RequestError: one is the other, or in it.
    """
    if adapter == output or output in adapter.parents:
        raise RequestError(
            f"{name(_SETTING, given)} is in the output folder {output}, whose weights its loaders would then mistake; "
            f"choose a folder beside it, such as {output}-adapter."
        )
    if adapter in output.parents:
        raise RequestError(
            f"{name(_SETTING, given)} holds the output folder {output}; choose a folder beside it, such as "
            f"{output}-adapter."
        )
