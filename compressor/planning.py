"""A run before it starts: all inputs opened, everything impossible refused."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from compressor.adapter_output import plan_adapter
from compressor.calibration.text import DocumentStream, TextSource, held_out_source, open_documents
from compressor.calibration.tokenizer import load_tokenizer
from compressor.calibration.tokens import PackedTokens, pack_tokens
from compressor.checkpoint.config_file import read_json_object
from compressor.context_length import refuse_sequences_beyond
from compressor.distilling import TrainingPlan, plan_training
from compressor.errors import RequestError
from compressor.export.companions import companion_files
from compressor.export.disk import refuse_too_little_space
from compressor.export.folder import OutputFolder
from compressor.home_folders import expanded
from compressor.large_models import activation_bytes, machine_problems
from compressor.link_plan import LinkPlan, plan_links
from compressor.loading import resolve_device, resolve_dtype
from compressor.material import EvaluationPlan, plan_evaluation
from compressor.naming import Naming, key_of, keys_in
from compressor.preparation import CutPlan, Source, choose_width, open_model, open_source, plan_cut
from compressor.recipe import CalibrationSection, Recipe
from compressor.recipe_checks import refuse_impossible
from compressor.recovery.refit import refuse_too_few_tokens
from compressor.retrieval_shares import too_small_share_note
from compressor.retrieval_tokens import calibration_forms, retrieval_sequences, with_retrieval
from compressor.selection.registry import candidate_methods
from compressor.shared_output import resume_folder_of
from compressor.texts_read import refuse_outputs_among, texts_of

HELD_OUT_SEQUENCES = 8
"""Sequences measured before and after, where the source leaves that many."""
HELD_OUT_TO_REFIT = 5
"""One in so many calibration sequences, the last ones, is not fitted on: it chooses the ridge and the norm epsilon."""
RETRIEVAL_SHARE = 0.5
"""Lowers KL on prompts of Gated DeltaNet models by a fifth and leaves text as it is (docs/experiments.md)."""
TOKENS_PER_CHANNEL = 10
"""Fewest calibration tokens for each key channel."""


@dataclass(frozen=True)
class RunOptions:
    """How a run treats what is on disk already; not part of the recipe, since it changes no result.

    `statistics` is a file that an earlier run saved to its `save_statistics`, of the same model and tokens. `name` is
    what errors call the recipe's settings.
    """

    resume: bool = False
    overwrite: bool = False
    statistics: Path | None = None
    save_statistics: Path | None = None
    name: Naming = key_of


@dataclass(frozen=True)
class RunPlan:
    """Opened inputs of a run. `recipe` has device, dtype, revision and output folder filled in.

    `name` is what errors call its settings. `left_out` are methods that one which tries several does without.
    """

    recipe: Recipe
    source: Source
    cut: CutPlan
    output: OutputFolder
    documents: DocumentStream
    tokenizer: PreTrainedTokenizerBase
    evaluation: EvaluationPlan | None
    training: TrainingPlan | None
    adapter: OutputFolder | None
    device: torch.device
    dtype: torch.dtype
    notes: tuple[str, ...]
    name: Naming
    left_out: tuple[str, ...] = ()

    @property
    def methods(self) -> tuple[str, ...]:
        """What is tried: the recipe's method, or those that it stands for; one alone where every channel is kept."""
        named = candidate_methods(self.recipe.selection.method, self.source.architecture.normalizes_keys)
        tried = tuple(method for method in named if method not in self.left_out)
        return tried[:1] if self.cut.keep == self.cut.key_dim.before else tried

    @property
    def compares(self) -> bool:
        """Whether several cuts may be made, of which what diverges least is written."""
        both = self.recipe.selection.norm_epsilon == "auto" and self.source.architecture.scales_by_width
        return self.cut.keep < self.cut.key_dim.before and (both or len(self.methods) > 1)

    @property
    def resume_folder(self) -> Path:
        return resume_folder_of(self.output)

    @property
    def training_folder(self) -> Path:
        return self.resume_folder / "training"

    @property
    def activations_folder(self) -> Path:
        """Of --low-memory: what layers give, between one layer and the next."""
        return self.resume_folder / "activations"

    @property
    def outputs(self) -> tuple[OutputFolder, ...]:
        """Every folder that the run writes, the checkpoint's first."""
        return (self.output,) if self.adapter is None else (self.output, self.adapter)

    def calibration_file(self, index: int, count: int) -> Path:
        """Of process `index` among `count`."""
        share = f"-{index + 1}-of-{count}" if count > 1 else ""
        return self.resume_folder / f"calibration{share}.safetensors"


