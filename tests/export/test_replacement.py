"""Tensors replaced in place: every other byte stays, whatever file they stand in."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from compressor.errors import RunError
from compressor.export.replacement import replace_tensors
from tests.tiny_models import read_weights, save_tiny


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shards", [None, "20kB"])
def test_only_the_named_tensors_change(dtype: torch.dtype, shards: str | None, tmp_path: Path) -> None:
    save_tiny("gated_deltanet", tmp_path, dtype, max_shard_size=shards)
    before = read_weights(tmp_path)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shards is not None)
    names = [name for name in before if "o_proj" in name]
    new = {name: torch.randn(before[name].shape).to(dtype) for name in names}
    replace_tensors(tmp_path, new)
    after = read_weights(tmp_path)
    assert names
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], new.get(name, before[name])) for name in before)


def test_another_kind_is_refused_and_nothing_written(tmp_path: Path) -> None:
    save_tiny("gated_deltanet", tmp_path, torch.float32)
    before = read_weights(tmp_path)
    good = {name: torch.zeros_like(tensor) for name, tensor in before.items() if "o_proj" in name}
    name = next(iter(good))
    for wrong in (
        {"model.absent": torch.zeros(1)},
        {name: torch.zeros(3, 5)},
        {name: good[name].bfloat16()},
    ):
        with pytest.raises(RunError, match="not the checkpoint that was trained"):
            replace_tensors(tmp_path, {**good, **wrong})
    after = read_weights(tmp_path)
    assert all(torch.equal(after[name], before[name]) for name in before)
