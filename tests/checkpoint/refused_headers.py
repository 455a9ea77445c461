"""What the tests of weight headers share."""

from __future__ import annotations

from pathlib import Path

import pytest

from compressor.checkpoint.headers import read_headers
from compressor.errors import RequestError

INDEX = "model.safetensors.index.json"
QKV = "model.layers.0.linear_attn.in_proj_qkv.weight"


def refusal(folder: Path) -> str:
    with pytest.raises(RequestError) as caught:
        read_headers(folder)
    message = str(caught.value)
    assert "\n" not in message
    return message
