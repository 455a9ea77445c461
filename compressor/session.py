"""What all cuts of one model share, done once: material, the loaded original, its hash and calibration statistics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel

from compressor.calibrating import collect_statistics
from compressor.calibration.offloaded import OffloadedModel
from compressor.calibration.tokens import PackedTokens, batches
from compressor.checkpoint.fingerprint import weights_sha256
from compressor.choosing import Original
from compressor.data_parallel import Processes
from compressor.evaluation.measure import Material
from compressor.material import make_material
from compressor.measuring import HELD_OUT_NAME
from compressor.needed_statistics import needed_statistics
from compressor.offloading import load_offloaded
from compressor.placing import load_placed
from compressor.planning import RunOptions, RunPlan, pack_plan_tokens
from compressor.progress import StageReporter
from compressor.refitting import Policies, allowed_policies
from compressor.selection.request import Statistic


@dataclass(frozen=True, slots=True, eq=False)
class Session:
    """`policies` has one entry a plan; `material` is None where nothing is measured."""

    original: Original
    tokens: PackedTokens
    material: Material | None
    policies: tuple[Policies, ...]
    base_sha256: str


def needed_by(plans: Sequence[RunPlan]) -> frozenset[Statistic]:
    """What the methods of all plans read of each channel."""
    return frozenset[Statistic]().union(*(needed_statistics(plan) for plan in plans))


def open_session(
    plans: Sequence[RunPlan], options: RunOptions, processes: Processes, reporter: StageReporter
) -> Session:
    """Load and calibrate the model of `plans`, which differ in method and width alone.

    Raises:
        RequestError: too few tokens, a norm epsilon that other norms would feel, statistics of another run.
        RunError: the run failed.
    """
    plan = plans[0]
    tokens = pack_plan_tokens(plan)
    for problem in tokens.problems:
        reporter.say(f"note: {problem}")
    material = _make_material(plan, tokens, processes, reporter)
    source = plan.source
    loaded: PreTrainedModel | OffloadedModel = (
        load_offloaded(source, plan.dtype, plan.device, plan.resume_folder / "weights")
        if plan.recipe.calibration.low_memory
        else load_placed(plan, source.folder, source.checkpoint.raw_config)
    )
    model = loaded.model if isinstance(loaded, OffloadedModel) else loaded
    token_batches = list(batches(tokens.calibration, plan.recipe.calibration.batch_size))
    policies = processes.from_main(lambda: tuple(allowed_policies(each, model, token_batches[0]) for each in plans))
    sha256 = processes.from_main(lambda: _fingerprint(plan, reporter))
    statistics = collect_statistics(
        plan, options, loaded, token_batches, tokens, sha256, needed_by(plans), processes, reporter
    )
    return Session(Original(model, tokens.calibration, statistics), tokens, material, policies, sha256)


def _make_material(
    plan: RunPlan, tokens: PackedTokens, processes: Processes, reporter: StageReporter
) -> Material | None:
    """None where nothing is measured, and in processes that measure nothing: all do where training asks for figures."""
    shared = plan.training is not None and plan.training.section.evaluate_every > 0
    if plan.evaluation is None or not (processes.is_main or shared):
        return None
    with reporter.stage("prompts", plan.evaluation.num_prompts, "prompts") as advance:
        return make_material(plan.evaluation, tokens.held_out, HELD_OUT_NAME, advance)


def _fingerprint(plan: RunPlan, reporter: StageReporter) -> str:
    total = sum(path.stat().st_size for path in plan.source.checkpoint.index.files)
    with reporter.stage("hashing", total, "bytes") as advance:
        return weights_sha256(plan.source.checkpoint.index, advance)
