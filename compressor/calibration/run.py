"""One pass over the calibration tokens: statistics of every head, resumable between batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from transformers import PreTrainedModel

from compressor.architectures.base import Architecture, Mixer
from compressor.artifacts import CalibrationProgress, CalibrationStatistics
from compressor.calibration.statistics import GramAccumulator
from compressor.calibration.tokens import TokenBatch


def calibrate(
    architecture: Architecture,
    model: PreTrainedModel,
    mixers: Sequence[Mixer],
    batches: Sequence[TokenBatch],
    start: CalibrationProgress | None,
    on_batch: Callable[[CalibrationProgress, int], None],
) -> CalibrationStatistics:
    """Run the decoder over `batches` and sum the Gram matrices of keys and queries.

    The language-model head is not run. `start` continues an interrupted pass with the batches it
    has not seen; sums are taken in batch order, so the result is the same to the bit. `on_batch`
    gets the sums so far and the number of tokens of the batch just done.

    Raises:
        RunError: a mixer was not captured, or activations are NaN or infinite (layer and head named).
    """
    device = model.device
    accumulator = GramAccumulator(mixers, device)
    done = 0
    if start is not None:
        accumulator.grams.copy_(start.grams)
        accumulator.tokens.copy_(start.tokens)
        done = start.batches
    decoder = architecture.decoder(model)
    expected = sum(batch.num_tokens for batch in batches[:done])
    with torch.inference_mode(), architecture.tapped(model, mixers, accumulator):
        for batch in batches[done:]:
            mask = None if batch.attention_mask is None else batch.attention_mask.to(device)
            accumulator.begin_batch(mask)
            decoder(input_ids=batch.input_ids.to(device), attention_mask=mask, use_cache=False)
            expected += batch.num_tokens
            accumulator.end_batch(expected)
            done += 1
            on_batch(CalibrationProgress(done, accumulator.grams, accumulator.tokens), batch.num_tokens)
    grams = accumulator.grams.cpu()
    return CalibrationStatistics(
        layers=tuple(mixer.layer for mixer in mixers), gram_q=grams[0], gram_k=grams[1], tokens=expected
    )
