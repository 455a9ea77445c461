"""The stage `calibrating` of a run with --low-memory: layer by layer, resumed behind the last layer that is done."""

from __future__ import annotations

from collections.abc import Sequence

from compressor.artifacts import CalibrationProgress, CalibrationStatistics, ProgressFile
from compressor.calibration.layer_outputs import LayerOutputs
from compressor.calibration.layerwise import calibrate_layerwise, can_go_on, num_layers
from compressor.calibration.offloaded import OffloadedModel
from compressor.calibration.tokens import TokenBatch
from compressor.export.advice import LESS_AT_ONCE
from compressor.export.disk import translate_write_errors
from compressor.planning import RunPlan
from compressor.progress import StageReporter
from compressor.selection.request import Statistic


def calibrate_low_memory(
    plan: RunPlan,
    offloaded: OffloadedModel,
    batches: Sequence[TokenBatch],
    needs: frozenset[Statistic],
    file: ProgressFile,
    start: CalibrationProgress | None,
    reporter: StageReporter,
) -> CalibrationStatistics:
    """The sums over `batches`. `file` gets them after every layer, and `start` is what an interrupted run left there.

    A run that begins anew takes the place of what was left: the sums in `file` are of no use without activations.

    Raises:
        RunError: activations are NaN or infinite; no space left.
    """
    layers, tokens = num_layers(plan.source.mixers), sum(batch.num_tokens for batch in batches)
    outputs = LayerOutputs(plan.activations_folder)
    if start is not None and not can_go_on(start, plan.source.mixers, outputs, len(batches)):
        reporter.say(f"note: {plan.activations_folder} lacks what the next layer reads: calibrating again")
        start = None
    if start is None:
        file.path.unlink(missing_ok=True)
    else:
        reporter.say(f"resuming after {start.batches} of {layers} layers")

    def on_layer(progress: CalibrationProgress) -> None:
        file.save(progress)

    stage = reporter.stage("calibrating", layers * tokens, "layer-tokens")
    with stage as advance, translate_write_errors(plan.resume_folder, None, LESS_AT_ONCE):
        statistics = calibrate_layerwise(
            plan.source.architecture,
            offloaded,
            plan.source.mixers,
            batches,
            outputs,
            start,
            on_layer,
            advance,
            energy="energy" in needs,
            input_squares="wanda" in needs,
        )
        outputs.clear()
        return statistics
