"""`compress recover DIR`: train a compressed checkpoint with the model it was cut from as teacher."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from transformers import PreTrainedModel

from compressor.adapter_output import describe_adapter, staged_with_adapter
from compressor.artifacts import write_json
from compressor.checkpoint.config_file import CONFIG_FILE, read_config
from compressor.checkpoint.fingerprint import weights_sha256
from compressor.copying import copy_tree
from compressor.data_parallel import Processes, join_processes
from compressor.distilling import Trained, TrainingFolders, held_out_figures, train_folder
from compressor.errors import RequestError
from compressor.evaluating import resolved_settings
from compressor.evaluation.measure import Material, Measured, compare
from compressor.evaluation.pairing import differences
from compressor.evaluation.results import collect
from compressor.export.file_records import FileRecord
from compressor.export.model_card import render_model_card
from compressor.export.model_files import RECIPE_FILE, RECORDED_NOWHERE, TRAINING_FILES, is_weights, own_files
from compressor.home_folders import expanded
from compressor.loading import load_model, release_memory
from compressor.material import make_material
from compressor.preparation import Source
from compressor.progress import Advance, StageReporter
from compressor.recover_checks import refuse_changed_cut, refuse_changed_files, trained_original
from compressor.recover_plan import RecoverPlan, RecoverRequest, plan_recovery
from compressor.recovery_report import training_report
from compressor.report import EvaluationReport, RecoveryReport, Report, VerificationReport
from compressor.reporting import CardPlace, card_facts, load_line, record_output
from compressor.shared_output import held, remove_resume_folder
from compressor.training_settings import refuse_processes
from compressor.verification.run import verify_folder


def recover(request: RecoverRequest, console: Console | None = None) -> Report:
    """Train a compressed folder and write the result as another; returns its report.

    Under `accelerate launch` every process calls this: all train, and the main process does the rest.

    Raises:
        RequestError: the request cannot be met; nothing was written.
        RunError: the run failed; the output folder is as it was before, and --resume goes on from the last checkpoint.
    """
    processes = join_processes(request.runtime.device, request.options.name)
    reporter = StageReporter(console if processes.is_main else None)
    with processes.failing_together():
        plan = plan_recovery(request)
        refuse_processes(plan.training.training, processes.count, request.options.name)
        with held(plan.outputs, (plan.training_folder,), processes):
            plan.training.refuse_checkpoints(plan.training_folder, request.options.resume)
            report = _run(plan, request, processes, reporter)
            if processes.is_main:
                remove_resume_folder(plan.output, ["training"])
        processes.wait_for_all()
    return report


def _run(plan: RecoverPlan, request: RecoverRequest, processes: Processes, reporter: StageReporter) -> Report:
    with ExitStack() as outputs:
        # The models are released with the end of this function: verification loads its own.
        folders, report = _make(plan, request, outputs, processes, reporter)
        release_memory(plan.device)
        return processes.from_main(lambda: _describe(plan, request, folders, report, reporter))


def _make(
    plan: RecoverPlan, request: RecoverRequest, outputs: ExitStack, processes: Processes, reporter: StageReporter
) -> tuple[TrainingFolders, Report]:
    """Train and evaluate; folders are staged in `outputs`."""
    material = _make_material(plan, processes, reporter)
    hashes = processes.from_main(lambda: _fingerprints(plan, reporter))
    teacher = _load(plan, plan.teacher)
    folder, adapter = outputs.enter_context(staged_with_adapter(plan.output, plan.adapter, processes))
    if processes.is_main:
        copy_tree(plan.student.folder, folder, plan.output.path)
    folders = TrainingFolders(folder, plan.training_folder, adapter)
    processes.wait_for_all()
    trained = train_folder(
        plan.training,
        plan.student.architecture,
        teacher,
        folders,
        plan.training.run_key(*hashes),
        request.options.resume,
        held_out_figures(plan.training, material, plan.tokenizer),
        processes,
        reporter,
    )
    release_memory(plan.device)
    evaluation = processes.from_main(
        lambda: None if material is None else _evaluate(plan, material, teacher, folder, reporter)
    )
    return folders, _report(plan, trained, evaluation, reporter)


def _describe(
    plan: RecoverPlan, request: RecoverRequest, folders: TrainingFolders, report: Report, reporter: StageReporter
) -> Report:
    """Verify the checkpoint and write down what was done; the report with what verification found."""
    folder, architecture = folders.checkpoint, plan.student.architecture
    (folder / "recipe.yaml").write_text(plan.recipe.to_yaml(), encoding="utf-8")
    if request.verify:
        report = replace(report, verification=_verify(plan, folder, reporter))
    report = replace(report, files=_records(plan, folder, reporter))
    write_json(folder / "compression.json", report.to_json())
    trust = plan.recipe.runtime.trust_remote_code
    place = CardPlace(
        plan.output.path.name, plan.student.folder, architecture.needs_fla, trust, architecture.loading_note
    )
    (folder / "README.md").write_text(render_model_card(card_facts(place, report)), encoding="utf-8")
    if plan.adapter is not None and folders.adapter is not None:
        describe_adapter(folders.adapter, plan.adapter, plan.output, plan.student, expanded(request.folder))
    return report


def _records(plan: RecoverPlan, folder: Path, reporter: StageReporter) -> dict[str, FileRecord]:
    """Of what was written anew; of a copy what the student's report has, since it may have been changed since then."""
    old = plan.report.files
    weights = {path.name for path in plan.student.checkpoint.index.files}
    anew = {*weights, RECIPE_FILE, *TRAINING_FILES}
    names = [
        name
        for name in own_files(folder, old)
        if name in anew or not (name in old or name in RECORDED_NOWHERE or is_weights(name))
    ]
    return {name: record for name, record in old.items() if name not in anew} | record_output(folder, names, reporter)


