"""`compress sweep`: cuts of one model by several methods, to several widths, from one calibration."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from compressor.artifacts import Selection, write_json
from compressor.calibrating import refuse_statistics_files
from compressor.checkpoint.config_file import read_json_object
from compressor.data_parallel import Processes, join_processes
from compressor.distilling import TrainingFolders, UntrainableCutError, check_student
from compressor.errors import RequestError
from compressor.export.disk import refuse_too_little_space
from compressor.export.folder import OutputFolder
from compressor.kept_cuts import KeptCuts, cut_key, kept_cuts
from compressor.loading import release_memory
from compressor.making import describe_checkpoint, make_checkpoint
from compressor.needed_statistics import refuse_beyond_memory
from compressor.planning import RunOptions, RunPlan, plan_run
from compressor.preparation import plan_cut
from compressor.progress import StageReporter
from compressor.recipe import Recipe
from compressor.refitting import Policies
from compressor.session import Session, needed_by, open_session
from compressor.shared_output import held, remove_resume_folder, staged_by_main
from compressor.sweep_recipes import sweep_recipes
from compressor.sweep_results import FIGURE_FILE, RESULT_FILE, Sweep, SweepRecord, collect_sweep, draw_sweep, record_cut
from compressor.training_settings import refuse_processes
from compressor.width import kept_width


@dataclass(frozen=True)
class SweepRequest:
    """What `compress sweep` was asked.

    `settings` are a recipe's, nested, without method and width. `table_only` keeps no checkpoint.
    """

    settings: Mapping[str, Any]
    ratios: tuple[float, ...]
    methods: tuple[str, ...]
    output_dir: Path
    table_only: bool
    options: RunOptions


@dataclass(frozen=True)
class SweepPlan:
    """`base` has the output folder of all, `cuts` those inside it; `kept` are the finished ones, beside it."""

    base: RunPlan
    cuts: tuple[RunPlan, ...]
    kept: KeptCuts


def plan_sweep(request: SweepRequest) -> SweepPlan:
    """Open what all cuts read, once, and refuse what one of them cannot have; writes nothing.

    Raises:
        RequestError: the request cannot be carried out.
    """
    name = request.options.name
    recipes = sweep_recipes(request.settings, request.ratios, request.methods, request.output_dir, name)
    with _naming_cut(recipes[0]):
        base = plan_run(recipes[0], request.options)
    cuts: dict[tuple[str, int], RunPlan] = {}
    for recipe in recipes:
        plan = _plan_of(base, recipe, request.options)
        method, keep = recipe.selection.method, plan.cut.keep
        if (method, keep) in cuts:
            other = cuts[method, keep].recipe.selection.ratio
            raise RequestError(
                f"--ratios {other} and {recipe.selection.ratio} both keep {keep} of {plan.cut.key_dim.before} key "
                "channels; leave one out, or give a smaller --round-to."
            )
        refuse_beyond_memory(plan, method, request.options)
        cuts[method, keep] = plan
    kept = kept_cuts(base, list(cuts.values()), request.table_only)
    _refuse_too_little_space(base, list(cuts.values()), kept, request.table_only)
    refuse_statistics_files(base, request.options, needed_by(list(cuts.values())))
    return SweepPlan(base, tuple(cuts.values()), kept)


def _refuse_too_little_space(base: RunPlan, cuts: Sequence[RunPlan], kept: KeptCuts, table_only: bool) -> None:
    """Of the cuts that will be there at once, and of what the training of each writes beside them."""
    sizes = [plan.cut.output_bytes for plan in cuts]
    required = max(sizes) if table_only else max(0, sum(sizes) - kept.finished_bytes())
    refuse_too_little_space(base.output.path, required)
    for plan in cuts:
        if plan.training is not None:
            settings, space = plan.training.training, replace(plan.training.space, output_bytes=required)
            try:
                space.refuse_too_little(base.training_folder, settings.steps, settings.checkpoint_every)
            except RequestError as error:
                raise _of_cut(plan.recipe, error) from error


@contextmanager
def _naming_cut(recipe: Recipe) -> Iterator[None]:
    """Where the cut that `recipe` asks for cannot be trained as asked, say which one of the sweep it is."""
    try:
        yield
    except UntrainableCutError as error:
        raise _of_cut(recipe, error) from error


def _of_cut(recipe: Recipe, error: RequestError) -> RequestError:
    return RequestError(f"ratio {recipe.selection.ratio}, method {recipe.selection.method}: {error}")


def sweep(request: SweepRequest, console: Console | None = None) -> Sweep:
    """Make every cut, measure it and write the results; the whole of `compress sweep`.

    Raises:
        RequestError: the request cannot be met; nothing was written.
        RunError: the run failed; the output folder is as it was before, and --resume makes only the cuts that are not
            finished.
    """
    name = request.options.name
    processes = join_processes(str(request.settings.get("runtime", {}).get("device", "auto")), name)
    reporter = StageReporter(console if processes.is_main else None)
    with processes.failing_together():
        plan = plan_sweep(request)
        if plan.base.training is not None:
            refuse_processes(plan.base.training.training, processes.count, name)
        for note in plan.base.notes:
            reporter.say(f"note: {note}")
        saved = [plan.base.calibration_file(index, processes.count) for index in range(processes.count)]
        with held((plan.base.output,), [*saved, *plan.kept.record_files()], processes):
            processes.from_main(lambda: plan.kept.refuse_others(request.options.resume))
            result = _run(plan, request, processes, reporter)
            if processes.is_main:
                trained = ["training"] if plan.base.recipe.recovery.train else []
                remove_resume_folder(plan.base.output, ["calibration", "cuts", *trained])
        processes.wait_for_all()
    return result


def _run(plan: SweepPlan, request: SweepRequest, processes: Processes, reporter: StageReporter) -> Sweep:
    session = open_session([plan.base, *plan.cuts], request.options, processes, reporter)
    keys, finished = processes.from_main(lambda: _finished(plan, request, session, processes.count))
    with plan.kept.told(reporter), staged_by_main(plan.base.output, processes) as folder:
        records: list[SweepRecord] = []
        for cut, policies, key, found in zip(plan.cuts, session.policies[1:], keys, finished, strict=True):
            known = "" if found is None else ", finished before"
            reporter.say(f"{cut.output.path.name}: cut {len(records) + 1} of {len(plan.cuts)}{known}")
            if found is None:
                found = _make(plan, cut, policies, key, session, folder, request, processes, reporter)
            records.append(found)
        return processes.from_main(lambda: _write(plan, request, records, folder, reporter))


def _finished(
    plan: SweepPlan, request: SweepRequest, session: Session, processes: int
) -> tuple[list[str], list[SweepRecord | None]]:
    """The key of every cut, and the record of those that an interrupted sweep has made already."""
    settings = plan.kept.settings
    pairs = zip(plan.cuts, settings.values(), strict=True)
    keys = [cut_key(cut, session, its_settings, processes) for cut, its_settings in pairs]
    found = [plan.kept.load(name, key, not request.table_only) for name, key in zip(settings, keys, strict=True)]
    return keys, found


def _make(
    plan: SweepPlan,
    cut: RunPlan,
    policies: Policies,
    key: str,
    session: Session,
    folder: Path,
    request: SweepRequest,
    processes: Processes,
    reporter: StageReporter,
) -> SweepRecord:
    """One cut, made in `folder` and kept beside the output when it is finished."""
    place, own = folder / cut.output.path.name, reporter.for_part()
    processes.from_main(place.mkdir)
    folders = TrainingFolders(place, plan.base.training_folder, None)
    made = make_checkpoint(cut, policies, session, folders, request.options, processes, own)
    # Evaluation had the original and the cut in memory, and verification needs no more.
    release_memory(cut.device)

    def keep() -> SweepRecord:
        report = describe_checkpoint(made, own, verify=not request.table_only)
        selection = Selection.from_json(read_json_object(place / "selection.json"))
        record = record_cut(report, selection, request.table_only)
        if request.table_only:
            shutil.rmtree(place)
        plan.kept.keep(place.name, key, record, None if request.table_only else place)
        return record

    record = processes.from_main(keep)
    processes.wait_for_all()
    return record


def _write(
    plan: SweepPlan, request: SweepRequest, records: Sequence[SweepRecord], folder: Path, reporter: StageReporter
) -> Sweep:
    result = collect_sweep(records, plan.base.output.path, reporter.seconds)
    write_json(folder / RESULT_FILE, result.to_json())
    draw_sweep(result, folder / FIGURE_FILE)
    if not request.table_only:
        plan.kept.put_into(folder, plan.base.output.path)
    return result


def _plan_of(base: RunPlan, recipe: Recipe, options: RunOptions) -> RunPlan:
    """What `base` opened, for the method and width of `recipe` and a folder of their names."""
    selection = recipe.selection
    keep = kept_width(base.cut.key_dim.before, selection.ratio, None, selection.round_to, base.name)
    place = base.output.path / f"{selection.method}-{keep}"
    resolved = base.recipe.model_copy(update={"selection": selection, "output_dir": str(place)})
    cut, training = plan_cut(base.source, resolved, keep, base.name), base.training
    if training is not None:
        with _naming_cut(recipe):
            _, space = check_student(base.source.architecture, cut.cut_config, training.student)
        training = replace(training, space=space)
    return replace(base, recipe=resolved, cut=cut, output=OutputFolder(place, options.overwrite), training=training)
