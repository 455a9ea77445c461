"""Texts of the user's that a run reads: no output takes their place, or comes among them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from compressor.calibration.text import DEMO, DEMO_HELD_OUT
from compressor.export.folder import OutputFolder
from compressor.export.placement import refuse_texts
from compressor.home_folders import expanded
from compressor.recipe import Recipe


def texts_of(recipe: Recipe) -> tuple[Path, ...]:
    """Files, and folders of files, that calibration, training and evaluation read."""
    trained = [recipe.recovery.source] if recipe.recovery.train else []
    evaluated = recipe.evaluation.texts if recipe.export.evaluate else []
    return local_texts([recipe.calibration.source, *trained, *evaluated])


def local_texts(names: Iterable[str | None]) -> tuple[Path, ...]:
    """Those of `names` that are on this machine: others are bundled, or ids on the Hub."""
    paths = [expanded(name) for name in names if name not in (None, DEMO, DEMO_HELD_OUT)]
    # os.path answers for any string; pathlib raises for a name that is too long.
    return tuple(path for path in paths if os.path.exists(path))  # noqa: PTH110


def refuse_outputs_among(texts: Iterable[Path], outputs: Iterable[OutputFolder | None]) -> None:
    """Refuse folders that a run would write among what it reads, or in place of it.

    Raises:
        RequestError: see `refuse_texts`.
    """
    for output in outputs:
        if output is not None:
            refuse_texts(output.path, texts)
