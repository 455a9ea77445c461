"""A tap changes the model it was put into, and no other of the family that runs meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from compressor.architectures.masking import MaskedChannels, ScaledOutput
from tests.families import SUPPORTED_VARIANTS, open_tiny, random_selection, tiny_checkpoint, tiny_tokens


@pytest.mark.parametrize("name", SUPPORTED_VARIANTS)
def test_another_model_runs_untouched(name: str, tmp_path: Path) -> None:
    tiny = tiny_checkpoint(name, tmp_path)
    other = open_tiny(tmp_path).model
    tokens = tiny_tokens(70)[None]
    with torch.inference_mode():
        expected = other(input_ids=tokens, use_cache=False).logits
        for tap in (
            ScaledOutput(3.0),
            MaskedChannels(random_selection(tiny.mixers, 4).kept, tiny.mixers[0].head_k_dim, 1.0),
        ):
            with tiny.architecture.tapped(tiny.model, tiny.mixers, tap):
                changed = tiny.model(input_ids=tokens, use_cache=False).logits
                assert torch.equal(other(input_ids=tokens, use_cache=False).logits, expected)
            assert not torch.allclose(changed, expected)
        assert torch.equal(tiny.model(input_ids=tokens, use_cache=False).logits, expected)
