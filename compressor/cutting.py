"""The cut of a run: channels chosen, the smaller checkpoint written and refitted; of several, the best one stays."""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from compressor.choosing import Choice, Original, Try, choose_channels, tries
from compressor.data_parallel import Processes
from compressor.export.sizes import parse_size
from compressor.fisher.memory import TooLittleMemoryError
from compressor.planning import RunPlan
from compressor.progress import StageReporter
from compressor.recipe import NormEpsilon
from compressor.refitting import Policies, Recovered, divide_tokens, recover_cut, write_recovered
from compressor.report import CandidateReport, LayerReport, SelectionReport
from compressor.writing import write_checkpoint


@dataclass(frozen=True, slots=True)
class WrittenCut:
    """What was written and what was tried; `layers` in the main process alone. `recovered` is of the written channels,
    None where there was nothing to win back or to choose. `notes` say what was left out and why."""

    method: str
    policy: NormEpsilon
    layers: list[LayerReport]
    recovered: Recovered | None
    selection: SelectionReport
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Tried:
    """A choice and what became of it; `recovered` None: nothing was refitted or compared."""

    choice: Choice
    policies: Sequence[NormEpsilon]
    recovered: Recovered | None

    @property
    def kl(self) -> float:
        return math.inf if self.recovered is None else self.recovered.chosen.kl_after

    @property
    def policy(self) -> NormEpsilon:
        return self.policies[0] if self.recovered is None else self.recovered.policy

    def figures(self) -> list[CandidateReport]:
        """One entry a norm epsilon, none of them marked as written."""
        found = []
        for policy in self.policies if self.recovered is not None else self.policies[:1]:
            kl = None if self.recovered is None else self.recovered.candidates[policy]
            before, after = (None, None) if kl is None else (kl.kl_before, kl.kl_after)
            cost = (self.choice.passes, round(self.choice.seconds, 3))
            found.append(CandidateReport(self.choice.method, policy, before, after, *cost, False))
        return found


def write_cut(
    plan: RunPlan,
    policies: Policies,
    original: Original,
    folder: Path,
    processes: Processes,
    reporter: StageReporter,
) -> WrittenCut:
    """Write the checkpoint into the empty `folder`; the main process does, and all refit it together.

    Where there are several choices, each is written and refitted in its turn, and the least divergence stays; those
    that run the model do not see the sequences that are held out to compare them. What then has too little memory is
    left out where another choice is left: planning knew less of what else would be in memory.

    Raises:
        RequestError: too few tokens to refit; a `TooLittleMemoryError` where no choice is left.
        RunError: a choice that cannot be certified; activations or divergences that are NaN or infinite.
    """
    asked = tries(plan, policies.allowed)
    whole = plan.cut.keep == plan.cut.key_dim.before
    divided = divide_tokens(original.sequences, plan.recipe.calibration.retrieval_share or 0.0)
    compared = len(asked) > 1 or len(policies.allowed) > 1
    # A choice made on the sequences that judge it would be judged too well.
    seen = replace(original, sequences=divided.fit) if compared else original
    judged = not whole and (plan.recipe.recovery.refit or compared)
    figures: list[CandidateReport] = []
    refusals: dict[Try, TooLittleMemoryError] = {}
    best = last = None
    passes = seconds = 0.0
    for each in asked:
        try:
            choice = choose_channels(plan, each, seen, processes, reporter)
        except TooLittleMemoryError as refusal:
            refusals[each] = refusal
            continue
        passes, seconds = passes + choice.passes, seconds + choice.seconds
        _write(plan, choice, folder, reporter)
        recovered = (
            recover_cut(plan, each.policies, original.model, folder, divided, processes, reporter) if judged else None
        )
        last = _Tried(choice, each.policies, recovered)
        figures += last.figures()
        # What the others would have been written with is not kept: it may be gigabytes.
        best = last if best is None or last.kl < best.kl else best
    if best is None:
        raise list(refusals.values())[-1]
    if best is not last:
        _write(plan, best.choice, folder, reporter)
    if processes.is_main and best.recovered is not None:
        write_recovered(folder, best.recovered)
    written = (best.choice.method, best.policy)
    candidates = [replace(cut, written=(cut.method, cut.norm_epsilon) == written) for cut in figures]
    report = SelectionReport(plan.recipe.selection.method, candidates, passes, round(seconds, 3))
    notes = tuple(f"the method {each.method} was not tried: {refusal}" for each, refusal in refusals.items())
    return WrittenCut(*written, best.choice.layers, best.recovered, report, tuple(dict.fromkeys(notes)))


def _write(plan: RunPlan, choice: Choice, folder: Path, reporter: StageReporter) -> None:
    """In the main process, which has the channels; what was there is the cut of another choice."""
    if choice.selection is None:
        return
    # Files are not written over: a model that was loaded may still have them mapped.
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    with reporter.stage("writing", plan.cut.output_bytes, "bytes") as advance:
        max_shard_bytes = parse_size(plan.recipe.export.max_shard_size)
        write_checkpoint(
            folder, plan.source, plan.cut, choice.selection, max_shard_bytes, advance, plan.recipe.export.link
        )