def plan_run(recipe: Recipe, options: RunOptions) -> RunPlan:
    """Open everything a run reads and check everything it needs; writes nothing.

    What needs no weights is checked first, so that nothing large is downloaded for a request that
    cannot be met.

    Raises:
        RequestError: the request cannot be carried out.
    """
    name = options.name
    refuse_impossible(recipe, name, machine_problems(recipe, name))
    device = resolve_device(recipe.runtime.device, name)
    configured = open_model(recipe.model, recipe.revision)
    keep = choose_width(configured, recipe.selection, name)
    dtype = resolve_dtype(recipe.runtime.dtype, device, configured.architecture, name)
    output_dir = recipe.output_dir or f"{Path(configured.folder.name).name}-{recipe.selection.method}-{keep}"
    output = OutputFolder(expanded(output_dir), options.overwrite)
    output.check(configured.folder.path)
    trains = recipe.recovery.train and keep < configured.mixers[0].head_k_dim
    adapter = plan_adapter(recipe.recovery, output, configured.folder.path, trains, name)
    refuse_outputs_among(texts_of(recipe), (output, adapter))
    length = recipe.calibration.sequence_length
    refuse_sequences_beyond(length, name("calibration.sequence_length", length), configured.config)
    generation_config = configured.folder.path / "generation_config.json"
    if generation_config.exists():
        read_json_object(generation_config)
    tokenizer = load_tokenizer(configured.folder.path, recipe.runtime.trust_remote_code)
    recipe, share_notes = _with_retrieval_share(recipe, tokenizer, name)
    documents = open_documents(_text_source(recipe.calibration))
    evaluation = _plan_evaluation(recipe, configured.config, tokenizer) if recipe.export.evaluate else None
    companion_files(configured.folder.path)
    source = open_source(configured)
    cut = plan_cut(source, recipe, keep, name)
    if recipe.recovery.refit and keep < cut.key_dim.before:
        _refuse_too_little_to_refit(recipe.calibration, source, name)
    links = plan_links(source, keep, output.path) if recipe.export.link else LinkPlan(0, ())
    activations = activation_bytes(recipe.calibration, configured.config, dtype)
    refuse_too_little_space(output.path, max(cut.output_bytes - links.shared_bytes, activations))
    resolved = recipe.model_copy(
        update={
            "revision": configured.folder.revision,
            "output_dir": output_dir,
            "runtime": recipe.runtime.model_copy(
                update={"device": str(device), "dtype": str(dtype).removeprefix("torch.")}
            ),
        }
    )
    notes = (*source.checkpoint.notes, *share_notes, *links.notes, *(() if evaluation is None else evaluation.notes))
    training = _plan_training(recipe, source, cut, tokenizer, name)
    return RunPlan(
        resolved, source, cut, output, documents, tokenizer, evaluation, training, adapter, device, dtype, notes, name
    )


def _with_retrieval_share(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, name: Naming
) -> tuple[Recipe, tuple[str, ...]]:
    """The recipe with its share of retrieval prompts filled in, and what to say where there are none in spite of it."""
    calibration = recipe.calibration
    notes: tuple[str, ...] = ()
    share = RETRIEVAL_SHARE if calibration.retrieval_share is None else calibration.retrieval_share
    filled = calibration.model_copy(update={"retrieval_share": share})
    try:
        if filled.retrieval_samples:
            calibration_forms(tokenizer, calibration.sequence_length, name)
        elif share:
            notes = (too_small_share_note(share, calibration.samples, name),)
            # Parts that look for prompts among the sequences would look for none that are there.
            filled = calibration.model_copy(update={"retrieval_share": 0.0})
    except RequestError as refusal:
        if calibration.retrieval_share is not None:
            raise
        filled = calibration.model_copy(update={"retrieval_share": 0.0})
        notes = (f"calibrated on text alone: {refusal}",)
    return recipe.model_copy(update={"calibration": filled}), notes


