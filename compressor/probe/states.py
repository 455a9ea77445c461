"""The states of a model along texts: spectra of every head at every boundary, with nothing else kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from compressor.architectures.base import Architecture, Mixer
from compressor.architectures.decay import decays_seen
from compressor.architectures.recurrent_state import StateLayout, state_layout
from compressor.errors import RunError
from compressor.evaluation.forward import TokenFigures
from compressor.probe.keys import KeyFigures, KeyStatistics
from compressor.probe.segments import Boundary, read_in_segments, segments_of
from compressor.probe.spectra import FIGURES, Spectrum, spectrum


@dataclass(frozen=True, slots=True, eq=False)
class Probed:
    """A loaded model with its adapter, the mixers that are looked at, and how it holds their states."""

    model: PreTrainedModel
    architecture: Architecture
    mixers: tuple[Mixer, ...]
    model_type: str

    @property
    def layout(self) -> StateLayout:
        return state_layout(self.model_type)

    @property
    def heads(self) -> tuple[tuple[int, int], ...]:
        """(layer, value head) of every state, in the order of all figures."""
        return tuple((mixer.layer, head) for mixer in self.mixers for head in range(mixer.num_v_heads))


@dataclass(frozen=True, slots=True, eq=False)
class StateFigures:
    """Spectra of all heads.

    Attributes:
        tokens: of the boundaries, ascending.
        along: float64 [documents, boundaries, heads, len(FIGURES)]; NaN behind the end of a document.
        end: float64 [documents, heads, len(FIGURES)], at the end of each document.
        singular_values: of each head [n] at the ends, over the largest one, mean over documents.
        keys: of each head.
        losses: of the same texts, read on the way.
    """

    tokens: tuple[int, ...]
    along: Tensor
    end: Tensor
    singular_values: tuple[Tensor, ...]
    keys: KeyFigures
    losses: tuple[TokenFigures, ...]


def measure_states(
    probed: Probed,
    documents: Sequence[Tensor],
    every: int,
    batch_size: int,
    on_tokens: Callable[[int], None],
) -> StateFigures:
    """Spectra after every `every` tokens of `documents` (int64 [T], T >= 2 and a multiple of `every`).

    With `every` 1 the last token is not read: no loss is taken behind it.

    Raises:
        RunError: a state or a loss is NaN or infinite.
    """
    boundaries = max(segments_of(len(document), every) for document in documents)
    heads = len(probed.heads)
    along = torch.full((len(documents), boundaries, heads, len(FIGURES)), torch.nan, dtype=torch.float64)
    end = torch.zeros(len(documents), heads, len(FIGURES), dtype=torch.float64)
    shapes = [torch.zeros(mixer.num_v_heads, min(mixer.head_v_dim, mixer.head_k_dim)) for mixer in probed.mixers]
    sums = [shape.double() for shape in shapes]
    keys = KeyStatistics(probed.mixers)

    def on_boundary(boundary: Boundary) -> None:
        rows = list(boundary.rows)
        spectra = [_spectrum(probed, mixer, boundary) for mixer in probed.mixers]
        figures = torch.cat([each.figures for each in spectra], dim=1)
        along[rows, boundary.read // every - 1] = figures
        if boundary.last:
            end[rows] = figures
            for total, each in zip(sums, spectra, strict=True):
                values = each.singular_values
                total += (values / values[..., :1].clamp(min=torch.finfo(values.dtype).tiny)).sum(0)
            keys.end_documents()

    with (
        probed.architecture.tapped(probed.model, probed.mixers, keys),
        decays_seen(probed.model, probed.mixers, probed.model_type, keys.on_log_decay),
    ):
        losses = read_in_segments(probed.model, documents, every, batch_size, on_boundary, on_tokens)
    return StateFigures(
        tokens=tuple(every * (number + 1) for number in range(boundaries)),
        along=along,
        end=end,
        singular_values=tuple(head / len(documents) for total in sums for head in total),
        keys=keys.figures(),
        losses=tuple(losses),
    )


def _spectrum(probed: Probed, mixer: Mixer, boundary: Boundary) -> Spectrum:
    """Of one mixer's states [B, H_v, d_v, d_k], on the CPU."""
    state = probed.layout.read(boundary.cache, mixer)
    if not bool(state.isfinite().all()):
        raise RunError(
            f"layer {mixer.layer} has a state that is NaN or infinite after {boundary.read:,} tokens; check the "
            "weights, or run in float32."
        )
    measured = spectrum(state)
    return Spectrum(measured.singular_values.cpu(), measured.figures.cpu())
