"""The choices of channels that a run tries: by each method, and, where it looks at the scale, for each norm epsilon."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from compressor.artifacts import CalibrationStatistics, Selection
from compressor.calibration.tokens import batches
from compressor.data_parallel import Processes
from compressor.errors import RequestError
from compressor.fisher.memory import TooLittleMemoryError, fitting_checkpointing, free_bytes, sizes_of
from compressor.fisher.progressive import FisherSelection, progressive_fisher
from compressor.fisher.settings import FisherSettings
from compressor.needed_statistics import fisher_batch
from compressor.planning import RunPlan
from compressor.progress import StageReporter
from compressor.recipe import NormEpsilon
from compressor.report import LayerReport
from compressor.selecting import select_channels, selection_of, stacked_heads
from compressor.selection.fisher import stage_widths
from compressor.selection.registry import get_selector_entry

STAGE_TOKENS_ON_CPU = 12_288
"""Calibration tokens that one stage of Fisher selection reads where no GPU does: stages take turns with all of them."""
_PASSES_OF_A_STAGE = 6
"""Forward passes that a stage usually takes over what it reads; bars are drawn by it."""


@dataclass(frozen=True, slots=True)
class Try:
    """One choice to make: a method, and the norm epsilons that its channels may be written with."""

    method: str
    policies: tuple[NormEpsilon, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """Channels chosen; `selection` is None, and `layers` empty, in all processes but the main one.

    `passes`: cost beside the calibration, in bare forward passes over its tokens. `seconds` of the choice alone.
    """

    method: str
    selection: Selection | None
    layers: list[LayerReport]
    passes: float
    seconds: float


@dataclass(frozen=True, slots=True, eq=False)
class Original:
    """The loaded original, sequences of its calibration to run it on, and what was summed over all of them."""

    model: PreTrainedModel
    sequences: tuple[Tensor, ...]
    statistics: CalibrationStatistics


def tries(plan: RunPlan, allowed: Sequence[NormEpsilon]) -> list[Try]:
    """All choices of a run; one alone where every channel is kept, whatever the method.

    A method that runs the model sees the output scale that is exported, so that it chooses anew for each epsilon.
    """
    whole = plan.cut.keep == plan.cut.key_dim.before
    found: list[Try] = []
    for method in plan.methods:
        if get_selector_entry(method).needs_model and not whole:
            found += [Try(method, (policy,)) for policy in allowed]
        else:
            found.append(Try(method, tuple(allowed)))
    return found


def choose_channels(
    plan: RunPlan, asked: Try, original: Original, processes: Processes, reporter: StageReporter
) -> Choice:
    """Choose the channels of every head, by statistics in the main process or by the model in all of them.

    Raises:
        RequestError: fewer calibration sequences than processes; a `TooLittleMemoryError`, in all processes alike,
            where one of them has too little memory for what runs the model.
        RunError: a choice that cannot be certified; gradients that are NaN or infinite.
    """
    started = time.perf_counter()
    passes = 0.0
    chosen: tuple[Selection, list[LayerReport]] | None = None
    if get_selector_entry(asked.method).needs_model:
        found = _by_fisher(plan, asked.policies[0], original, processes, reporter)
        passes = found.passes * _tokens(original.sequences) / original.statistics.tokens
        if processes.is_main:
            heads = stacked_heads(plan.source, original.statistics)
            chosen = selection_of(plan.source, found.choice(heads.gram("qk")))
    elif processes.is_main:
        request = plan.recipe.selection.model_copy(update={"method": asked.method})
        heads_in_all = original.statistics.gram_q.shape[:2].numel()
        with reporter.stage("selecting", heads_in_all, "heads") as advance:
            chosen = select_channels(plan.source, original.statistics, request, plan.cut.keep, plan.recipe.runtime.seed)
            advance(heads_in_all)
    selection, layers = (None, []) if chosen is None else chosen
    return Choice(asked.method, selection, layers, passes, time.perf_counter() - started)


@dataclass(frozen=True, slots=True, eq=False)
class _Sum:
    value: Tensor


def _tokens(sequences: Sequence[Tensor]) -> int:
    return sum(len(sequence) for sequence in sequences)


def _by_fisher(
    plan: RunPlan, policy: NormEpsilon, original: Original, processes: Processes, reporter: StageReporter
) -> FisherSelection:
    """The processes share the sequences, in batches so small that each has one."""
    sequences, keep = original.sequences, plan.cut.keep
    if len(sequences) < processes.count:
        raise RequestError(
            f"the method fisher has {len(sequences)} calibration sequences to choose on for {processes.count} "
            f"processes and needs one for each; raise {plan.name('calibration.samples')}, or launch fewer processes."
        )
    share = min(1.0, STAGE_TOKENS_ON_CPU / _tokens(sequences)) if plan.device.type == "cpu" else 1.0
    size = fisher_batch(plan, len(sequences), processes.count)
    own = [batch.input_ids for batch in processes.share(list(batches(sequences, size)))]
    settings = _fitting(plan, original.model, own, FisherSettings(stage_share=share), processes)
    tokens = sum(batch.numel() for batch in own)
    stages = len(stage_widths(plan.cut.key_dim.before, keep, settings.stages))

    def add_up(tensor: Tensor) -> None:
        tensor.copy_(processes.summed(_Sum(tensor)).value)

    with reporter.stage("selecting", round(_PASSES_OF_A_STAGE * stages * tokens * share)) as advance:
        return progressive_fisher(
            plan.source.architecture,
            original.model,
            plan.source.mixers,
            own,
            keep,
            settings,
            torch.Generator().manual_seed(plan.recipe.runtime.seed + processes.index),
            lambda passes: advance(round(passes * tokens)),
            epsilon_scaled=policy == "scaled" or not plan.source.architecture.scales_by_width,
            all_reduce=add_up,
        )


def _fitting(
    plan: RunPlan, model: PreTrainedModel, own: Sequence[Tensor], settings: FisherSettings, processes: Processes
) -> FisherSettings:
    """With what the memory of the process leaves room for, now that the model is in it.

    Raises:
        TooLittleMemoryError: a process has none, in all of them alike.
    """
    refusal, first = None, plan.source.mixers[0]
    sizes = sizes_of(model, (len(plan.source.mixers), first.num_k_heads, first.head_k_dim), max(own, key=Tensor.numel))
    checkpointing = True
    try:
        checkpointing = fitting_checkpointing(sizes, settings, free_bytes(plan.device), plan.device, plan.name)
    except TooLittleMemoryError as error:
        refusal = error
    refused = processes.summed(_Sum(torch.tensor(int(refusal is not None))))
    if refusal is not None:
        raise refusal
    if int(refused.value):
        raise TooLittleMemoryError("another process has too little memory for Fisher selection; use fewer processes.")
    return replace(settings, gradient_checkpointing=checkpointing)
