"""Values of a recipe as YAML reads them, and what is said of those that no setting can mean."""

from __future__ import annotations

from pathlib import Path

import pytest

from compressor.abbreviation import MOST_CHARACTERS, cut, shown
from compressor.cli import main
from compressor.errors import RequestError
from compressor.flat_settings import names_of_flat
from compressor.recipe import Recipe
from compressor.recipe_file import MOST_BYTES, load_settings

RATIO = "selection: {ratio: 0.5}\n"
LONG, MANY = "x" * 100_000, ",".join(["7"] * 5000)


def read(folder: Path, text: str) -> Recipe:
    file = folder / "recipe.yaml"
    file.write_text(text)
    return Recipe.from_settings(load_settings(file), "recipe.yaml")


def refusal(folder: Path, text: str) -> str:
    with pytest.raises(RequestError) as caught:
        read(folder, text)
    return str(caught.value)


@pytest.mark.parametrize("size", ["1048576", "1_048_576", "0x100000", "'1048576'", "1MiB"])
def test_sizes_are_numbers_or_words(size: str, tmp_path: Path) -> None:
    recipe = read(tmp_path, f"selection: {{target_state_bytes: {size}}}\nexport: {{max_shard_size: {size}}}")
    assert recipe.selection.target_state_bytes == recipe.export.max_shard_size
    assert recipe.export.max_shard_size == ("1MiB" if size == "1MiB" else "1048576")
    assert read(tmp_path, recipe.to_yaml()) == recipe
    assert read(tmp_path, "selection: {ratio: 0.5, target_state_bytes: null}").selection.target_state_bytes is None


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ("true", "True is no size; write it as 500MB, 5GB, 2GiB or 1000000."),
        ("1.5", "1.5 is no size; write it as"),
        ("-5", "size '-5' is not a number of bytes of at least 1"),
        ("0", "size '0' is not a number of bytes of at least 1"),
        ("9223372036854775808", 'size "9223372036854775808" is more than any machine holds; write it as 500MB'),
        ("9" * 4000, "a number of about 4,001 digits is more than any setting takes; give a smaller one."),
        (f"'{'9' * 5000}'", "has 5,000 characters, and no name or path has more than 4,096; give a shorter one."),
    ],
)
def test_sizes_that_are_none(size: str, message: str, tmp_path: Path) -> None:
    said = refusal(tmp_path, f"selection: {{target_state_bytes: {size}}}")
    assert said.startswith("recipe.yaml: selection.target_state_bytes: ")
    assert message in said


@pytest.mark.parametrize("number", ["1e-4", "1E-4", "+1.e-4", ".1e-3", "1.0e-4", "0.0001"])
def test_numbers_with_an_exponent(number: str, tmp_path: Path) -> None:
    assert read(tmp_path, f"{RATIO}recovery: {{learning_rate: {number}}}").recovery.learning_rate == 1e-4
    assert read(tmp_path, f"{RATIO}calibration: {{retrieval_share: {number}}}").calibration.retrieval_share == 1e-4


@pytest.mark.parametrize("word", ["abc", "e-4", "1e", "'0.0001'", "nan", "true", "1e-4x", "[1e-4]"])
def test_words_that_are_no_numbers(word: str, tmp_path: Path) -> None:
    said = refusal(tmp_path, f"{RATIO}recovery: {{learning_rate: {word}}}")
    assert said.startswith("recipe.yaml: recovery.learning_rate: Input should be a valid number (got ")
    assert "\n" not in said


def test_an_exponent_makes_no_whole_number_nor_a_finite_one(tmp_path: Path) -> None:
    assert refusal(tmp_path, f"{RATIO}runtime: {{seed: 1e3}}") == 'recipe.yaml: runtime.seed: "1e3" is no whole number'
    assert "alpha: Input should be a finite number (got inf)" in refusal(tmp_path, f"{RATIO}recovery: {{alpha: 1e999}}")


