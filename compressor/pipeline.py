"""The stages of a run, composed: plan, calibrate, select, write, evaluate, verify."""

from __future__ import annotations

from contextlib import ExitStack

from rich.console import Console

from compressor.adapter_output import staged_with_adapter
from compressor.calibrating import refuse_statistics_files
from compressor.data_parallel import Processes, join_processes
from compressor.distilling import TrainingFolders
from compressor.loading import release_memory
from compressor.making import Made, describe_checkpoint, make_checkpoint
from compressor.needed_statistics import within_memory
from compressor.planning import RunOptions, RunPlan, plan_run
from compressor.progress import StageReporter
from compressor.recipe import Recipe
from compressor.report import Report
from compressor.session import needed_by, open_session
from compressor.shared_output import held, remove_resume_folder
from compressor.training_settings import refuse_processes


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
    processes = join_processes(recipe.runtime.device, options.name)
    reporter = StageReporter(console if processes.is_main else None)
    with processes.failing_together():
        plan = checked_plan(recipe, options, processes)
        if plan.training is not None:
            refuse_processes(plan.training.training, processes.count, options.name)
        for note in (*plan.notes, *plan.cut.engine_warnings):
            reporter.say(f"note: {note}")
        calibrations = (plan.calibration_file(index, processes.count) for index in range(processes.count))
        with held(plan.outputs, (*calibrations, plan.training_folder), processes):
            if plan.training is not None:
                plan.training.refuse_checkpoints(plan.training_folder, options.resume)
            report = _run_locked(plan, options, processes, reporter)
            if processes.is_main:
                remove_resume_folder(plan.output, ["calibration", *(["training"] if plan.training is not None else [])])
        processes.wait_for_all()
    return report


def checked_plan(recipe: Recipe, options: RunOptions, processes: Processes) -> RunPlan:
    """`plan_run`, and what else is refused before anything large is loaded.

    Raises:
        FailedElsewhereError: another process failed.
        RequestError: the request cannot be carried out, by the memory there is or with the statistics handed in.
    """
    plan = within_memory(plan_run(recipe, options), options, processes)
    refuse_statistics_files(plan, options, needed_by([plan]))
    return plan


def _run_locked(plan: RunPlan, options: RunOptions, processes: Processes, reporter: StageReporter) -> Report:
    with ExitStack() as outputs:
        # The original is released with the end of this function: verification loads models of its own.
        made = _make(plan, options, outputs, processes, reporter)
        release_memory(plan.device)
        return processes.from_main(lambda: describe_checkpoint(made, reporter))


def _make(
    plan: RunPlan, options: RunOptions, outputs: ExitStack, processes: Processes, reporter: StageReporter
) -> Made:
    """Calibrate, cut, train and evaluate; folders are staged in `outputs`."""
    session = open_session([plan], options, processes, reporter)
    folder, adapter = outputs.enter_context(staged_with_adapter(plan.output, plan.adapter, processes))
    folders = TrainingFolders(folder, plan.training_folder, adapter)
    return make_checkpoint(plan, session.policies[0], session, folders, options, processes, reporter)
