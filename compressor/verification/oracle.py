"""Child process: the compressed model against the original with the dropped channels zeroed.

Of a trained model, whose logits are others, only the tensors that training left alone are compared.

The reference backend runs both in float32 on the CPU, one after the other, so that no more than one
is in memory; the last line printed is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from compressor.architectures.base import Architecture
from compressor.architectures.masking import MaskedChannels
from compressor.architectures.registry import architecture_of
from compressor.artifacts import Selection
from compressor.checkpoint.config_file import CONFIG_FILE, read_config
from compressor.checkpoint.headers import read_headers, read_tensor
from compressor.evaluation.language_modelling import next_token_logits
from compressor.loading import load_model
from compressor.verification.changed import refitted_tensors, trained_tensors
from compressor.verification.slices import first_difference
from compressor.verification.stock_load import generation_facts

CPU = torch.device("cpu")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--original", type=Path, help="left out: only the compressed model runs")
    parser.add_argument("--tokens", type=Path, required=True, help="JSON list of token ids")
    parser.add_argument("--refitted", action="store_true", help="the output projections are the folder's own")
    parser.add_argument("--trained", action="store_true", help="so are the tensors that training changes")
    parser.add_argument("--targets", nargs="+", help="last names of the modules that got an adapter; left out: all")
    parser.add_argument("--scaled", action="store_true", help="the exported norm epsilon was multiplied by d_k / k")
    arguments = parser.parse_args()
    tokens = torch.tensor(json.loads(arguments.tokens.read_text()), dtype=torch.int64)
    raw_config = read_config(arguments.folder / CONFIG_FILE)
    architecture = architecture_of(raw_config)
    expected = difference = error = None
    if arguments.original is not None:
        selection = Selection.from_json(json.loads((arguments.folder / "selection.json").read_text()))
        own = refitted_tensors(architecture, arguments.folder) if arguments.refitted else frozenset()
        if arguments.trained:
            own |= trained_tensors(architecture, arguments.folder, arguments.targets)
        else:
            original_config = read_config(arguments.original / CONFIG_FILE)
            original = load_model(architecture, arguments.original, original_config, torch.float32, CPU)
            if arguments.refitted:
                take_output_projections(architecture, original, arguments.folder)
            expected = masked_logits(architecture, original, selection, arguments.scaled, tokens)
            del original
        difference = first_difference(architecture, arguments.original, arguments.folder, selection, own)
    compressed = load_model(architecture, arguments.folder, raw_config, torch.float32, CPU)
    if expected is not None:
        error = relative_error(next_token_logits(compressed, tokens), expected)
    facts = {"relative_error": error, "first_difference": difference, **generation_facts(compressed, tokens[:16])}
    print(json.dumps(facts))


def take_output_projections(architecture: Architecture, original: PreTrainedModel, folder: Path) -> None:
    """Give the original the output projections of `folder`, which no channel passes through."""
    entries = read_headers(folder).entries
    for mixer in architecture.mixers(original.config, list(entries)):
        name = architecture.output_projection_tensor(mixer)
        weight = original.get_submodule(architecture.output_projection(mixer)).get_parameter("weight")
        with torch.no_grad():
            weight.copy_(read_tensor(entries[name]))


def masked_logits(
    architecture: Architecture, original: PreTrainedModel, selection: Selection, scaled: bool, tokens: Tensor
) -> Tensor:
    """Logits [T - 1, vocabulary] that an exact cut must give; `scaled` as in the exported config.

    A scaled epsilon also reaches the norms that share its field. They get it here too, so that what
    remains is the cut; that they barely move is what the norm check of calibration refuses otherwise.
    """
    output_scale = architecture.output_scale(selection.head_k_dim, selection.width)
    tap = MaskedChannels(selection.kept, selection.head_k_dim, 1.0 if scaled else output_scale)
    mixers = architecture.mixers(original.config, list(original.state_dict()))
    shared = architecture.norm_epsilon(original.config) * output_scale**2
    norms = _shared_norm_epsilon(architecture, original, shared) if scaled else nullcontext()
    with norms, architecture.tapped(original, mixers, tap):
        return next_token_logits(original, tokens)


@contextmanager
def _shared_norm_epsilon(architecture: Architecture, model: PreTrainedModel, epsilon: float) -> Iterator[None]:
    norms = architecture.norms_sharing_epsilon(model).values()
    before = [norm.eps for norm in norms]
    try:
        for norm in norms:
            norm.eps = epsilon  # type: ignore[assignment]
        yield
    finally:
        for norm, value in zip(norms, before, strict=True):
            norm.eps = value


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """||actual - expected|| / ||expected|| in float64; infinite when either is not finite."""
    difference = float((actual.double() - expected.double()).norm() / expected.double().norm())
    return difference if math.isfinite(difference) else math.inf


if __name__ == "__main__":
    main()
