"""One pass over the calibration tokens: statistics of every head, resumable between batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor
from transformers import PreTrainedModel

from compressor.architectures.base import Architecture, Mixer
from compressor.artifacts import CalibrationProgress, CalibrationStatistics
from compressor.calibration.inputs import InputAccumulator
from compressor.calibration.statistics import GramAccumulator
from compressor.calibration.tokens import TokenBatch


def calibrate(
    architecture: Architecture,
    model: PreTrainedModel,
    mixers: Sequence[Mixer],
    batches: Sequence[TokenBatch],
    start: CalibrationProgress | None,
    on_batch: Callable[[CalibrationProgress, int], None],
    *,
    energy: bool = False,
    input_squares: bool = False,
) -> CalibrationStatistics:
    """Run the decoder over `batches` and sum the Gram matrices of keys and queries.

    Where they are asked for, also the energy of keys and queries, and the squares of what their projections read.

    The language-model head is not run. `start` continues an interrupted pass with the batches it
    has not seen; sums are taken in batch order, so the result is the same to the bit. `on_batch`
    gets the sums so far and the number of tokens of the batch just done.

    Raises:
        ValueError: `start` lacks sums that are asked for.
        RunError: a mixer was not captured, or activations are NaN or infinite (layer and head named).
    """
    device = model.device
    moments = GramAccumulator(mixers, device, energy)
    inputs = InputAccumulator(architecture, model, mixers, device) if input_squares else None
    done = 0

    def progress() -> CalibrationProgress:
        squares = None if inputs is None else inputs.squares
        return CalibrationProgress(done, moments.grams, moments.tokens, moments.energies, squares)

    if start is not None:
        _continue(progress().tensors(), start.tensors())
        done = start.batches
    decoder = architecture.decoder(model)
    expected = sum(batch.num_tokens for batch in batches[:done])
    watching = nullcontext() if inputs is None else inputs.watching()
    with torch.inference_mode(), architecture.tapped(model, mixers, moments), watching:
        for batch in batches[done:]:
            mask = None if batch.attention_mask is None else batch.attention_mask.to(device)
            moments.begin_batch(mask)
            if inputs is not None:
                inputs.begin_batch(mask)
            decoder(input_ids=batch.input_ids.to(device), attention_mask=mask, use_cache=False)
            expected += batch.num_tokens
            moments.end_batch(expected)
            if inputs is not None:
                inputs.end_batch(batch.num_tokens)
            done += 1
            on_batch(progress(), batch.num_tokens)
    return statistics_of(progress(), mixers, expected)


def _continue(sums: Mapping[str, Tensor], start: Mapping[str, Tensor]) -> None:
    """Put the sums of an interrupted pass into the new ones."""
    if missing := sums.keys() - start.keys():
        raise ValueError(f"the sums to continue from have no {', '.join(sorted(missing))}.")
    for name, tensor in sums.items():
        tensor.copy_(start[name])


def statistics_of(progress: CalibrationProgress, mixers: Sequence[Mixer], tokens: int) -> CalibrationStatistics:
    """The sums of a whole pass over `tokens` tokens, on the CPU, queries and keys apart."""
    sums = {name: tensor.cpu() for name, tensor in progress.tensors().items()}
    energies, squares = sums.get("energies"), sums.get("input_squares")
    return CalibrationStatistics(
        layers=tuple(mixer.layer for mixer in mixers),
        gram_q=sums["grams"][0],
        gram_k=sums["grams"][1],
        tokens=tokens,
        energy_q=None if energies is None else energies[0],
        energy_k=None if energies is None else energies[1],
        input_squares_q=None if squares is None else squares[0],
        input_squares_k=None if squares is None else squares[1],
    )
