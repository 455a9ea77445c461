"""The closed-form refit of a cut that is masked in memory, and what undoes it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.cuts import Bench
from benchmarks.selector_measures import Questions
from compressor.calibration.tokens import TokenBatch, batches
from compressor.evaluation.forward import forward_tokens
from compressor.recovery.refit import Refit, RefitPair, refit
from compressor.refitting import divide_tokens


@dataclass(frozen=True, slots=True, eq=False)
class RefitSequences:
    """Calibration sequences, divided: batches to fit, and sequences that choose the ridge."""

    fit: Sequence[TokenBatch]
    held_out: Sequence[Tensor]
    batch_size: int


def refit_sequences(sequences: Sequence[Tensor], retrieval_share: float, batch_size: int) -> RefitSequences:
    divided = divide_tokens(sequences, retrieval_share)
    return RefitSequences(list(batches(divided.fit, batch_size)), divided.held_out, batch_size)


@contextmanager
def projections_put_back(bench: Bench) -> Iterator[None]:
    """Inside, the output projections of `bench.cut` may be changed; behind, they are the original's to the bit."""
    paths = [bench.source.architecture.output_projection(mixer) for mixer in bench.source.mixers]
    try:
        yield
    finally:
        for path in paths:
            bench.cut.get_submodule(path).load_state_dict(bench.original.get_submodule(path).state_dict())


def refitted(asked: Questions, sequences: RefitSequences) -> Refit:
    """Refit `bench.cut` as it is masked; weights are rounded to the dtypes of the files, as those written."""
    bench = asked.bench
    architecture, entries = bench.source.architecture, bench.source.checkpoint.index.entries
    names = [architecture.output_projection_tensor(mixer) for mixer in bench.source.mixers]
    dtypes = {name: entries[name].torch_dtype for name in names}
    pair = RefitPair(architecture, bench.original, bench.cut, bench.source.mixers, dtypes)

    def divergence(model: nn.Module) -> float:
        found = forward_tokens(bench.cut, sequences.held_out, sequences.batch_size, asked.original)
        values = torch.cat([figures.kl for figures in found if figures.kl is not None])
        return float(values.double().mean())

    held_out = list(batches(sequences.held_out, sequences.batch_size))
    return refit(pair, sequences.fit, held_out, divergence, lambda layer_tokens: None)
