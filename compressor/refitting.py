"""The stage `refit` of a run: a written cut, refitted to the original, under each norm epsilon that may be chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from compressor.calibration.norm_check import refuse_epsilon_near_other_norms
from compressor.calibration.tokens import TokenBatch, batches
from compressor.checkpoint.config_file import CONFIG_FILE, dump_config, read_config
from compressor.checkpoint.headers import read_headers
from compressor.data_parallel import Processes
from compressor.errors import RequestError
from compressor.evaluation.forward import forward_tokens
from compressor.export.replacement import replace_tensors
from compressor.loading import release_memory
from compressor.placing import load_placed
from compressor.planning import RunPlan, held_out_to_refit
from compressor.preparation import CutPlan, plan_cut
from compressor.progress import Advance, StageReporter
from compressor.recipe import NormEpsilon
from compressor.recovery.refit import Refit, RefitPair, layer_tokens, refit, refuse_too_few_tokens
from compressor.recovery.ridge import NormalEquations


@dataclass(frozen=True, slots=True, eq=False)
class RefitTokens:
    """The calibration sequences, divided."""

    fit: tuple[Tensor, ...]
    held_out: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Policies:
    """The norm epsilons that may be written. `smallest_mean_square` is what the other norms' inputs leave room for."""

    allowed: tuple[NormEpsilon, ...]
    smallest_mean_square: float | None
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """The cut under one norm epsilon. `refit` None: output projections as cut.

    `kl_before` and `kl_after` are KL(original || cut) in nats a token on the held-out calibration sequences, without
    and with the refit.
    """

    cut: CutPlan
    refit: Refit | None
    kl_before: float
    kl_after: float

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        return {} if self.refit is None else self.refit.tensors


@dataclass(frozen=True, slots=True, eq=False)
class Recovered:
    """What the folder holds now, and its channels under each norm epsilon that was tried with them."""

    policy: NormEpsilon
    candidates: Mapping[NormEpsilon, Candidate]
    fit_tokens: int
    held_out_tokens: int

    @property
    def chosen(self) -> Candidate:
        return self.candidates[self.policy]


def divide_tokens(sequences: Sequence[Tensor], retrieval_share: float) -> RefitTokens:
    """The last ones are held out; text and retrieval prompts are mixed evenly, so both are among them."""
    fitted = len(sequences) - held_out_to_refit(len(sequences), retrieval_share)
    return RefitTokens(tuple(sequences[:fitted]), tuple(sequences[fitted:]))


def allowed_policies(plan: RunPlan, model: PreTrainedModel, batch: TokenBatch) -> Policies:
    """What the recipe's norm epsilon comes to: both where it leaves the choice and the other norms do not mind.

    Raises:
        RequestError: a scaled epsilon is asked for that other norms of the model would feel.
    """
    asked = plan.recipe.selection.norm_epsilon
    if asked == "keep":
        return Policies(("keep",), None, ())
    try:
        scaled = _with_policy(plan, "scaled")
        smallest = refuse_epsilon_near_other_norms(
            plan.source.architecture, model, batch, scaled.norm_epsilon[1], plan.name
        )
    except RequestError as refusal:
        if asked == "scaled":
            raise
        return Policies(("keep",), None, (f"norm epsilon scaled was not tried: {refusal}",))
    return Policies(("scaled",) if asked == "scaled" else ("keep", "scaled"), smallest, ())


def recover_cut(
    plan: RunPlan,
    policies: Sequence[NormEpsilon],
    original: PreTrainedModel,
    folder: Path,
    tokens: RefitTokens,
    processes: Processes,
    reporter: StageReporter,
) -> Recovered:
    """Refit the cut in `folder` under each of `policies`, of which the one that diverges less is chosen.

    Every process computes with its share of the tokens; all come to the same. The folder keeps its tensors: see
    `write_recovered`.

    Raises:
        RequestError: too few tokens.
        RunError: activations or divergences are NaN or infinite.
    """
    batch_size = plan.recipe.calibration.batch_size
    fit, held_out = (list(batches(part, batch_size)) for part in (tokens.fit, tokens.held_out))
    counted = [_count(fit), _count(held_out)]
    units = 0
    if plan.recipe.recovery.refit:
        remedy = f"raise {plan.name('calibration.samples')}, or give {plan.name('recovery.refit', False)}"
        refuse_too_few_tokens(counted[0], counted[1], plan.source.mixers, remedy)
        units = layer_tokens(plan.source.mixers, _count(processes.share(fit)) + _count(processes.share(held_out)))
    elif not counted[1]:
        raise RequestError(
            "several cuts are compared on 0 held-out tokens and at least 1 is needed; raise "
            f"{plan.name('calibration.samples')}."
        )
    with reporter.stage("refitting", max(units, 1) * len(policies)) as advance:
        candidates = {
            policy: _candidate(plan, policy, original, folder, fit, held_out, processes, advance) for policy in policies
        }
    best = min(candidates, key=lambda policy: candidates[policy].kl_after)
    return Recovered(best, candidates, counted[0], counted[1])


