"""What the refusal of a scaled norm epsilon calls the setting."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from compressor.calibration.norm_check import refuse_epsilon_near_other_norms
from compressor.calibration.tokens import TokenBatch
from compressor.errors import RequestError
from compressor.naming import key_of, option_of
from tests.families import tiny_checkpoint


def test_the_setting_is_called_as_it_was_given(tmp_path: Path) -> None:
    tiny = tiny_checkpoint("gated_deltanet", tmp_path)
    batch = TokenBatch(torch.arange(8)[None], None)
    for name, given, remedy in (
        (key_of, "selection.norm_epsilon: scaled", "selection.norm_epsilon: keep"),
        (option_of, "--norm-epsilon scaled", "--norm-epsilon keep"),
    ):
        message = f"^{given} would write 1e\\+06, and .* reads the same field .*, under 100 times that; use {remedy}.$"
        with pytest.raises(RequestError, match=message):
            refuse_epsilon_near_other_norms(tiny.architecture, tiny.model, batch, 1e6, name)
