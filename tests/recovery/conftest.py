"""Tiny models on disk, made once for all tests that train them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState
from torch import Tensor

from tests.recovery.runs import make_folders, trained
from tests.tiny_models import edit_config


@pytest.fixture(autouse=True)
def _no_accelerator_before() -> Iterator[None]:
    """accelerate keeps what the first Accelerator of a process was told, for all that follow."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """From the name of a variant to a folder of `make_folders`; nothing may change it."""
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = make_folders(name, tmp_path_factory.mktemp(name))
        return made[name]

    return get


@pytest.fixture(scope="session")
def dropout_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of Qwen3.5, whose softmax layer has dropout here: every step draws random numbers."""
    folder = make_folders("q35", tmp_path_factory.mktemp("dropout"))
    for part in ("source", "cut"):
        edit_config(folder / part, {"attention_dropout": 0.3})
    return folder


@pytest.fixture(scope="session")
def uninterrupted(dropout_models: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """The weights that `dropout_models` have after the steps of `SETTINGS`."""
    return trained(dropout_models, tmp_path_factory.mktemp("uninterrupted"))
