"""The recipe: strict, every mistake at once, the same defaults from file, command and Python."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from compressor.errors import RequestError
from compressor.flat_settings import nest_flat_settings
from compressor.recipe import Recipe
from compressor.recipe_file import load_settings

RECIPES = sorted((Path(__file__).parents[1] / "recipes").glob("*.yaml"))


def test_every_mistake_is_reported() -> None:
    settings = {
        "model": "m",
        "selection": {"ratio": 1.2, "mehtod": "drrqr", "f": 0.5},
        "calibration": {"samples": 0, "sequence_length": "long"},
        "extra": 1,
    }
    with pytest.raises(RequestError) as caught:
        Recipe.from_settings(settings, "my.yaml")
    lines = str(caught.value).splitlines()
    assert len(lines) == 6
    assert all(line.startswith("my.yaml: ") for line in lines)
    text = "\n".join(lines)
    assert "selection.ratio: Input should be less than 1 (got 1.2)" in text
    assert "selection.mehtod is not a setting; did you mean method?" in text
    assert "selection.f: Input should be greater than or equal to 1 (got 0.5)" in text
    assert "calibration.samples" in text
    assert "calibration.sequence_length" in text
    assert "extra is not a setting" in text


@pytest.mark.parametrize("ratio", [-0.1, 1.0, 1.5, float("nan")])
def test_ratio_outside_its_range(ratio: float) -> None:
    with pytest.raises(RequestError, match=r"selection\.ratio"):
        Recipe.from_settings({"selection": {"ratio": ratio}})


@pytest.mark.parametrize(
    "selection", [{}, {"ratio": 0.5, "target_dim": 64}, {"ratio": 0.5, "target_state_bytes": "1MB"}]
)
def test_exactly_one_width(selection: dict[str, object]) -> None:
    fields = r"selection\.ratio .*, selection\.target_dim .* and selection\.target_state_bytes"
    with pytest.raises(RequestError, match=f"give exactly one of {fields}"):
        Recipe.from_settings({"selection": selection})


def test_unknown_method_names_the_nearest() -> None:
    with pytest.raises(RequestError, match=r"Unknown method 'drqr': did you mean drrqr\?"):
        Recipe.from_settings({"selection": {"ratio": 0.5, "method": "drqr"}})


def test_scoring_of_a_method_without_scores() -> None:
    with pytest.raises(RequestError, match="means nothing to the method random"):
        Recipe.from_settings({"selection": {"ratio": 0.5, "method": "random", "scoring": "k"}})


def test_demo_is_calibrated_on_its_own_text() -> None:
    assert Recipe.from_settings({"selection": {"ratio": 0.5}}).calibration.source == "demo"
    named = Recipe.from_settings({"model": "m", "selection": {"ratio": 0.5}}).calibration
    assert (named.source, named.config, named.samples) == ("HuggingFaceFW/fineweb", "sample-10BT", 128)
    other = Recipe.from_settings({"model": "m", "selection": {"ratio": 0.5}, "calibration": {"source": "x.txt"}})
    assert other.calibration.config is None


def test_sizes_are_checked_with_the_rest() -> None:
    with pytest.raises(RequestError, match="size 'abc' is not a number of bytes"):
        Recipe.from_settings({"selection": {"ratio": 0.5}, "export": {"max_shard_size": "abc"}})


def test_yaml_round_trip(tmp_path: Path) -> None:
    recipe = Recipe.from_settings({"model": "m", "selection": {"target_dim": 48, "norm_epsilon": "scaled"}})
    file = tmp_path / "recipe.yaml"
    file.write_text(recipe.to_yaml())
    assert Recipe.from_settings(load_settings(file)) == recipe


def test_flat_settings_replace_those_of_a_file() -> None:
    base = {"model": "m", "selection": {"ratio": 0.5, "f": 2.0}, "calibration": {"source": "a.txt"}}
    flat = {"target_dim": 32, "calibration": "b.txt", "calibration_samples": 4, "seed": 3, "model": "other"}
    recipe = Recipe.from_settings(nest_flat_settings(flat, base))
    assert (recipe.model, recipe.selection.target_dim, recipe.selection.ratio, recipe.selection.f) == (
        "other",
        32,
        None,
        2,
    )
    assert (recipe.calibration.source, recipe.calibration.samples, recipe.runtime.seed) == ("b.txt", 4, 3)
    assert base["selection"] == {"ratio": 0.5, "f": 2.0}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("selection: {ratio: 0.5, ratio: 0.6}", "key 'ratio' is given twice"),
        ("selection: [", "is not valid YAML"),
        ("", "holds no settings"),
        ("- a", "holds no settings"),
        ("? [1, 2]\n: 3", "is no word"),
        ("[" * 5000, "is not valid YAML"),
        ("\x00", "is not valid YAML"),
    ],
)
def test_broken_recipe_files(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(text)
    with pytest.raises(RequestError, match=message):
        load_settings(file)


def test_missing_recipe_file(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="cannot be read: No such file"):
        load_settings(tmp_path / "absent.yaml")


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_shipped_recipes_are_valid(path: Path) -> None:
    Recipe.from_settings(nest_flat_settings({"model": "m"}, load_settings(path)), path.name)


def test_paper_recipe_has_nothing_of_ours() -> None:
    settings = yaml.safe_load((Path(__file__).parents[1] / "recipes" / "paper-drrqr.yaml").read_text())
    assert settings["selection"] == {"method": "drrqr", "ratio": 0.5, "scoring": "qk", "f": 1.5, "norm_epsilon": "keep"}
    assert settings["calibration"]["samples"] * settings["calibration"]["sequence_length"] == 262144
