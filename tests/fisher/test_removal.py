"""Removals count further than gradients say where vectors are normalised, and nowhere else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.fisher.test_mask_statistics import PLAIN, some_channels, statistics, tiny, tokens


@pytest.mark.parametrize("name", ["m2", "gated_deltanet"])
def test_removals_go_further_only_where_keys_are_normalised(name: str, tmp_path: Path) -> None:
    masked = tiny(name, tmp_path)
    ids, kept = tokens(2, 40), some_channels(masked, masked.shape[-1] - 5)
    tangent, chord = (
        statistics(masked, [ids], kept, replace(PLAIN, removal=removal)).gradient for removal in ("tangent", "chord")
    )
    assert torch.equal(tangent, chord) is (name == "m2")