def _plan_evaluation(recipe: Recipe, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> EvaluationPlan:
    section, seed = recipe.evaluation, recipe.runtime.seed
    return plan_evaluation(section, config, tokenizer, seed, section.texts, name=keys_in("evaluation"))


def _plan_training(
    recipe: Recipe, source: Source, cut: CutPlan, tokenizer: PreTrainedTokenizerBase, name: Naming
) -> TrainingPlan | None:
    if not recipe.recovery.train or cut.keep == cut.key_dim.before:
        return None
    recovery, seed = recipe.recovery, recipe.runtime.seed
    return plan_training(recovery, recipe.calibration, source.architecture, cut.cut_config, tokenizer, seed, name)


def held_out_to_refit(sequences: int, retrieval_share: float) -> int:
    """How many of the calibration sequences a refit does not see: text and prompts, where both are among them.

    At most half, so that a rare kind does not leave next to nothing to fit.
    """
    rarer = min(retrieval_share, 1 - retrieval_share)
    least = math.ceil(1 / rarer) if rarer else 1
    return min(max(least, sequences // HELD_OUT_TO_REFIT), (sequences + 1) // 2, sequences - 1)


def pack_plan_tokens(plan: RunPlan) -> PackedTokens:
    """The calibration and held-out tokens of a plan: text, and retrieval prompts for the recipe's share of the samples.

    Raises:
        RequestError: the source has too few tokens, or none that the model knows; or one sequence, where some are held
            out to judge by.
    """
    request, seed = plan.recipe.calibration, plan.recipe.runtime.seed
    vocab_size = plan.source.config.get_text_config(decoder=True).vocab_size
    text = pack_tokens(
        plan.documents,
        plan.tokenizer,
        request.samples - request.retrieval_samples,
        request.sequence_length,
        HELD_OUT_SEQUENCES if plan.recipe.export.evaluate else 0,
        seed,
        vocab_size=vocab_size,
        minimum_tokens=TOKENS_PER_CHANNEL * plan.cut.key_dim.before,
        other_samples=request.retrieval_samples,
        held_out_source=held_out_source(_text_source(request)),
        remedy=f"raise {plan.name('calibration.samples')} or {plan.name('calibration.sequence_length')}",
    )
    packed = text
    if request.retrieval_samples:
        retrieval = retrieval_sequences(
            plan.tokenizer, vocab_size, request.retrieval_samples, request.sequence_length, seed
        )
        packed = with_retrieval(text, retrieval)
    _refuse_nothing_to_judge_by(plan, packed.calibration)
    return packed


def _refuse_nothing_to_judge_by(plan: RunPlan, sequences: Sequence[Tensor]) -> None:
    """A text may give fewer sequences than it was asked for."""
    if (
        len(sequences) > 1
        or not (plan.recipe.recovery.refit or plan.compares)
        or plan.cut.keep == plan.cut.key_dim.before
    ):
        return
    instead = "" if plan.compares else f", or give {plan.name('recovery.refit', False)}"
    raise RequestError(
        f"the calibration source {plan.recipe.calibration.source} has 1 sequence of "
        f"{plan.name('calibration.sequence_length', plan.recipe.calibration.sequence_length)} and cuts are judged by "
        f"another; use a longer text or a shorter sequence{instead}."
    )


def _refuse_too_little_to_refit(request: CalibrationSection, source: Source, name: Naming) -> None:
    held_out = held_out_to_refit(request.samples, request.retrieval_share or 0.0)
    fitted = request.samples - held_out
    remedy = f"raise {name('calibration.samples')}, or give {name('recovery.refit', False)}"
    length = request.sequence_length
    refuse_too_few_tokens(fitted * length, held_out * length, source.mixers, remedy)


def _text_source(request: CalibrationSection) -> TextSource:
    return TextSource(name=request.source, column=request.column, config=request.config, split=request.split)