@pytest.mark.parametrize("ratio", [".nan", ".inf", "-.inf"])
def test_ratios_that_are_not_finite(ratio: str, tmp_path: Path) -> None:
    said = refusal(tmp_path, f"selection: {{ratio: {ratio}}}")
    assert said == f"recipe.yaml: selection.ratio: Input should be a finite number (got {ratio.replace('.', '')})"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"model: {LONG}\n{RATIO}", "model: 'xxx"),
        (f"selection: {{ratio: {LONG}}}", "has 100,000 characters, and no name or path has more than 4,096"),
        (f"selection: {LONG}", "selection: 'xxx"),
        (f"selection: {{ratio: 0.5, method: {LONG}}}", "has 100,000 characters"),
        (f"selection: {{ratio: 0.5, method: {LONG[:4000]}}}", "xxx ... xxx"),
        (f"selection: {{ratio: [{MANY}]}}", "ratio: 5,000 entries are more than are taken; give at most 1,000."),
        (f"{RATIO}calibration: [[{MANY[:1000]}]]", "calibration: \"[[7, 7, 7, 7, 7, 7, ...]]\" is no section"),
        (f"{RATIO}evaluation: {{texts: [{LONG[:4000]}, {LONG[:4000]}]}}", "xxx ... xxx"),
        (f"{RATIO}evaluation: {{lengths: [{'0,' * 900}]}}", "880 more mistakes follow; correct these first."),
        (f"{RATIO}runtime: {{seed: 0x{'9' * 5000}}}", "seed: a number of about 6,021 digits is more than any setting"),
        (f"{RATIO}runtime: {{seed: {'9' * 4000}}}", "seed: a number of about 4,001 digits is more than any setting"),
        (f"{RATIO}? {LONG}\n: 1\n", "xxx ... xxx"),
        (f"{RATIO}? {LONG}\n: 1\n? {LONG}\n: 2\n", "...xxx"),
        (f"{RATIO}? [{MANY[:9000]}]\n: 1\n", "key [7, 7, 7, 7, 7, 7, ...] is no word"),
        (f"{RATIO}model: *{LONG}", "found undefined alias 'xxx"),
        (f"{RATIO}model: !!float {LONG}", "that cannot be (could not convert string to float: 'xxx"),
    ],
)  # fmt: skip
def test_what_is_huge_is_cut(text: str, message: str, tmp_path: Path) -> None:
    said = refusal(tmp_path, text)
    assert message in said
    assert len(said) < 2 * MOST_CHARACTERS


def test_a_file_that_is_too_long_to_be_a_recipe(tmp_path: Path) -> None:
    message = "has more than 1,048,576 bytes and is none; give a file of settings."
    assert refusal(tmp_path, "#" * (MOST_BYTES + 1)).endswith(message)
    assert read(tmp_path, RATIO + "#" * (MOST_BYTES - len(RATIO))).selection.ratio == 0.5


def test_what_a_message_shows_of_a_value() -> None:
    nested: list[object] = []
    for _ in range(100):
        nested = [nested, nested]
    assert len(shown(nested)) < 200
    assert shown("short") == "'short'"
    assert shown([1, True, None]) == "[1, True, None]"
    assert shown([10**5000]) == "[a number of about 5,001 digits]"
    assert cut("abc", 3) == "abc"
    assert cut("abcdefghi", 6) == "abcd ... hi"


def test_a_setting_is_called_as_its_user_gave_it(tmp_path: Path) -> None:
    said = refusal(tmp_path, "selection: {ratio: 0.5, method: random, scoring: k}")
    assert said.startswith("recipe.yaml: selection.scoring: Scoring 'k' means nothing to the method random, which")
    settings = {"selection": {"ratio": 0.5, "method": "random", "scoring": "k"}}
    with pytest.raises(RequestError, match=r"^recipe\.yaml: --scoring: Scoring 'k' means nothing"):
        Recipe.from_settings(settings, "recipe.yaml", names_of_flat({"scoring": "k"}, recipe=True))


def test_allocation_is_refused_with_the_reason_of_the_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refusal(tmp_path, "selection: {ratio: 0.5, allocation: per-layer}")
    assert said.startswith("recipe.yaml: selection.allocation: per-layer gives each layer a key width of its own, and")
    assert "no stock class would load the result; leave it at uniform." in said
    assert main(["--ratio", "0.5", "--allocation", "per-layer"]) == 2
    reason = said.removeprefix("recipe.yaml: selection.allocation: ")
    assert capsys.readouterr().err.strip() == f"compress: error: --allocation {reason}"
    assert 'selection.allocation: "{x}" is none; give uniform' in refusal(
        tmp_path, "selection: {ratio: 0.5, allocation: '{x}'}"
    )
    recipe = read(tmp_path, "selection: {ratio: 0.5, allocation: uniform}")
    assert recipe == read(tmp_path, RATIO)
    assert "allocation" not in recipe.to_yaml()
