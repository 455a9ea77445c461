"""The cut of a run: channels selected, the smaller checkpoint written and refitted."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedModel

from compressor.artifacts import CalibrationStatistics
from compressor.calibration.tokens import PackedTokens
from compressor.data_parallel import Processes
from compressor.export.sizes import parse_size
from compressor.planning import RunPlan
from compressor.progress import StageReporter
from compressor.recipe import NormEpsilon
from compressor.refitting import Policies, Recovered, divide_tokens, recover_cut
from compressor.report import LayerReport
from compressor.selecting import select_channels
from compressor.writing import write_checkpoint


@dataclass(frozen=True, slots=True)
class WrittenCut:
    """What was found while the cut was written; `layers` in the main process alone."""

    layers: list[LayerReport]
    recovered: Recovered | None

    def policy(self, allowed: Policies) -> NormEpsilon:
        """The norm epsilon that was written."""
        return allowed.allowed[0] if self.recovered is None else self.recovered.policy


def write_cut(
    plan: RunPlan,
    policies: Policies,
    model: PreTrainedModel,
    statistics: CalibrationStatistics,
    tokens: PackedTokens,
    folder: Path,
    processes: Processes,
    reporter: StageReporter,
) -> WrittenCut:
    """Write the checkpoint into the empty `folder`; the main process does, and all refit it together.

    Raises:
        RequestError: too few tokens to refit.
        RunError: a selection that cannot be certified; activations or divergences that are NaN or infinite.
    """
    layers: list[LayerReport] = []
    if processes.is_main:
        heads = statistics.gram_q.shape[:2].numel()
        with reporter.stage("selecting", heads, "heads") as advance:
            selection, layers = select_channels(
                plan.source, statistics, plan.recipe.selection, plan.cut.keep, plan.recipe.runtime.seed
            )
            advance(heads)
        with reporter.stage("writing", plan.cut.output_bytes, "bytes") as advance:
            max_shard_bytes = parse_size(plan.recipe.export.max_shard_size)
            write_checkpoint(folder, plan.source, plan.cut, selection, max_shard_bytes, advance)
    return WrittenCut(layers, _recover(plan, policies, model, folder, tokens, processes, reporter))


def _recover(
    plan: RunPlan,
    policies: Policies,
    model: PreTrainedModel,
    folder: Path,
    tokens: PackedTokens,
    processes: Processes,
    reporter: StageReporter,
) -> Recovered | None:
    """None where there is nothing to win back or to choose."""
    whole = plan.cut.keep == plan.cut.key_dim.before
    if whole or not (plan.recipe.recovery.refit or len(policies.allowed) > 1):
        return None
    divided = divide_tokens(tokens.calibration, plan.recipe.calibration.retrieval_share or 0.0)
    return recover_cut(plan, policies, model, folder, divided, processes, reporter)
