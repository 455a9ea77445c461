"""The stages of a run, composed: plan, calibrate, select, write, evaluate, verify."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from transformers import PreTrainedModel

from compressor.adapter_output import describe_adapter, staged_adapter
from compressor.artifacts import CalibrationProgress, CalibrationStatistics, ProgressFile, write_json
from compressor.calibration.run import calibrate
from compressor.calibration.tokens import PackedTokens, TokenBatch, batches
from compressor.checkpoint.fingerprint import weights_sha256
from compressor.cutting import WrittenCut, write_cut
from compressor.data_parallel import Processes, join_processes
from compressor.distilling import Trained, TrainingFolders, held_out_figures, train_folder
from compressor.evaluation.measure import Material
from compressor.export.disk import translate_write_errors
from compressor.export.model_card import render_model_card
from compressor.loading import load_model, release_memory
from compressor.material import make_material
from compressor.measuring import HELD_OUT_NAME, evaluate_cut
from compressor.needed_statistics import needed_statistics, refuse_gradients_beyond_memory, with_gradients
from compressor.planning import RunOptions, RunPlan, pack_plan_tokens, plan_run
from compressor.progress import StageReporter
from compressor.recipe import Recipe
from compressor.refitting import Policies, Recovered, allowed_policies, resolved_plan
from compressor.report import EvaluationReport, Report, VerificationReport
from compressor.reporting import RunFacts, build_report, card_facts, card_place
from compressor.shared_output import held, staged_by_main
from compressor.verification.run import TRAINED_NOTE, Original, verify_folder

SECONDS_BETWEEN_SAVES = 5.0


def compress(recipe: Recipe, options: RunOptions | None = None, console: Console | None = None) -> Report:
    """Cut a checkpoint's key width and write the smaller one; the whole of `compress MODEL`.

    Under `accelerate launch` every process calls this: they share the calibration and the training, and the main
    process does the rest.

    Args:
        recipe: what to do; see `Recipe` and `Recipe.from_settings`.
        options: what to do with files that are there already.
        console: where progress is shown, by the main process alone; None shows nothing.

    Returns:
        The report that is also written to `compression.json`.

    Raises:
        RequestError: the request cannot be met; nothing was written.
        RunError: the run failed; the output folder is as it was before.
    """
    options = options or RunOptions()
    processes = join_processes(recipe.runtime.device)
    reporter = StageReporter(console if processes.is_main else None)
    with processes.failing_together():
        plan = plan_run(recipe, options)
        refuse_gradients_beyond_memory(plan)
        if plan.training is not None:
            plan.training.training.refuse_impossible(True, processes.count)
        for note in (*plan.notes, *plan.cut.engine_warnings):
            reporter.say(f"note: {note}")
        with held(plan.outputs, plan.calibration_file(processes.index, processes.count), processes):
            report = _run_locked(plan, options, processes, reporter)
            if processes.is_main:
                shutil.rmtree(plan.resume_folder, ignore_errors=True)
        processes.wait_for_all()
    return report


@dataclass(frozen=True, slots=True)
class _Made:
    """What stands in `folders`, and how it came about; `plan` has the norm epsilon that was chosen."""

    plan: RunPlan
    folders: TrainingFolders
    base_sha256: str
    policies: Policies
    written: WrittenCut
    trained: Trained | None
    evaluation: EvaluationReport | None


def _run_locked(plan: RunPlan, options: RunOptions, processes: Processes, reporter: StageReporter) -> Report:
    tokens = pack_plan_tokens(plan)
    for problem in tokens.problems:
        reporter.say(f"note: {problem}")
    with ExitStack() as outputs:
        # The original is released with the end of this function: verification loads models of its own.
        made = _make(plan, options, tokens, outputs, processes, reporter)
        release_memory(plan.device)
        return processes.from_main(lambda: _describe(made, tokens, reporter))


def _make(
    plan: RunPlan,
    options: RunOptions,
    tokens: PackedTokens,
    outputs: ExitStack,
    processes: Processes,
    reporter: StageReporter,
) -> _Made:
    """Calibrate, cut, train and evaluate; folders are staged in `outputs`."""
    material = _make_material(plan, tokens, processes, reporter)
    model = load_model(
        plan.source.architecture, plan.source.folder, plan.source.checkpoint.raw_config, plan.dtype, plan.device
    )
    token_batches = list(batches(tokens.calibration, plan.recipe.calibration.batch_size))
    policies = processes.from_main(lambda: allowed_policies(plan, model, token_batches[0]))
    sha256 = processes.from_main(lambda: _fingerprint(plan, reporter))
    statistics = _calibrate(plan, options, model, token_batches, tokens, sha256, processes, reporter)
    statistics = with_gradients(plan, model, token_batches, statistics, processes, reporter)
    adapter = outputs.enter_context(staged_adapter(plan.adapter, processes))
    folder = outputs.enter_context(staged_by_main(plan.output, processes))
    written = write_cut(plan, policies, model, statistics, tokens, folder, processes, reporter)
    plan = resolved_plan(plan, processes.from_main(lambda: written.policy(policies)))
    folders = TrainingFolders(folder, plan.training_folder, adapter)
    trained = _train(plan, options, model, material, folders, sha256, processes, reporter)
    evaluation = processes.from_main(
        lambda: None if material is None else evaluate_cut(plan, material, model, folder, written.recovered, reporter)
    )
    return _Made(plan, folders, sha256, policies, written, trained, evaluation)


def _describe(made: _Made, tokens: PackedTokens, reporter: StageReporter) -> Report:
    """Verify the checkpoint and write down what was done."""
    plan, folder = made.plan, made.folders.checkpoint
    (folder / "recipe.yaml").write_text(plan.recipe.to_yaml(), encoding="utf-8")
    verification = _verify(plan, folder, tokens, made.written.recovered, made.trained, reporter)
    facts = RunFacts(
        tokens=tokens,
        base_sha256=made.base_sha256,
        layers=made.written.layers,
        policies=made.policies,
        recovered=made.written.recovered,
        trained=made.trained,
        evaluation=made.evaluation,
        verification=verification,
        timings_s=reporter.seconds,
    )
    report = build_report(plan, facts)
    write_json(folder / "compression.json", report.to_json())
    (folder / "README.md").write_text(render_model_card(card_facts(card_place(plan), report)), encoding="utf-8")
    place = plan.recipe.recovery.save_adapter
    if place is not None and made.folders.adapter is not None:
        describe_adapter(made.folders.adapter, place, plan.source, None, plan.output.path.name)
    return report


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


def _calibrate(
    plan: RunPlan,
    options: RunOptions,
    model: PreTrainedModel,
    token_batches: Sequence[TokenBatch],
    tokens: PackedTokens,
    sha256: str,
    processes: Processes,
    reporter: StageReporter,
) -> CalibrationStatistics:
    own = processes.share(token_batches)
    file = ProgressFile(
        plan.calibration_file(processes.index, processes.count), _calibration_key(plan, tokens, sha256, processes)
    )
    start, problem = file.load() if options.resume else (None, None)
    if problem is not None:
        reporter.say(f"note: {problem}")
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
            energy="energy" in needed_statistics(plan),
            input_squares="wanda" in needed_statistics(plan),
        )
        return processes.summed(statistics)


def _calibration_key(plan: RunPlan, tokens: PackedTokens, sha256: str, processes: Processes) -> str:
    """Of everything that the sums depend on."""
    parts = [sha256, json.dumps(plan.source.checkpoint.raw_config, sort_keys=True), tokens.sha256]
    parts += [str(plan.recipe.calibration.batch_size), str(plan.dtype), plan.device.type]
    parts += [f"{processes.index} of {processes.count}"] if processes.count > 1 else []
    parts += sorted(needed_statistics(plan) & {"energy", "wanda"})
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _train(
    plan: RunPlan,
    options: RunOptions,
    model: PreTrainedModel,
    material: Material | None,
    folders: TrainingFolders,
    sha256: str,
    processes: Processes,
    reporter: StageReporter,
) -> Trained | None:
    if plan.training is None:
        return None
    # Everything before training is decided by these.
    decided = plan.recipe.model_dump(include={"selection", "calibration", "runtime"})
    decided["refit"] = plan.recipe.recovery.refit
    key = plan.training.run_key(sha256, json.dumps(decided, sort_keys=True))
    evaluate = held_out_figures(plan.training, material, plan.tokenizer)
    trained = train_folder(
        plan.training, plan.source.architecture, model, folders, key, options.resume, evaluate, processes, reporter
    )
    release_memory(plan.device)
    return trained


def _verify(
    plan: RunPlan,
    folder: Path,
    tokens: PackedTokens,
    recovered: Recovered | None,
    trained: Trained | None,
    reporter: StageReporter,
) -> VerificationReport | None:
    if not plan.recipe.export.verify:
        return None
    scaled = plan.recipe.selection.norm_epsilon == "scaled"
    refitted = recovered is not None and bool(recovered.chosen.tensors)
    original = None if trained is not None else Original(plan.source.folder, scaled, refitted)
    with reporter.stage("verifying", 1, "checkpoint") as advance:
        report = verify_folder(
            folder,
            plan.source.architecture,
            plan.device,
            tokens.calibration[0].tolist(),
            original,
            TRAINED_NOTE if original is None else None,
        )
        advance(1)
    return report
