"""Softmax layers are seen where a config lists them, also in layers that hold a recurrence too."""

from __future__ import annotations

from pathlib import Path

import pytest

from compressor.architectures.layer_kinds import lists_softmax_layers
from tests.families import tiny_checkpoint

KINDS = {
    "bamba": True, "falcon_h1": True, "nh": True, "zamba2": True, "q35": True, "qw": True, "oh": True,
    "m2": False, "gated_deltanet": None, "gated_deltanet_hybrid": None,
}  # fmt: skip


@pytest.mark.parametrize("name", list(KINDS))
def test_softmax_layers_are_those_that_the_config_lists(name: str, tmp_path: Path) -> None:
    assert lists_softmax_layers(tiny_checkpoint(name, tmp_path).model.config) is KINDS[name]
