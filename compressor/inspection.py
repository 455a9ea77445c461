"""`compress inspect`: what a model has to cut, which widths are allowed, what engines make of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from compressor.architectures.base import Mixer
from compressor.architectures.engines import EngineAnswer, Verdict, engine_answers
from compressor.architectures.family import family_of
from compressor.errors import RequestError
from compressor.loading import build_skeleton, refused_by_stock_classes
from compressor.preparation import (
    ConfiguredModel,
    convolution_state_bytes,
    open_model,
    open_source,
    state_bytes,
)
from compressor.surgery import present_maps

_SHORT: Mapping[Verdict, str] = {"runs": "yes", "needs a flag": "flag", "refused": "no"}


@dataclass(frozen=True)
class LayerSummary:
    layer: int
    num_k_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int
    state_bytes: int


@dataclass(frozen=True)
class CutTensor:
    """A tensor of every linear-attention layer that a cut makes smaller.

    `name` is its path below the layer's mixer; `slices`, along `dim`, carry the channels of `streams` in one layer.
    """

    name: str
    streams: tuple[str, ...]
    slices: int
    dim: int


@dataclass(frozen=True)
class WidthSummary:
    """One kept width: state bytes of a sequence, and each engine's answer."""

    keep: int
    state_bytes: int
    engines: tuple[EngineAnswer, ...]


@dataclass(frozen=True)
class EngineStep:
    """An engine that takes the multiples of `step` and no other width, up to the present one."""

    engine: str
    step: int


@dataclass(frozen=True)
class Inspection:
    model: str
    model_type: str
    architecture: str
    num_layers: int
    layers: tuple[LayerSummary, ...]
    cut_tensors: tuple[CutTensor, ...]
    cut_fields: tuple[str, ...]
    state_bytes_per_sequence: int
    convolution_state_bytes_per_sequence: int
    norm_epsilon: float
    refused_widths: tuple[int, ...]
    widths: tuple[WidthSummary, ...]
    engine_steps: tuple[EngineStep, ...]
    notes: tuple[str, ...]
    """`cut_fields` of config.json get other values in a cut, those of a nested config after its name and a dot."""


def inspect_model(model: str | None, revision: str | None = None) -> Inspection:
    """Read the config of `model` (a folder or Hub id; None is the bundled one), and a local folder's headers.

    Weights of a Hub model are not downloaded for it.

    Raises:
        RequestError: as for a run of `compress`.
    """
    configured = open_model(model, revision)
    local = configured.folder.revision is None
    notes, names = _local_weights(configured) if local else _stock_weights(configured)
    architecture = configured.architecture
    mixers = architecture.mixers(configured.config, tuple(names))
    first = mixers[0]
    refused = tuple(keep for keep in range(1, first.head_k_dim + 1) if not _expressible(configured, keep))
    return Inspection(
        model=configured.folder.name,
        model_type=configured.raw_config["model_type"],
        architecture=architecture.display_name,
        num_layers=configured.config.get_text_config(decoder=True).num_hidden_layers,
        layers=tuple(
            LayerSummary(
                mixer.layer, mixer.num_k_heads, mixer.num_v_heads, mixer.head_k_dim, mixer.head_v_dim,
                state_bytes((mixer,), mixer.head_k_dim).before,
            )
            for mixer in mixers
        ),
        cut_tensors=_cut_tensors(configured, first, names),
        cut_fields=_cut_fields(configured, [keep for keep in range(1, first.head_k_dim) if keep not in refused]),
        state_bytes_per_sequence=state_bytes(mixers, first.head_k_dim).before,
        convolution_state_bytes_per_sequence=convolution_state_bytes(
            mixers, configured.raw_config, first.head_k_dim
        ).before,
        norm_epsilon=architecture.norm_epsilon(configured.config),
        refused_widths=refused,
        widths=tuple(_width(configured, keep) for keep in _listed_widths(first.head_k_dim) if keep not in refused),
        engine_steps=_engine_steps(configured),
        notes=notes,
    )  # fmt: skip


