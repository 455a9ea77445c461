"""One checkpoint from the calibrated original: cut, trained and evaluated; then verified and described."""

from __future__ import annotations

import json
from dataclasses import dataclass

from compressor.adapter_output import describe_adapter
from compressor.artifacts import write_json
from compressor.calibration.tokens import PackedTokens
from compressor.cutting import WrittenCut, write_cut
from compressor.data_parallel import Processes
from compressor.distilling import Trained, TrainingFolders, held_out_figures, train_folder
from compressor.export.model_card import render_model_card
from compressor.export.model_files import RECORDED_NOWHERE, files_inside
from compressor.loading import release_memory
from compressor.measuring import evaluate_cut
from compressor.planning import RunOptions, RunPlan
from compressor.progress import StageReporter
from compressor.refitting import Policies, resolved_plan
from compressor.report import EvaluationReport, Report, VerificationReport
from compressor.reporting import RunFacts, build_report, card_facts, card_place, record_output
from compressor.session import Session
from compressor.verification.request import adapter_targets
from compressor.verification.run import Original, verify_folder


@dataclass(frozen=True, slots=True)
class Made:
    """What stands in `folders`, and how it came about; `plan` has the method and the norm epsilon that were chosen."""

    plan: RunPlan
    folders: TrainingFolders
    tokens: PackedTokens
    base_sha256: str
    policies: Policies
    written: WrittenCut
    trained: Trained | None
    evaluation: EvaluationReport | None


def make_checkpoint(
    plan: RunPlan,
    policies: Policies,
    session: Session,
    folders: TrainingFolders,
    options: RunOptions,
    processes: Processes,
    reporter: StageReporter,
) -> Made:
    """Fill the empty `folders` with the cut that `plan` asks for, and measure it.

    Raises:
        RequestError: too few tokens to refit.
        RunError: the run failed.
    """
    folder, original = folders.checkpoint, session.original
    written = write_cut(plan, policies, original, folder, processes, reporter)
    # The chosen one is the main process's to say: floats of another may round differently.
    plan = resolved_plan(plan, *processes.from_main(lambda: (written.method, written.policy)))
    trained = _train(plan, options, session, folders, processes, reporter)
    material = session.material
    evaluation = processes.from_main(
        lambda: (
            None
            if material is None
            else evaluate_cut(plan, material, original.model, folder, written.recovered, reporter)
        )
    )
    return Made(plan, folders, session.tokens, session.base_sha256, policies, written, trained, evaluation)


def describe_checkpoint(made: Made, reporter: StageReporter, verify: bool = True) -> Report:
    """Verify the checkpoint, where its recipe asks for it and `verify`, and write down what was done."""
    plan, folder = made.plan, made.folders.checkpoint
    (folder / "recipe.yaml").write_text(plan.recipe.to_yaml(), encoding="utf-8")
    verification = _verify(made, reporter) if verify and plan.recipe.export.verify else None
    files = [name for name in files_inside(folder) if name not in RECORDED_NOWHERE]
    facts = RunFacts(
        tokens=made.tokens,
        base_sha256=made.base_sha256,
        policies=made.policies,
        written=made.written,
        trained=made.trained,
        evaluation=made.evaluation,
        verification=verification,
        files=record_output(folder, files, reporter),
        timings_s=reporter.seconds,
    )
    report = build_report(plan, facts)
    write_json(folder / "compression.json", report.to_json())
    (folder / "README.md").write_text(render_model_card(card_facts(card_place(plan), report)), encoding="utf-8")
    if plan.adapter is not None and made.folders.adapter is not None:
        describe_adapter(made.folders.adapter, plan.adapter, plan.output, plan.source, plan.recipe)
    return report


def _train(
    plan: RunPlan,
    options: RunOptions,
    session: Session,
    folders: TrainingFolders,
    processes: Processes,
    reporter: StageReporter,
) -> Trained | None:
    if plan.training is None:
        return None
    # Everything before training is decided by these.
    decided = plan.recipe.model_dump(include={"selection", "calibration", "runtime"})
    decided["refit"] = plan.recipe.recovery.refit
    key = plan.training.run_key(session.base_sha256, json.dumps(decided, sort_keys=True))
    evaluate = held_out_figures(plan.training, session.material, plan.tokenizer)
    architecture, model = plan.source.architecture, session.original.model
    trained = train_folder(
        plan.training, architecture, model, folders, key, options.resume, evaluate, processes, reporter
    )
    release_memory(plan.device)
    return trained


def _verify(made: Made, reporter: StageReporter) -> VerificationReport:
    plan, recovered, targets = made.plan, made.written.recovered, adapter_targets(made.plan.recipe)
    scaled = plan.recipe.selection.norm_epsilon == "scaled"
    refitted = recovered is not None and bool(recovered.chosen.tensors)
    original = Original(plan.source.folder, scaled, refitted, made.trained is not None, targets)
    with reporter.stage("verifying", 1, "checkpoint") as advance:
        report = verify_folder(
            made.folders.checkpoint,
            plan.source.architecture,
            plan.device,
            made.tokens.calibration[0].tolist(),
            original,
        )
        advance(1)
    return report
