"""Softmax layers that lose their old keys, against masks and windows of the stock classes themselves."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from compressor.architectures.recurrent_state import state_layout
from compressor.probe.segments import Boundary, read_in_segments
from compressor.probe.truncation import Reading, measure_cut
from tests.families import MAMBA2_HYBRIDS, TinyCheckpoint, open_tiny, tiny_checkpoint, tiny_tokens
from tests.probe.test_measured_states import probed
from tests.tiny_models import edit_config, save_tiny


def nothing(tokens: int) -> None:
    """Progress that nobody looks at."""


def windowed_losses(tiny: TinyCheckpoint, tokens: Tensor, segment: int, window: int | None) -> Tensor:
    return measure_cut(probed(tiny), [tokens], None, Reading(segment, 1, 0, window), nothing).figures[0].losses


@torch.inference_mode()
def one_pass(tiny: TinyCheckpoint, tokens: Tensor) -> Tensor:
    logits = tiny.model(input_ids=tokens[None], use_cache=False).logits[0, :-1]
    return F.cross_entropy(logits, tokens[1:], reduction="none")


@pytest.mark.parametrize("name", ["q35", "qw", "qn", "oh", *MAMBA2_HYBRIDS])
def test_transformers_against_an_explicit_mask(name: str, tmp_path: Path) -> None:
    """Positions and all: each segment of 64 sees itself and the 40 tokens before it."""
    tiny, tokens = tiny_checkpoint(name, tmp_path), tiny_tokens(257)
    place = torch.arange(256)
    first = place // 64 * 64 - 40
    visible = (place <= place[:, None]) & (place >= first[:, None])

    def masked(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        length = kwargs["hidden_states"].shape[1]
        mask = torch.where(visible[:length, :length], 0.0, torch.finfo(torch.float32).min)
        return args, kwargs | {"attention_mask": mask[None, None]}

    softmax = [each for each in tiny.model.modules() if re.fullmatch(r"\w+(?<!Vision)Attention", type(each).__name__)]
    assert len(softmax) == (2 if name in ("falcon_h1", "zamba2") else 1)
    handles = [each.register_forward_pre_hook(masked, with_kwargs=True) for each in softmax]
    with torch.inference_mode():
        logits = tiny.model(input_ids=tokens[None, :-1], use_cache=False).logits[0]
    for handle in handles:
        handle.remove()
    expected = F.cross_entropy(logits, tokens[1:], reduction="none")
    found = windowed_losses(tiny, tokens, 64, 40)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(found, one_pass(tiny, tokens), atol=1e-2)


def test_fla_against_its_own_window(tmp_path: Path) -> None:
    """Token by token with 31 tokens left of the past: fla's sliding window of 32."""
    folder = save_tiny("gated_deltanet_hybrid", tmp_path)
    tiny, tokens = open_tiny(folder), tiny_tokens(100)
    found, plain = windowed_losses(tiny, tokens, 1, 31), one_pass(tiny, tokens)
    edit_config(folder, {"attn": {"window_size": 32}})
    expected = one_pass(open_tiny(folder), tokens)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(found, plain, atol=1e-2)


def test_only_states_reach_further_back(tmp_path: Path) -> None:
    """With states zeroed as well, the third segment does not know the first; with keys left it does.

    The model has no convolutions, which would carry three tokens over each boundary.
    """
    tiny = open_tiny(save_tiny("gated_deltanet_hybrid", tmp_path, overrides={"use_short_conv": False}))
    layout = state_layout(tiny.raw_config["model_type"])
    texts = [torch.cat([tiny_tokens(64, seed), tiny_tokens(129, 9)]) for seed in range(2)]

    def last_segments(window: int | None) -> tuple[Tensor, Tensor]:
        def forget(boundary: Boundary) -> None:
            for mixer in tiny.mixers:
                layout.write(boundary.cache, mixer, torch.zeros_like(layout.read(boundary.cache, mixer)))
            if window is not None:
                layout.forget_keys(boundary.cache, window)

        one, other = (read_in_segments(tiny.model, [text], 64, 1, forget)[0].losses for text in texts)
        return one[128:], other[128:]

    torch.testing.assert_close(*last_segments(32), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(*last_segments(None), atol=1e-3)


@pytest.mark.parametrize("name", ["q35", "qw", "gated_deltanet_hybrid"])
def test_a_window_as_long_as_the_text_changes_nothing(name: str, tmp_path: Path) -> None:
    tiny, tokens = tiny_checkpoint(name, tmp_path), tiny_tokens(200)
    torch.testing.assert_close(windowed_losses(tiny, tokens, 64, 256), one_pass(tiny, tokens), rtol=1e-4, atol=1e-4)