def write_recovered(folder: Path, recovered: Recovered) -> None:
    """Put the chosen norm epsilon and refit into the folder of the cut."""
    _write_config(folder, recovered.chosen.cut)
    replace_tensors(folder, recovered.chosen.tensors)


def resolved_plan(plan: RunPlan, method: str, policy: NormEpsilon) -> RunPlan:
    """The plan with the method and the norm epsilon that were chosen."""
    selection = plan.recipe.selection.model_copy(update={"method": method, "norm_epsilon": policy})
    return replace(plan, recipe=plan.recipe.model_copy(update={"selection": selection}), cut=_with_policy(plan, policy))


def _with_policy(plan: RunPlan, policy: NormEpsilon) -> CutPlan:
    selection = plan.recipe.selection.model_copy(update={"norm_epsilon": policy})
    return plan_cut(plan.source, plan.recipe.model_copy(update={"selection": selection}), plan.cut.keep, plan.name)


def _candidate(
    plan: RunPlan,
    policy: NormEpsilon,
    original: PreTrainedModel,
    folder: Path,
    fit: Sequence[TokenBatch],
    held_out: Sequence[TokenBatch],
    processes: Processes,
    advance: Advance,
) -> Candidate:
    """The cut as it is in `folder`, under `policy`; the folder keeps its tensors and gets that policy's config."""
    cut, architecture = _with_policy(plan, policy), plan.source.architecture
    if processes.is_main:
        _write_config(folder, cut)
    processes.wait_for_all()
    compressed = load_placed(plan, folder, read_config(folder / CONFIG_FILE))
    fit, held_out = processes.share(fit), processes.share(held_out)
    sequences = [row for batch in held_out for row in batch.input_ids]

    def divergence(model: PreTrainedModel) -> float:
        size = plan.recipe.calibration.batch_size
        figures = forward_tokens(model, sequences, size, original) if sequences else []
        values = [figure.kl for figure in figures if figure.kl is not None]
        total = torch.tensor(sum(float(kl.double().sum()) for kl in values), dtype=torch.float64)
        summed = processes.summed(_Divergences(total, sum(len(kl) for kl in values)))
        return float(summed.kl) / summed.tokens

    if not plan.recipe.recovery.refit:
        kl = divergence(compressed)
        advance(1)
        candidate = Candidate(cut, None, kl, kl)
    else:
        entries = read_headers(folder).entries
        mixers = architecture.mixers(compressed.config, list(entries))
        names = [architecture.output_projection_tensor(mixer) for mixer in mixers]
        dtypes = {name: entries[name].torch_dtype for name in names}
        pair = RefitPair(architecture, original, compressed, mixers, dtypes)
        result = refit(pair, fit, held_out, divergence, advance, lambda sums: _add_up(sums, processes))
        kl_after = result.kl_before if result.kept_old else result.kl_after
        candidate = Candidate(cut, result, result.kl_before, kl_after)
    del compressed
    release_memory(plan.device)
    return candidate


@dataclass(frozen=True, slots=True, eq=False)
class _Divergences:
    """Sum over `tokens` tokens, float64."""

    kl: Tensor
    tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class _Equations:
    """What `NormalEquations` sums."""

    gram: Tensor
    cross: Tensor
    error: Tensor
    energy: Tensor
    tokens: int


def _add_up(sums: NormalEquations, processes: Processes) -> None:
    total = processes.summed(_Equations(sums.gram, sums.cross, sums.error, sums.energy, sums.tokens))
    sums.gram, sums.cross, sums.error, sums.energy = total.gram, total.cross, total.error, total.energy
    sums.tokens = total.tokens


def _count(token_batches: Sequence[TokenBatch]) -> int:
    return sum(batch.num_tokens for batch in token_batches)


def _write_config(folder: Path, cut: CutPlan) -> None:
    (folder / CONFIG_FILE).write_text(dump_config(dict(cut.cut_config)), encoding="utf-8")
