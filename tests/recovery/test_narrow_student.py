"""A student that was loaded in bfloat16 from float32 files, as on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.families import tiny_checkpoint
from tests.recovery.students import MODES, file_dtypes, student_of, train_at_random
from tests.tiny_models import read_weights


@pytest.mark.parametrize("name", ["gated_deltanet_tied", "q35"])
@pytest.mark.parametrize("mode", MODES)
def test_a_narrow_model_takes_and_gives_what_the_float32_files_hold(name: str, mode: str, tmp_path: Path) -> None:
    """As on a GPU: nothing that is trained or written has been rounded to bfloat16."""
    tiny = tiny_checkpoint(name, tmp_path)
    tiny.model.to(torch.bfloat16)
    student = student_of(tiny, MODES[mode])[1]
    files = read_weights(tmp_path)
    student.take_exact(files.__getitem__)
    untrained = student.merged_tensors(file_dtypes(tmp_path), files.__getitem__)
    assert all(torch.equal(tensor, files[tensor_name]) for tensor_name, tensor in untrained.items())
    train_at_random(student)
    merged = student.merged_tensors(file_dtypes(tmp_path), files.__getitem__)
    for adapter in student.adapters:
        update = adapter.scale * (adapter.b.detach() @ adapter.a.detach())
        assert torch.equal(merged[f"{adapter.path}.weight"], files[f"{adapter.path}.weight"] + update)
    for parameter_name, parameter in student.whole.items():
        assert torch.equal(merged[parameter_name], parameter.detach())
