"""Everything that can be known, and refused, before calibration."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from compressor.architectures.base import Architecture, Mixer
from compressor.architectures.config_fields import refuse_fields, refuse_impossible_config
from compressor.architectures.engines import engine_warnings
from compressor.architectures.family import family_of
from compressor.architectures.registry import architecture_of
from compressor.artifacts import Selection
from compressor.checkpoint.checkpoint import Checkpoint, open_checkpoint, open_config
from compressor.checkpoint.config_file import decoder_config
from compressor.checkpoint.source import ModelFolder, fetch_weights, resolve_model
from compressor.checkpoint.validation import compare_with_skeleton
from compressor.demo import demo_model_path
from compressor.errors import RequestError
from compressor.export.sizes import parse_size
from compressor.loading import build_skeleton, refused_by_stock_classes
from compressor.naming import Naming, option_of
from compressor.recipe import Recipe, SelectionSection
from compressor.recipe_checks import refuse_revision_without_model
from compressor.report import BeforeAfter
from compressor.surgery import TensorCut, plan_cuts, present_maps, refuse_other_layouts
from compressor.width import kept_width, width_within

STATE_ELEMENT_BYTES = 4
"""fla and vLLM keep the recurrent state in float32."""
DEMO_NAME = "gdn-tiny"
"""What reports call the bundled model."""
_ELEMENT_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class Source:
    """A model folder with its adapter; headers validated against the stock class."""

    checkpoint: Checkpoint
    architecture: Architecture
    config: PretrainedConfig
    mixers: tuple[Mixer, ...]

    @property
    def folder(self) -> Path:
        return self.checkpoint.folder.path

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: entry.shape for name, entry in self.checkpoint.index.entries.items()}


@dataclass(frozen=True)
class CutPlan:
    """The widths, sizes and config of a cut, before any channel is chosen."""

    keep: int
    ratio: float
    cut_config: Mapping[str, Any]
    norm_epsilon: tuple[float, float]
    key_dim: BeforeAfter
    state_bytes: BeforeAfter
    convolution_state_bytes: BeforeAfter
    parameters: BeforeAfter
    output_bytes: int
    engine_warnings: tuple[str, ...]


@dataclass(frozen=True)
class ConfiguredModel:
    """A model folder whose config, but not yet its weights, is known to be supported."""

    folder: ModelFolder
    raw_config: Mapping[str, Any]
    architecture: Architecture
    config: PretrainedConfig
    mixers: tuple[Mixer, ...]


def open_model(model: str | None, revision: str | None) -> ConfiguredModel:
    """Resolve a model and read its config: nothing large is downloaded or read.

    Raises:
        RequestError: no such model, an unknown family, or no linear-attention layer.
    """
    refuse_revision_without_model(model, revision, option_of)
    folder = _demo_folder() if model is None else resolve_model(model, revision)
    raw_config = open_config(folder)
    refuse_impossible_config(raw_config)
    architecture = architecture_of(raw_config)
    with refused_by_stock_classes(folder.path):
        config = architecture.load_config(folder.path)
        refuse_fields(config, architecture.field_rules(config))
        mixers = architecture.mixers(config, ())
        norm_epsilon = architecture.norm_epsilon(config)
    if not 0 <= norm_epsilon < 1:
        raise RequestError(
            f"config.json has a norm epsilon of {norm_epsilon}; it must be a small number of at least 0."
        )
    if not mixers:
        raise RequestError(
            f"this {raw_config['model_type']} checkpoint has no linear-attention layer: nothing to prune."
        )
    return ConfiguredModel(folder, raw_config, architecture, config, mixers)


def _demo_folder() -> ModelFolder:
    return ModelFolder(demo_model_path(), DEMO_NAME, None)


def open_source(configured: ConfiguredModel) -> Source:
    """Fetch the weights and check every tensor's name and shape from the file headers alone.

    Raises:
        RequestError: broken, quantised, pickled or mismatching weights.
    """
    fetch_weights(configured.folder)
    checkpoint = open_checkpoint(configured.folder)
    architecture = configured.architecture
    names = list(checkpoint.index.entries)
    architecture.refuse_unsupported(configured.config, names)
    mixers = architecture.mixers(configured.config, names)
    _refuse_absent_layers(architecture, mixers, checkpoint)
    with refused_by_stock_classes(checkpoint.folder.path):
        skeleton = build_skeleton(architecture, checkpoint.folder.path, dict(configured.raw_config))
    compare_with_skeleton(checkpoint.index, skeleton)
    refuse_other_layouts(architecture, mixers, {name: entry.shape for name, entry in checkpoint.index.entries.items()})
    return Source(checkpoint, architecture, configured.config, mixers)


def _refuse_absent_layers(architecture: Architecture, mixers: tuple[Mixer, ...], checkpoint: Checkpoint) -> None:
    """Before the stock model is built: a config may speak of many thousands of layers."""
    for mixer in mixers:
        if not present_maps(architecture, mixer, checkpoint.index.entries):
            raise RequestError(
                f"config.json says that layer {mixer.layer} is a linear-attention layer, and the weight files have no "
                f"tensor {architecture.channel_maps(mixer)[0].tensor}; use weights and config of one model."
            )


def choose_width(configured: ConfiguredModel, selection: SelectionSection, name: Naming = option_of) -> int:
    """The kept width, refused now if the config cannot express it. Messages call a setting `name(setting)`.

    Raises:
        RequestError: see `kept_width`, `width_within` and the adapter's `cut_config`.
    """
    mixers = configured.mixers
    head_k_dim = mixers[0].head_k_dim
    if selection.target_state_bytes is not None:
        channel_bytes, target = state_bytes(mixers, 1).after, parse_size(selection.target_state_bytes)
        keep = width_within(head_k_dim, channel_bytes, target, selection.round_to, name)
    else:
        keep = kept_width(head_k_dim, selection.ratio, selection.target_dim, selection.round_to, name)
    configured.architecture.cut_config(configured.raw_config, configured.config, keep, None)
    return keep


def plan_cut(source: Source, recipe: Recipe, keep: int, name: Naming = option_of) -> CutPlan:
    """Sizes before and after, from headers; the choice of channels does not change them.

    Where the recipe leaves the norm epsilon to be chosen, the plan is the one that keeps it. Messages call a setting
    `name(setting)`.

    Raises:
        RequestError: a scaled norm epsilon is asked for in a family that has no scale to undo, or whose norm has
            a fixed epsilon.
    """
    first = source.mixers[0]
    before_epsilon = source.architecture.norm_epsilon(source.config)
    scaled = recipe.selection.norm_epsilon == "scaled"
    if scaled and not source.architecture.scales_by_width:
        given, remedy = (name("selection.norm_epsilon", value) for value in ("scaled", "keep"))
        raise RequestError(
            f"{given} undoes what a cut does to the scale of the scores, and {source.architecture.display_name} has no "
            f"such scale: use {remedy}, which is exact."
        )
    after_epsilon = before_epsilon * first.head_k_dim / keep if scaled else before_epsilon
    if scaled and not source.architecture.norm_epsilon_in_config:
        given, remedy = (name("selection.norm_epsilon", value) for value in ("scaled", "keep"))
        raise RequestError(
            f"{given} would write {after_epsilon:g}, and the output norm of {source.architecture.display_name} takes "
            f"{before_epsilon:g} whatever config.json says; use {remedy}."
        )
    cut_config = source.architecture.cut_config(
        source.checkpoint.raw_config, source.config, keep, after_epsilon if scaled else None
    )
    parameters, output_bytes = _sizes_after(source, keep)
    return CutPlan(
        keep=keep,
        ratio=1 - keep / first.head_k_dim,
        cut_config=cut_config,
        norm_epsilon=(before_epsilon, after_epsilon),
        key_dim=BeforeAfter(first.head_k_dim, keep),
        state_bytes=state_bytes(source.mixers, keep),
        convolution_state_bytes=convolution_state_bytes(source.mixers, source.checkpoint.raw_config, keep),
        parameters=BeforeAfter(sum(math.prod(shape) for shape in source.shapes.values()), parameters),
        output_bytes=output_bytes,
        engine_warnings=engine_warnings(family_of(source.checkpoint.raw_config), first, keep),
    )


def state_bytes(mixers: tuple[Mixer, ...], keep: int) -> BeforeAfter:
    """Bytes of the recurrent state of one sequence, in float32."""
    before = sum(mixer.state_elements for mixer in mixers) * STATE_ELEMENT_BYTES
    after = sum(mixer.num_v_heads * mixer.head_v_dim * keep for mixer in mixers) * STATE_ELEMENT_BYTES
    return BeforeAfter(before, after)


def convolution_state_bytes(mixers: tuple[Mixer, ...], raw_config: Mapping[str, Any], keep: int) -> BeforeAfter:
    """Bytes of the convolution states of one sequence, in the dtype that the config names (float32 if none)."""
    before = after = 0
    for mixer in mixers:
        element = _config_element_bytes(raw_config) * mixer.convolution_size
        convolved = (1 + mixer.keys_per_token) * mixer.num_k_heads  # of a query and of all keys of a token
        dropped = convolved * (mixer.head_k_dim - keep) if mixer.convolution_width else 0
        before += mixer.convolution_width * element
        after += (mixer.convolution_width - dropped) * element
    return BeforeAfter(before, after)


def _config_element_bytes(raw_config: Mapping[str, Any]) -> int:
    decoder = decoder_config(dict(raw_config))
    named = (config.get(field) for config in (raw_config, decoder) for field in ("dtype", "torch_dtype"))
    return next((_ELEMENT_BYTES[name] for name in named if name in _ELEMENT_BYTES), 4)


def cuts_to_width(source: Source, keep: int) -> dict[str, TensorCut]:
    """The cuts to the first `keep` channels of every head: tensors and shapes are those of any others."""
    kept = {mixer.layer: torch.arange(keep).expand(mixer.num_k_heads, keep) for mixer in source.mixers}
    return plan_cuts(source.architecture, source.mixers, source.shapes, Selection(source.mixers[0].head_k_dim, kept))


def _sizes_after(source: Source, keep: int) -> tuple[int, int]:
    """Parameters and bytes of the output's tensors."""
    cuts = cuts_to_width(source, keep)
    parameters = output_bytes = 0
    for name, entry in source.checkpoint.index.entries.items():
        elements = math.prod(entry.shape)
        remaining = math.prod(cuts[name].shape(entry.shape)) if name in cuts else elements
        parameters += remaining
        output_bytes += entry.nbytes * remaining // elements if elements else 0
    return parameters, output_bytes