def inspection_tables(inspection: Inspection) -> list[Table | str]:
    """The inspection for a person: a summary, a table of layers, a table of widths."""
    lines = [
        f"{inspection.model}: {inspection.architecture}, {len(inspection.layers)} linear-attention layers of "
        f"{inspection.num_layers}",
        f"state of a sequence: {inspection.state_bytes_per_sequence:,} bytes in float32, and "
        f"{inspection.convolution_state_bytes_per_sequence:,} bytes of convolution state; "
        f"norm epsilon {inspection.norm_epsilon:g}",
        *inspection.notes,
    ]
    layers = Table("layer", "key heads", "value heads", "key width", "value width", "state bytes")
    for layer in inspection.layers:
        numbers = (layer.layer, layer.num_k_heads, layer.num_v_heads, layer.head_k_dim, layer.head_v_dim)
        layers.add_row(*(str(number) for number in numbers), f"{layer.state_bytes:,}")
    tensors = Table("tensor of each layer", "slices that carry query or key channels", "of")
    for tensor in inspection.cut_tensors:
        tensors.add_row(tensor.name, f"{tensor.slices} along dimension {tensor.dim}", " and ".join(tensor.streams))
    fields = f"config.json: a cut changes {', '.join(inspection.cut_fields)}" if inspection.cut_fields else ""
    states = Table("kept width", "state bytes of a sequence")
    for width in inspection.widths:
        states.add_row(str(width.keep), f"{width.state_bytes:,}")
    engines = Table("engine", *(str(width.keep) for width in inspection.widths))
    for position, engine in enumerate(inspection.widths[0].engines):
        engines.add_row(engine.engine, *(_SHORT[width.engines[position].verdict] for width in inspection.widths))
    refused = ", ".join(map(str, inspection.refused_widths)) or "none"
    footnotes = [f"{answer.engine}: {answer.note} ({answer.evidence})" for answer in inspection.widths[0].engines]
    steps = [f"{each.engine} takes the multiples of {each.step} alone" for each in inspection.engine_steps]
    widths = f"widths that the config cannot express: {refused}"
    return ["\n".join(lines), layers, tensors, fields, states, engines, widths, *steps, *footnotes]


def _local_weights(configured: ConfiguredModel) -> tuple[tuple[str, ...], Collection[str]]:
    checkpoint = open_source(configured).checkpoint
    return tuple(checkpoint.notes), checkpoint.index.entries


def _stock_weights(configured: ConfiguredModel) -> tuple[tuple[str, ...], Collection[str]]:
    """Names as the stock class has them."""
    folder = configured.folder.path
    with refused_by_stock_classes(folder):
        skeleton = build_skeleton(configured.architecture, folder, dict(configured.raw_config))
    return ("the weights were not looked at",), skeleton.state_dict()


def _cut_tensors(configured: ConfiguredModel, mixer: Mixer, names: Collection[str]) -> tuple[CutTensor, ...]:
    cut: dict[str, CutTensor] = {}
    for channel_map in present_maps(configured.architecture, mixer, names):
        name = channel_map.tensor.removeprefix(f"{mixer.tensors}.")
        before = cut.get(name, CutTensor(name, (), 0, channel_map.dim))
        slices = before.slices + channel_map.rows.numel()
        cut[name] = CutTensor(name, (*before.streams, channel_map.stream), slices, channel_map.dim)
    return tuple(cut.values())


def _cut_fields(configured: ConfiguredModel, widths: Sequence[int]) -> tuple[str, ...]:
    if not widths:
        return ()
    raw = configured.raw_config
    cut = configured.architecture.cut_config(raw, configured.config, widths[-1], None)
    return tuple(_changed(raw, cut, ""))


def _changed(before: Mapping[str, Any], after: Mapping[str, Any], prefix: str) -> list[str]:
    found: list[str] = []
    for key, value in after.items():
        old = before.get(key)
        if isinstance(value, Mapping):
            found += _changed(old if isinstance(old, Mapping) else {}, value, f"{prefix}{key}.")
        elif key not in before or old != value:
            found.append(prefix + key)
    return found


def _listed_widths(head_k_dim: int) -> list[int]:
    """The present width and the multiples of an eighth of it below."""
    step = max(1, head_k_dim // 8)
    return list(range(head_k_dim, 0, -step))


def _width(configured: ConfiguredModel, keep: int) -> WidthSummary:
    answers = engine_answers(family_of(configured.raw_config), configured.mixers[0], keep)
    return WidthSummary(keep, state_bytes(configured.mixers, keep).after, answers)


def _engine_steps(configured: ConfiguredModel) -> tuple[EngineStep, ...]:
    """Of the limits that the listed widths, wide apart, do not show."""
    mixer, family = configured.mixers[0], family_of(configured.raw_config)
    taken: dict[str, set[int]] = {}
    for keep in range(1, mixer.head_k_dim + 1):
        for answer in engine_answers(family, mixer, keep):
            taken.setdefault(answer.engine, set()).update([] if answer.verdict == "refused" else [keep])
    steps = {engine: min(widths) for engine, widths in taken.items() if widths}
    return tuple(
        EngineStep(engine, step)
        for engine, step in steps.items()
        if 1 < step <= mixer.head_k_dim // 2 and taken[engine] == set(range(step, mixer.head_k_dim + 1, step))
    )


def _expressible(configured: ConfiguredModel, keep: int) -> bool:
    try:
        configured.architecture.cut_config(configured.raw_config, configured.config, keep, None)
    except RequestError:
        return False
    return True
