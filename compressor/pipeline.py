"""The stages of a run, composed: plan, calibrate, select, write, evaluate, verify."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from transformers import PreTrainedModel

from compressor.artifacts import CalibrationProgress, CalibrationStatistics, ProgressFile, write_json
from compressor.calibration.run import calibrate
from compressor.calibration.tokens import PackedTokens, TokenBatch, batches
from compressor.checkpoint.fingerprint import weights_sha256
from compressor.distilling import Trained, held_out_figures, train_folder
from compressor.evaluation.measure import Material
from compressor.export.disk import translate_write_errors
from compressor.export.model_card import render_model_card
from compressor.export.sizes import parse_size
from compressor.interruption import explained_interrupts
from compressor.loading import load_model, release_memory
from compressor.material import make_material
from compressor.measuring import HELD_OUT_NAME, evaluate_cut
from compressor.planning import RunOptions, RunPlan, pack_plan_tokens, plan_run
from compressor.progress import StageReporter
from compressor.recipe import Recipe
from compressor.refitting import Policies, Recovered, allowed_policies, divide_tokens, recover_cut, resolved_plan
from compressor.report import Report, VerificationReport
from compressor.reporting import RunFacts, build_report, card_facts, card_place
from compressor.selecting import select_channels
from compressor.verification.run import TRAINED_NOTE, Original, verify_folder
from compressor.writing import write_checkpoint

SECONDS_BETWEEN_SAVES = 5.0


def compress(recipe: Recipe, options: RunOptions | None = None, console: Console | None = None) -> Report:
    """Cut a checkpoint's key width and write the smaller one; the whole of `compress MODEL`.

    Args:
        recipe: what to do; see `Recipe` and `Recipe.from_settings`.
        options: what to do with files that are there already.
        console: where progress is shown; None shows nothing.

    Returns:
        The report that is also written to `compression.json`.

    Raises:
        RequestError: the request cannot be met; nothing was written.
        RunError: the run failed; the output folder is as it was before.
    """
    options = options or RunOptions()
    reporter = StageReporter(console)
    plan = plan_run(recipe, options)
    for note in (*plan.notes, *plan.cut.engine_warnings):
        reporter.say(f"note: {note}")
    lock = plan.output.lock(plan.resume_folder / "lock")
    with explained_interrupts(plan.output.path, plan.calibration_file), lock:
        report = _run_locked(plan, options, reporter)
        shutil.rmtree(plan.resume_folder, ignore_errors=True)
    return report


def _run_locked(plan: RunPlan, options: RunOptions, reporter: StageReporter) -> Report:
    tokens = pack_plan_tokens(plan)
    for problem in tokens.problems:
        reporter.say(f"note: {problem}")
    material = _make_material(plan, tokens, reporter)
    model = load_model(
        plan.source.architecture, plan.source.folder, plan.source.checkpoint.raw_config, plan.dtype, plan.device
    )
    token_batches = list(batches(tokens.calibration, plan.recipe.calibration.batch_size))
    policies = allowed_policies(plan, model, token_batches[0])
    sha256 = _fingerprint(plan, reporter)
    statistics = _calibrate(plan, options, model, token_batches, tokens, sha256, reporter)
    heads = statistics.gram_q.shape[:2].numel()
    with reporter.stage("selecting", heads, "heads") as advance:
        selection, layers = select_channels(
            plan.source, statistics, plan.recipe.selection, plan.cut.keep, plan.recipe.runtime.seed
        )
        advance(heads)
    with plan.output.staged() as folder:
        with reporter.stage("writing", plan.cut.output_bytes, "bytes") as advance:
            max_shard_bytes = parse_size(plan.recipe.export.max_shard_size)
            write_checkpoint(folder, plan.source, plan.cut, selection, max_shard_bytes, advance)
        recovered = _recover(plan, policies, model, folder, tokens, reporter)
        plan = resolved_plan(plan, policies.allowed[0] if recovered is None else recovered.policy)
        trained = _train(plan, options, model, material, folder, sha256, reporter)
        (folder / "recipe.yaml").write_text(plan.recipe.to_yaml(), encoding="utf-8")
        evaluation = None if material is None else evaluate_cut(plan, material, model, folder, recovered, reporter)
        del model
        release_memory(plan.device)
        verification = _verify(plan, folder, tokens, recovered, trained, reporter)
        facts = RunFacts(
            tokens, sha256, layers, policies, recovered, trained, evaluation, verification, reporter.seconds
        )
        report = build_report(plan, facts)
        write_json(folder / "compression.json", report.to_json())
        (folder / "README.md").write_text(render_model_card(card_facts(card_place(plan), report)), encoding="utf-8")
    return report


def _make_material(plan: RunPlan, tokens: PackedTokens, reporter: StageReporter) -> Material | None:
    if plan.evaluation is None:
        return None
    with reporter.stage("prompts", plan.evaluation.num_prompts, "prompts") as advance:
        return make_material(plan.evaluation, tokens.held_out, HELD_OUT_NAME, advance)


def _recover(
    plan: RunPlan,
    policies: Policies,
    model: PreTrainedModel,
    folder: Path,
    tokens: PackedTokens,
    reporter: StageReporter,
) -> Recovered | None:
    """None where there is nothing to win back or to choose."""
    whole = plan.cut.keep == plan.cut.key_dim.before
    if whole or not (plan.recipe.recovery.refit or len(policies.allowed) > 1):
        return None
    divided = divide_tokens(tokens.calibration, plan.recipe.calibration.retrieval_share or 0.0)
    return recover_cut(plan, policies, model, folder, divided, reporter)


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
    reporter: StageReporter,
) -> CalibrationStatistics:
    file = ProgressFile(plan.calibration_file, _calibration_key(plan, tokens, sha256))
    start, problem = file.load() if options.resume else (None, None)
    if problem is not None:
        reporter.say(f"note: {problem}")
    if start is not None:
        reporter.say(f"resuming after {start.batches} of {len(token_batches)} calibration batches")
    saved_at = time.monotonic()

    def on_batch(progress: CalibrationProgress, batch_tokens: int) -> None:
        nonlocal saved_at
        advance(batch_tokens)
        if progress.batches == len(token_batches) or time.monotonic() - saved_at > SECONDS_BETWEEN_SAVES:
            with translate_write_errors(file.path, None):
                file.save(progress)
            saved_at = time.monotonic()

    with reporter.stage("calibrating", tokens.tokens) as advance:
        if start is not None:
            advance(sum(batch.num_tokens for batch in token_batches[: start.batches]))
        return calibrate(plan.source.architecture, model, plan.source.mixers, token_batches, start, on_batch)


def _calibration_key(plan: RunPlan, tokens: PackedTokens, sha256: str) -> str:
    """Of everything that the sums depend on."""
    parts = [sha256, json.dumps(plan.source.checkpoint.raw_config, sort_keys=True), tokens.sha256]
    parts += [str(plan.recipe.calibration.batch_size), str(plan.dtype), plan.device.type]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _train(
    plan: RunPlan,
    options: RunOptions,
    model: PreTrainedModel,
    material: Material | None,
    folder: Path,
    sha256: str,
    reporter: StageReporter,
) -> Trained | None:
    if plan.training is None:
        return None
    # Everything before training is decided by these.
    decided = plan.recipe.model_dump(include={"selection", "calibration", "runtime"})
    decided["refit"] = plan.recipe.recovery.refit
    key = plan.training.run_key(sha256, json.dumps(decided, sort_keys=True))
    architecture, work = plan.source.architecture, plan.training_folder
    evaluate = held_out_figures(plan.training, material, plan.tokenizer)
    trained = train_folder(plan.training, architecture, model, folder, work, key, options.resume, evaluate, reporter)
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