def _fingerprints(plan: RecoverPlan, reporter: StageReporter) -> list[str]:
    """Hashes of the student's and the teacher's weights.

    Raises:
        RequestError: the teacher's are not those that the folder was cut from, or the student's are not its slices.
    """
    indices = [source.checkpoint.index for source in (plan.student, plan.teacher)]
    total = sum(path.stat().st_size for index in indices for path in index.files)
    with reporter.stage("hashing", total, "bytes") as advance:
        student, teacher = (weights_sha256(index, advance) for index in indices)
    if teacher != plan.report.base_sha256:
        raise RequestError(
            f"the weights of {plan.called.words} are not those that {plan.student.checkpoint.folder.name} was cut "
            f"from; {plan.called.remedy}."
        )
    refuse_changed_cut(plan.student, plan.teacher, plan.report)
    refuse_changed_files(plan.student, student, plan.report)
    return [student, teacher]


def _load(plan: RecoverPlan, source: Source, folder: Path | None = None) -> PreTrainedModel:
    folder = folder or source.folder
    return load_model(source.architecture, folder, read_config(folder / CONFIG_FILE), plan.dtype, plan.device)


def _make_material(plan: RecoverPlan, processes: Processes, reporter: StageReporter) -> Material | None:
    """None where nothing is measured, and in processes that measure nothing: all do where training asks for figures."""
    if plan.evaluation is None or not (processes.is_main or plan.training.section.evaluate_every):
        return None
    with reporter.stage("prompts", plan.evaluation.num_prompts, "prompts") as advance:
        material = make_material(plan.evaluation, (), "", advance)
    for note in (*plan.evaluation.notes, *material.notes):
        reporter.say(f"note: {note}")
    return material


def _evaluate(
    plan: RecoverPlan, material: Material, teacher: PreTrainedModel, folder: Path, reporter: StageReporter
) -> EvaluationReport:
    """The teacher, the student as it was and the trained folder; as in the main run, but for the other norm epsilon."""
    if plan.evaluation is None:
        raise ValueError("the plan has no evaluation")
    widths, states = plan.report.key_dim, plan.report.state_bytes_per_sequence
    teacher_name = plan.teacher.checkpoint.folder.name
    with reporter.stage("evaluating", 2 * material.tokens(2)) as advance:
        _, first = _against_teacher(plan, material, teacher, plan.student.folder, advance)
        before, last = _against_teacher(plan, material, teacher, folder, advance)
    old = collect(teacher_name, widths.before, states.before, None, before.texts, before.tasks)
    untrained, new = (
        collect(name, widths.after, states.after, teacher_name, each.texts, each.tasks)
        for name, each in zip((plan.student.checkpoint.folder.name, plan.output.path.name), (first, last), strict=True)
    )
    return EvaluationReport(old, new, differences(old, new), {}, resolved_settings(plan.evaluation), untrained)


def _against_teacher(
    plan: RecoverPlan, material: Material, teacher: PreTrainedModel, folder: Path, advance: Advance
) -> tuple[Measured, Measured]:
    student = _load(plan, plan.student, folder)
    measured = compare(teacher, student, plan.tokenizer, material, advance)
    del student
    release_memory(plan.device)
    return measured


def _report(
    plan: RecoverPlan, trained: Trained, evaluation: EvaluationReport | None, reporter: StageReporter
) -> Report:
    old = plan.report
    refit = None if old.recovery is None else old.recovery.refit
    return replace(
        old,
        output_dir=str(plan.output.path),
        load_line=load_line(plan.student.architecture, plan.recipe.output_dir),
        recovery=RecoveryReport(refit, training_report(plan.training, trained)),
        evaluation=evaluation,
        verification=None,
        timings_s={name: round(seconds, 3) for name, seconds in reporter.seconds.items()},
    )


def _verify(plan: RecoverPlan, folder: Path, reporter: StageReporter) -> VerificationReport:
    tokens, original = plan.training.first_batch[0].tolist(), trained_original(plan.teacher, plan.report, plan.recipe)
    with reporter.stage("verifying", 1, "checkpoint") as advance:
        report = verify_folder(folder, plan.student.architecture, plan.device, tokens, original)
        advance(1)
    return report
