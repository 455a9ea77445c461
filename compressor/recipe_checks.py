"""What a recipe shows by itself to be impossible, before anything that it names is opened. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from compressor.adapter_checks import refuse_nested, refuse_no_adapter
from compressor.errors import RequestError
from compressor.evaluation_checks import refuse_impossible_evaluation
from compressor.export.folder import OutputFolder
from compressor.home_folders import expanded
from compressor.naming import Naming, key_of, keys_in
from compressor.recipe import Recipe
from compressor.selection.registry import get_selector_entry
from compressor.training_settings import refuse_idle_settings, training_settings
from compressor.whole_models import whole_model_problems


def refuse_impossible(recipe: Recipe, name: Naming = key_of, further: Sequence[str] = (), origin: str = "") -> None:
    """Every message calls a setting `name(setting)`; they and those of `further` problems begin with `origin`.

    Raises:
        RequestError: lists every part of the recipe that cannot be carried out by any machine.
    """
    problems = [*further, *whole_model_problems(recipe, name)]
    refusals = (_refuse_revision, _refuse_refit, _refuse_comparison, _refuse_training, _refuse_adapter)
    for refuse in (*refusals, _refuse_evaluation):
        problems += _problem(refuse, recipe, name)
    if problems:
        raise RequestError("\n".join(f"{origin}{problem}" for problem in problems))


def refuse_revision_without_model(model: str | None, revision: str | None, name: Naming) -> None:
    """Raises:
    RequestError: a revision of the bundled model is asked for.
    """
    if model is None and revision is not None:
        raise RequestError(
            f"{name('revision', revision)} belongs to a Hub model; name one, or leave it out for the bundled model."
        )


def _problem(refuse: Callable[[Recipe, Naming], None], recipe: Recipe, name: Naming) -> list[str]:
    try:
        refuse(recipe, name)
    except RequestError as error:
        return [str(error)]
    return []


def _cuts(recipe: Recipe) -> bool:
    return recipe.selection.ratio != 0


def _refuse_revision(recipe: Recipe, name: Naming) -> None:
    refuse_revision_without_model(recipe.model, recipe.revision, name)


def _refuse_refit(recipe: Recipe, name: Naming) -> None:
    if recipe.recovery.refit and _cuts(recipe) and recipe.calibration.samples == 1:
        raise RequestError(
            f"{name('calibration.samples', 1)} leaves none to choose the ridge of the refit by; give at least 2, or "
            f"{name('recovery.refit', False)}."
        )


def _refuse_comparison(recipe: Recipe, name: Naming) -> None:
    selection = recipe.selection
    compared = "norm_epsilon" if selection.norm_epsilon == "auto" else "method"
    several = selection.norm_epsilon == "auto" or get_selector_entry(selection.method).candidates
    # With a refit, that is what wants more samples.
    if several and not recipe.recovery.refit and _cuts(recipe) and recipe.calibration.samples == 1:
        asked = name(f"selection.{compared}", selection.model_dump()[compared])
        raise RequestError(
            f"{asked} compares several cuts and {name('calibration.samples', 1)} leaves none to compare them on; give "
            f"at least 2, or choose one {'norm epsilon' if compared == 'norm_epsilon' else 'method'}."
        )


def _refuse_training(recipe: Recipe, name: Naming) -> None:
    if not recipe.recovery.train or not _cuts(recipe):
        return
    training_settings(recipe.recovery, recipe.runtime.seed, name)
    refuse_idle_settings(recipe.recovery, recipe.export.evaluate, name)


def _refuse_adapter(recipe: Recipe, name: Naming) -> None:
    refuse_no_adapter(recipe.recovery, recipe.recovery.train and _cuts(recipe), name)
    if recipe.recovery.save_adapter is not None and recipe.output_dir is not None:
        given, output = map(expanded, (recipe.recovery.save_adapter, recipe.output_dir))
        adapter_path, output_path = (OutputFolder(place, overwrite=False).path for place in (given, output))
        refuse_nested(given, adapter_path, output_path, name)


def _refuse_evaluation(recipe: Recipe, name: Naming) -> None:
    # No option gives a setting of this section.
    if recipe.export.evaluate:
        refuse_impossible_evaluation(recipe.evaluation, recipe.evaluation.texts, keys_in("evaluation"))
