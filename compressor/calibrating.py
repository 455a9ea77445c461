"""The stage `calibrating` of a run: sums over the calibration tokens, resumed, or from a file of the user's."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor
from transformers import PreTrainedModel

from compressor.architectures.projections import projections
from compressor.artifacts import CalibrationProgress, CalibrationStatistics, ProgressFile
from compressor.calibration.offloaded import OffloadedModel
from compressor.calibration.run import calibrate
from compressor.calibration.tokens import PackedTokens, TokenBatch
from compressor.data_parallel import Processes
from compressor.errors import RequestError
from compressor.export.disk import translate_write_errors
from compressor.layerwise_calibrating import calibrate_low_memory
from compressor.needed_statistics import with_gradients
from compressor.planning import RunOptions, RunPlan
from compressor.progress import StageReporter
from compressor.selection.request import Statistic
from compressor.statistics_file import (
    StatisticsIdentity,
    load_statistics,
    model_sha256,
    refuse_other_statistics,
    save_statistics,
)
from compressor.statistics_place import refuse_little_room, refuse_place
from compressor.texts_read import texts_of

SECONDS_BETWEEN_SAVES = 5.0
_SUMMED_IN_PASSING: frozenset[Statistic] = frozenset({"energy", "wanda"})
"""What the calibration pass sums at little cost beside the Gram matrices."""


def refuse_statistics_files(plan: RunPlan, options: RunOptions, needs: frozenset[Statistic]) -> None:
    """What can be known before the model is loaded.

    Raises:
        RequestError: statistics of another model, revision or width, damaged, or without what is needed; a place to
            save them that cannot take them, or has no room; both at once.
    """
    if options.statistics is not None and options.save_statistics is not None:
        raise RequestError(
            f"--save-statistics {options.save_statistics} would save what --statistics {options.statistics} holds; "
            "leave one of them out."
        )
    if options.save_statistics is not None:
        outputs, texts = [output.path for output in plan.outputs], texts_of(plan.recipe)
        refuse_place(options.save_statistics, outputs, plan.source.folder, texts, options.overwrite)
        refuse_little_room(options.save_statistics, _identity(plan).sizes.file_bytes(needs | _SUMMED_IN_PASSING))
    if options.statistics is not None:
        refuse_other_statistics(options.statistics, _identity(plan), needs)


def collect_statistics(
    plan: RunPlan,
    options: RunOptions,
    model: PreTrainedModel | OffloadedModel,
    token_batches: Sequence[TokenBatch],
    tokens: PackedTokens,
    sha256: str,
    needs: frozenset[Statistic],
    processes: Processes,
    reporter: StageReporter,
) -> CalibrationStatistics:
    """Everything in `needs` and, where the statistics are saved, what other methods read too.

    The processes share the batches; all return the sums over all of them.

    Raises:
        RequestError: the statistics that were handed in are not those of this run.
        RunError: activations or gradients are NaN or infinite; no space left for what --resume goes on with.
    """
    identity = _identity(plan, model_sha256(sha256, plan.source.checkpoint.raw_config), tokens.sha256)
    if options.statistics is not None:
        refuse_other_statistics(options.statistics, identity, needs)
        reporter.say(f"statistics of {options.statistics}: nothing to calibrate")
        return load_statistics(options.statistics)
    if options.save_statistics is not None:
        needs |= _SUMMED_IN_PASSING
    statistics = _calibrate(plan, options, model, token_batches, tokens, sha256, needs, processes, reporter)
    if "gradient" in needs and not isinstance(model, OffloadedModel):
        statistics = with_gradients(plan, model, token_batches, statistics, processes, reporter)
    if options.save_statistics is not None and processes.is_main:
        problem = save_statistics(options.save_statistics, identity, statistics)
        if problem is not None:
            reporter.say(f"note: {problem}")
    return statistics


def _identity(plan: RunPlan, model: str | None = None, tokens: str | None = None) -> StatisticsIdentity:
    folder, mixers = plan.source.checkpoint.folder, plan.source.mixers
    projection = projections(plan.source.architecture, mixers[0])[0]
    return StatisticsIdentity(
        model=folder.name,
        revision=folder.revision,
        key_dim=mixers[0].head_k_dim,
        heads=mixers[0].num_k_heads,
        input_width=plan.source.shapes[projection.tensor][1],
        layers=tuple(mixer.layer for mixer in mixers),
        dtype=str(plan.dtype).removeprefix("torch."),
        model_sha256=model,
        tokens_sha256=tokens,
    )


def _calibrate(
    plan: RunPlan,
    options: RunOptions,
    model: PreTrainedModel | OffloadedModel,
    token_batches: Sequence[TokenBatch],
    tokens: PackedTokens,
    sha256: str,
    needs: frozenset[Statistic],
    processes: Processes,
    reporter: StageReporter,
) -> CalibrationStatistics:
    own = processes.share(token_batches)
    key = _calibration_key(plan, tokens, sha256, processes)
    file = ProgressFile(plan.calibration_file(processes.index, processes.count), key)
    start = _kept_sums(file, needs, reporter) if options.resume else None
    if isinstance(model, OffloadedModel):
        return calibrate_low_memory(plan, model, own, needs, file, start, reporter)
    if start is not None:
        reporter.say(f"resuming after {start.batches} of {len(own)} calibration batches")
    saved_at = time.monotonic()

    def on_batch(progress: CalibrationProgress, batch_tokens: int) -> None:
        nonlocal saved_at
        advance(batch_tokens)
        if progress.batches == len(own) or time.monotonic() - saved_at > SECONDS_BETWEEN_SAVES:
            with translate_write_errors(file.path, None):
                file.save(progress)
            saved_at = time.monotonic()

    with reporter.stage("calibrating", sum(batch.num_tokens for batch in own)) as advance:
        if start is not None:
            advance(sum(batch.num_tokens for batch in own[: start.batches]))
        statistics = calibrate(
            plan.source.architecture,
            model,
            plan.source.mixers,
            own,
            start,
            on_batch,
            energy="energy" in needs,
            input_squares="wanda" in needs,
        )
        return processes.summed(statistics)


def _kept_sums(file: ProgressFile, needs: frozenset[Statistic], reporter: StageReporter) -> CalibrationProgress | None:
    """What an interrupted run kept of exactly the sums that this one takes, whose method may be another.

    None where there is nothing of use, with a note that says why.
    """
    kept, problem = file.load()
    if kept is not None:
        sums: dict[Statistic, Tensor | None] = {"energy": kept.energies, "wanda": kept.input_squares}
        taken = {name: tensor if name in needs else None for name, tensor in sums.items()}
        lacking = [name for name, tensor in taken.items() if name in needs and tensor is None]
        if not lacking:
            return replace(kept, energies=taken["energy"], input_squares=taken["wanda"])
        problem = (
            f"{file.path} holds no {' and no '.join(lacking)} of the channels, which this run sums too: "
            "calibrating again"
        )
    if problem is not None:
        reporter.say(f"note: {problem}")
    return None


def _calibration_key(plan: RunPlan, tokens: PackedTokens, sha256: str, processes: Processes) -> str:
    """Of everything that the sums depend on; which of them were taken is seen from the file."""
    parts = [sha256, json.dumps(plan.source.checkpoint.raw_config, sort_keys=True), tokens.sha256]
    parts += [str(plan.recipe.calibration.batch_size), str(plan.dtype), plan.device.type]
    parts += [f"{processes.index} of {processes.count}"] if processes.count > 1 else []
    parts += ["layer by layer"] if plan.recipe.calibration.low_memory else []
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
