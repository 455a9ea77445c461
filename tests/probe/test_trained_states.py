"""States of trained models in the stock caches, against their recurrences written out in float64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from compressor.architectures.cached_forward import forward_from_cache
from compressor.architectures.family import family_of
from compressor.architectures.recurrent_state import state_layout
from compressor.calibration.tokenizer import load_tokenizer
from tests.families import TinyCheckpoint, open_tiny
from tests.probe import test_mamba2_states as state_space
from tests.probe.test_states import record_calls, written_out

TOKENS = 192


def beginning_of_text(model: TinyCheckpoint, text: Path) -> Tensor:
    """int64 [1, TOKENS]."""
    words = text.read_text(encoding="utf-8")[:4000]
    return torch.tensor(load_tokenizer(model.folder, False)(words)["input_ids"])[None, :TOKENS]


def check(state: Tensor, expected: Tensor) -> None:
    """To float32's rounding, of the largest entry of each head."""
    scale = expected.abs().amax((-2, -1), keepdim=True)
    assert float(scale.min()) > 0
    assert float(((state.double() - expected) / scale).abs().max()) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deltaproduct-14m", "gdn-28m", "deltanet-14m"])
def test_delta_rules(name: str, shared_models: Path, shared_text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of Gated DeltaProduct with both keys of every token."""
    model = open_tiny(shared_models / name)
    calls = record_calls(model, monkeypatch)
    with torch.no_grad():
        _, cache = forward_from_cache(
            model.model, None, input_ids=beginning_of_text(model, shared_text / "test_docs.txt")
        )
        for call, mixer in zip(calls, model.mixers, strict=True):
            check(state_layout(family_of(model.raw_config)).read(cache, mixer), written_out(call, None))


@pytest.mark.slow
def test_state_space_model(shared_models: Path, shared_text: Path) -> None:
    model = open_tiny(shared_models / "mamba2-13m")
    with torch.no_grad(), state_space.inputs_and_outputs(model) as seen:
        _, cache = forward_from_cache(
            model.model, None, input_ids=beginning_of_text(model, shared_text / "test_docs.txt")
        )
        for mixer in model.mixers:
            hidden, output = seen[mixer.layer]
            expected, state, _ = state_space.written_out(model, mixer, hidden, state_space.weights_of(model, mixer))
            check(state_layout(family_of(model.raw_config)).read(cache, mixer), state)
            torch.testing.assert_close(output, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))
