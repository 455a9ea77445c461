"""`compress inspect`: what a model has to cut, which widths are allowed, what engines make of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rich.table import Table

from compressor.architectures.engines import EngineAnswer, Verdict, engine_answers
from compressor.errors import RequestError
from compressor.preparation import (
    ConfiguredModel,
    convolution_state_bytes,
    open_model,
    open_source,
    state_bytes,
)

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
class WidthSummary:
    """One kept width: state bytes of a sequence, and each engine's answer."""

    keep: int
    state_bytes: int
    engines: tuple[EngineAnswer, ...]


@dataclass(frozen=True)
class Inspection:
    model: str
    model_type: str
    architecture: str
    num_layers: int
    layers: tuple[LayerSummary, ...]
    state_bytes_per_sequence: int
    convolution_state_bytes_per_sequence: int
    norm_epsilon: float
    refused_widths: tuple[int, ...]
    widths: tuple[WidthSummary, ...]
    notes: tuple[str, ...]


def inspect_model(model: str | None, revision: str | None = None) -> Inspection:
    """Read the config of `model` (a folder or Hub id; None is the bundled one), and a local folder's headers.

    Weights of a Hub model are not downloaded for it.

    Raises:
        RequestError: as for a run of `compress`.
    """
    configured = open_model(model, revision)
    local = configured.folder.revision is None
    notes = open_source(configured).checkpoint.notes if local else ("the weights were not looked at",)
    mixers, architecture = configured.mixers, configured.architecture
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
        state_bytes_per_sequence=state_bytes(mixers, first.head_k_dim).before,
        convolution_state_bytes_per_sequence=convolution_state_bytes(
            mixers, configured.raw_config, first.head_k_dim
        ).before,
        norm_epsilon=architecture.norm_epsilon(configured.config),
        refused_widths=refused,
        widths=tuple(_width(configured, keep) for keep in _listed_widths(first.head_k_dim) if keep not in refused),
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
    states = Table("kept width", "state bytes of a sequence")
    for width in inspection.widths:
        states.add_row(str(width.keep), f"{width.state_bytes:,}")
    engines = Table("engine", *(str(width.keep) for width in inspection.widths))
    for position, engine in enumerate(inspection.widths[0].engines):
        engines.add_row(engine.engine, *(_SHORT[width.engines[position].verdict] for width in inspection.widths))
    refused = ", ".join(map(str, inspection.refused_widths)) or "none"
    footnotes = [f"{answer.engine}: {answer.note} ({answer.evidence})" for answer in inspection.widths[0].engines]
    return ["\n".join(lines), layers, states, engines, f"widths that the config cannot express: {refused}", *footnotes]


def _listed_widths(head_k_dim: int) -> list[int]:
    """The present width and the multiples of an eighth of it below."""
    step = max(1, head_k_dim // 8)
    return list(range(head_k_dim, 0, -step))


def _width(configured: ConfiguredModel, keep: int) -> WidthSummary:
    answers = engine_answers(configured.architecture.needs_fla, keep, configured.mixers[0].head_v_dim)
    return WidthSummary(keep, state_bytes(configured.mixers, keep).after, answers)


def _expressible(configured: ConfiguredModel, keep: int) -> bool:
    try:
        configured.architecture.cut_config(configured.raw_config, configured.config, keep, None)
    except RequestError:
        return False
    return True
