"""The supported families as the tests meet them: every variant of tests/tiny_models.py that can be cut."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from compressor.architectures.base import Architecture, Mixer
from compressor.architectures.registry import architecture_of
from compressor.artifacts import Selection
from compressor.checkpoint.config_file import CONFIG_FILE, read_config
from compressor.checkpoint.headers import read_headers
from compressor.loading import load_model
from tests.tiny_models import VARIANTS, save_tiny

MAMBA2_HYBRIDS = ("bamba", "granite", "nh", "falcon_h1", "zamba2")
"""Their mixers are Mamba-2's. They have tests of their own, tests/architectures/test_mamba2_hybrid*.py."""
SUPPORTED_VARIANTS = tuple(name for name in VARIANTS if name not in MAMBA2_HYBRIDS)
WITHOUT_SCALE = tuple(name for name in SUPPORTED_VARIANTS if name.startswith("m2"))
"""Their scores are not scaled by the key width, so a cut leaves the norm epsilon alone."""
FIXED_NORM_EPSILON = tuple(name for name in SUPPORTED_VARIANTS if name.startswith("oh"))
"""Their output norm takes its epsilon from no config."""
NORM_EPSILONS = tuple(
    (name, policy)
    for name in SUPPORTED_VARIANTS
    for policy in ("keep", "scaled")
    if policy == "keep" or name not in WITHOUT_SCALE + FIXED_NORM_EPSILON
)
"""Every variant with each norm epsilon that its cut may be exported with."""


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
    architecture = architecture_of(raw_config)
    model = load_model(architecture, folder, raw_config, torch.float32, torch.device("cpu"))
    config = architecture.load_config(folder)
    return TinyCheckpoint(
        folder, raw_config, architecture, config, model, architecture.mixers(config, list(read_headers(folder).entries))
    )


def in_float64(model: PreTrainedModel) -> PreTrainedModel:
    """`model` itself; its experts are computed one by one, since torch's grouped product takes no float64."""
    if any(path.endswith(".experts") for path, _ in model.named_modules()):
        model.set_experts_implementation("eager")
    return model.double()


def parameter_of_files(model: PreTrainedModel, name: str) -> torch.Tensor:
    """What `model` holds of the files' tensor `name`.

    Experts, and the convolutions of Olmo-Hybrid, stand apart in published files and together in the model.
    """
    whole = model.state_dict()
    name = name.replace(".attention_layer_norm.", ".input_layernorm.")
    name = name.replace(".feedforward_layer_norm.", ".post_attention_layernorm.")
    convolution = re.fullmatch(r"(.*\.)([qkv])_conv1d\.weight", name)
    if convolution is not None and name not in whole:
        block, letter = convolution.groups()
        return whole[f"{block}conv1d.weight"].chunk(3)["qkv".index(letter)]
    expert = re.fullmatch(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight", name)
    if name in whole or expert is None:
        return whole[name]
    experts, number, kind = expert.groups()
    if kind == "down":
        return whole[f"{experts}.down_proj"][int(number)]
    gate, up = whole[f"{experts}.gate_up_proj"][int(number)].chunk(2)
    return gate if kind == "gate" else up


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
