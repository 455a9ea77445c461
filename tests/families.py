"""The supported families as the tests meet them: every variant of tests/tiny_models.py that can be cut."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from compressor.architectures.base import Architecture, Mixer
from compressor.architectures.registry import find_architecture
from compressor.artifacts import Selection
from compressor.checkpoint.config_file import CONFIG_FILE, read_config
from compressor.loading import load_model
from tests.tiny_models import VARIANTS, save_tiny

UNSUPPORTED = {"gated_deltaproduct", "qn", "nh", "m2"}
SUPPORTED_VARIANTS = tuple(name for name in VARIANTS if name not in UNSUPPORTED)


@dataclass(frozen=True)
class TinyCheckpoint:
    """A tiny checkpoint on disk with its adapter and the stock model, float32 on the CPU."""

    folder: Path
    raw_config: Mapping[str, Any]
    architecture: Architecture
    config: PretrainedConfig
    model: PreTrainedModel
    mixers: tuple[Mixer, ...]


def tiny_checkpoint(name: str, folder: Path, dtype: torch.dtype = torch.float32) -> TinyCheckpoint:
    save_tiny(name, folder, dtype)
    return open_tiny(folder)


def open_tiny(folder: Path) -> TinyCheckpoint:
    raw_config = read_config(folder / CONFIG_FILE)
    architecture = find_architecture(raw_config["model_type"])
    model = load_model(architecture, folder, raw_config, torch.float32, torch.device("cpu"))
    config = architecture.load_config(folder)
    return TinyCheckpoint(
        folder, raw_config, architecture, config, model, architecture.mixers(config, list(model.state_dict()))
    )


def random_selection(mixers: tuple[Mixer, ...], keep: int, seed: int = 0) -> Selection:
    """Other channels for every head, so that a mix-up of heads or of layers cannot pass."""
    generator = torch.Generator().manual_seed(seed)
    kept = {}
    for mixer in mixers:
        order = torch.rand(mixer.num_k_heads, mixer.head_k_dim, generator=generator).argsort(-1)
        kept[mixer.layer] = order[:, :keep].sort(-1).values
    return Selection(mixers[0].head_k_dim, kept)


def tiny_tokens(length: int = 100, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 64, (length,), generator=torch.Generator().manual_seed(seed))
