"""What the registry says of families that cannot be cut, held against the stock classes that say so."""

from __future__ import annotations

import itertools

import pytest
import torch
from fla.models import GLAConfig, RetNetConfig, RWKV7Config
from fla.modules import RotaryEmbedding
from transformers import KimiLinearConfig

from compressor.architectures.registry import find_architecture
from compressor.errors import RequestError


@pytest.mark.parametrize("config_class", [GLAConfig, KimiLinearConfig, RetNetConfig, RWKV7Config])
def test_the_stock_name_is_refused_with_a_reason(config_class: type) -> None:
    with pytest.raises(RequestError, match="cannot be cut: .*; use a model of another family"):
        find_architecture(config_class.model_type)  # type: ignore[attr-defined]


def test_the_angles_of_retnet_follow_from_the_width() -> None:
    """Of all ways to keep 4 of 8 pairs of channels, one alone is turned by the angles of the narrower head."""
    wide, narrow = RotaryEmbedding(dim=16).inv_freq, RotaryEmbedding(dim=8).inv_freq
    ways = [kept for kept in itertools.combinations(range(8), 4) if torch.allclose(wide[list(kept)], narrow)]
    assert ways == [(0, 2, 4, 6)]


def test_kimi_linear_has_one_width() -> None:
    assert [name for name in vars(KimiLinearConfig()) if name.startswith("linear") and "head_dim" in name] == [
        "linear_head_dim"
    ]


def test_heads_of_rwkv7_fill_the_hidden_size() -> None:
    for head_dim in (32, 64):
        config = RWKV7Config(hidden_size=128, head_dim=head_dim)
        assert config.num_heads * config.head_dim == config.hidden_size
