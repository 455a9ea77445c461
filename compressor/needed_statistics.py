"""What a run's method needs of calibration beside the Gram matrices; the stage `gradients`, of backward passes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from compressor.architectures.projections import projections
from compressor.artifacts import CalibrationStatistics
from compressor.calibration.tokens import TokenBatch
from compressor.data_parallel import Processes
from compressor.errors import RequestError
from compressor.fisher.memory import Sizes, fitting_checkpointing, free_bytes, sequences_at_once
from compressor.fisher.settings import FisherSettings
from compressor.launched import launch
from compressor.planning import RunOptions, RunPlan
from compressor.preparation import Source
from compressor.progress import StageReporter
from compressor.selection.registry import get_selector_entry
from compressor.selection.request import Statistic
from compressor.sensitivity.gradients import gradient_scores, loss_gradients
from compressor.sensitivity.memory import BackwardPass, available_bytes, refuse_beyond


def needed_statistics(plan: RunPlan) -> frozenset[Statistic]:
    """What the method, or any that it tries, reads of each channel."""
    return frozenset[Statistic]().union(*(get_selector_entry(method).needs for method in plan.methods))


def refuse_beyond_memory(plan: RunPlan, method: str, options: RunOptions) -> None:
    """Before anything is loaded; nothing where the method needs no backward passes, as where their sums are handed in.

    Raises:
        RequestError: the backward passes need more memory than the device has.
    """
    request, entry = plan.recipe.calibration, get_selector_entry(method)
    if "gradient" in entry.needs and options.statistics is None:
        sequences = min(request.batch_size, request.samples)
        need = backward_pass(plan.source, sequences * request.sequence_length, plan.dtype.itemsize)
        refuse_beyond(need, available_bytes(plan.device), plan.device, options.name)
    if entry.needs_model:
        free = free_bytes(plan.device)
        weights = plan.cut.parameters.before * plan.dtype.itemsize
        left = None if free is None else max(free - weights, 0)
        sizes = _fisher_sizes(plan, fisher_batch(plan, request.samples, launch().count))
        fitting_checkpointing(sizes, FisherSettings(), left, plan.device, options.name)


def fisher_batch(plan: RunPlan, sequences: int, processes: int) -> int:
    """Sequences that Fisher selection runs at once, where the `processes` share so many of the calibration."""
    request = plan.recipe.calibration
    return sequences_at_once(request.batch_size, sequences // processes, request.sequence_length, plan.device)


def within_memory(plan: RunPlan, options: RunOptions, processes: Processes) -> RunPlan:
    """The plan, before anything is loaded, without those of several methods whose backward passes do not fit.

    All processes leave out the same ones, and say why in the notes.

    Raises:
        FailedElsewhereError: another process failed.
        RequestError: the one method does not fit.
    """
    methods = plan.methods
    if len(methods) == 1:
        refuse_beyond_memory(plan, methods[0], options)
        return plan
    refusals: dict[str, str] = {}
    for method in methods:
        try:
            refuse_beyond_memory(plan, method, options)
        except RequestError as refusal:
            refusals[method] = str(refusal)
    refused = processes.summed(_Refused(torch.tensor([method in refusals for method in methods], dtype=torch.int64)))
    left_out = tuple(method for method, count in zip(methods, refused.processes.tolist(), strict=True) if count)
    elsewhere = "another process has too little memory for it."
    notes = [f"the method {method} was not tried: {refusals.get(method, elsewhere)}" for method in left_out]
    return replace(plan, left_out=left_out, notes=(*plan.notes, *notes))


@dataclass(frozen=True, slots=True, eq=False)
class _Refused:
    """How many processes cannot try each method, int64 [methods]."""

    processes: Tensor


def _fisher_sizes(plan: RunPlan, sequences: int) -> Sizes:
    config, first = plan.source.config.get_text_config(decoder=True), plan.source.mixers[0]
    return Sizes(
        mixers=len(plan.source.mixers),
        heads=first.num_k_heads,
        width=first.head_k_dim,
        layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        vocabulary=config.vocab_size,
        batch=sequences,
        tokens=plan.recipe.calibration.sequence_length,
        element_size=plan.dtype.itemsize,
    )


def with_gradients(
    plan: RunPlan,
    model: PreTrainedModel,
    batches: Sequence[TokenBatch],
    statistics: CalibrationStatistics,
    processes: Processes,
    reporter: StageReporter,
) -> CalibrationStatistics:
    """The statistics with gradients, which only some methods need.

    The processes share the batches.

    Raises:
        FailedElsewhereError: another process failed.
        RunError: a gradient is NaN or infinite (layer and head named).
    """
    own, architecture, mixers = processes.share(batches), plan.source.architecture, plan.source.mixers
    with reporter.stage("gradients", sum(batch.num_tokens for batch in own)) as advance:
        gradients = processes.summed(loss_gradients(architecture, model, mixers, own, advance))
        scores = gradient_scores(architecture, model, mixers, gradients)
    return replace(statistics, gradient_q=scores[0], gradient_k=scores[1])


def backward_pass(source: Source, tokens: int, element_bytes: int) -> BackwardPass:
    """The sizes of a backward pass over `tokens` tokens at once through a model in a dtype of `element_bytes`."""
    shapes, architecture = source.shapes, source.architecture
    config = source.config.get_text_config(decoder=True)
    differentiated = {p.tensor for mixer in source.mixers for p in projections(architecture, mixer)}
    return BackwardPass(
        tokens=tokens,
        element_bytes=element_bytes,
        parameters=sum(math.prod(shape) for shape in shapes.values()),
        differentiated=sum(math.prod(shapes[name]) for name in differentiated),
        layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        layer_width=max(_layer_width(source, mixer.tensors.rpartition(".")[0]) for mixer in source.mixers),
        state_elements=max(mixer.state_elements for mixer in source.mixers),
        vocabulary=config.vocab_size,
    )


def _layer_width(source: Source, block: str) -> int:
    """Inputs and outputs of the linear modules below `block`."""
    return sum(sum(shape) for name, shape in source.shapes.items() if name.startswith(f"{block}.") and len(shape) == 2)
