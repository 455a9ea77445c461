"""What `benchmarks.recovery` is asked for: its variants and what they are made by, refused before any work."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.options import check_text
from benchmarks.output_files import check_folder_to_write
from compressor.errors import RequestError
from compressor.preparation import choose_width, open_model
from compressor.recipe import Recipe, RecoverySection

DENSE = "dense"
CUTS = {"cut": (False, "keep"), "scaled": (False, "scaled"), "refit": (True, "keep"), "refit-scaled": (True, "scaled")}
"""Whether a variant is refitted, and its norm epsilon."""
TRAINED = re.compile(
    r"(?P<kind>mixers|lora|control)-(?P<millions>\d+(\.\d+)?)M(-from-(?P<start>cut|scaled|refit|refit-scaled))?"
)
SEQUENCE_LENGTH = 2048


def check_request(arguments: argparse.Namespace) -> None:
    """Every variant, and what it needs of the other options.

    Raises:
        RequestError: an unknown variant, a text that is missing, settings or a cut that cannot be, or a folder that
            cannot be written into.
    """
    if not arguments.text:
        raise RequestError("--text is missing; name held-out text files, or --results to print what was measured.")
    for text in arguments.text:
        check_text(text, held_out=True)
    for name in arguments.variants:
        if name not in (DENSE, *CUTS):
            recovery_section(arguments, trained_variant(name))
    if set(arguments.variants) != {DENSE}:
        if arguments.training_text is None:
            raise RequestError("--training-text is missing, which all variants but dense need; name a text.")
        check_text(arguments.training_text)
        recipe = cut_recipe(arguments, arguments.model, None, "cut")
        choose_width(open_model(recipe.model, None), recipe.selection)
    check_folder_to_write("--work", arguments.work)


def trained_variant(name: str) -> Mapping[str, str | None]:
    """`kind`, `millions` of tokens and `start` of a variant that is trained. Raises RequestError for no such name."""
    match = TRAINED.fullmatch(name)
    if match is None:
        raise RequestError(
            f'--variants "{name}" is unknown; give {DENSE}, {", ".join(CUTS)}, or mixers-, lora- or control- with '
            "millions of tokens, as in mixers-4M and mixers-4M-from-cut."
        )
    return match.groupdict()


def cut_recipe(arguments: argparse.Namespace, model: str | None, folder: Path | None, name: str) -> Recipe:
    """Of the cut called `name`. Raises RequestError for a method or ratio that cannot be."""
    refitted, epsilon = CUTS[name]
    return Recipe.from_settings(
        {
            "model": model,
            "output_dir": None if folder is None else str(folder),
            "selection": {"ratio": arguments.ratio, "method": arguments.method, "norm_epsilon": epsilon},
            "calibration": {
                "source": arguments.training_text,
                "samples": arguments.calibration_samples,
                "retrieval_share": arguments.retrieval_share,
            },
            "runtime": {"device": arguments.device, "seed": arguments.seed},
            "recovery": {"refit": refitted},
            "export": {"evaluate": False, "verify": False},
        }
    )


def recovery_section(arguments: argparse.Namespace, variant: Mapping[str, str | None]) -> RecoverySection:
    """How a variant is trained, `--set` included. Raises RequestError for settings that cannot be."""
    chosen = dict(map(_setting, arguments.set))
    settings: dict[str, Any] = {
        "sequences": round(float(variant["millions"] or 0) * 1e6 / SEQUENCE_LENGTH),
        "sequence_length": SEQUENCE_LENGTH,
        "source": arguments.training_text,
        "trainable": "lora" if variant["kind"] == "lora" else "mixers",
        "checkpoint_every": 10**6,
    }
    if variant["kind"] == "control":
        settings |= {"kl_weight": 0.0, "cross_entropy_weight": 1.0, "matching_weight": 0.0}
        chosen.pop("matching_weight", None)
    selection = {"ratio": arguments.ratio}
    return Recipe.from_settings({"selection": selection, "recovery": {**settings, **chosen}}, "--set").recovery


def _setting(word: str) -> tuple[str, Any]:
    name, equals, value = word.partition("=")
    try:
        if equals:
            return name, json.loads(value)
    except ValueError:
        pass
    raise RequestError(f"--set {word} is no NAME=VALUE with a JSON value; write text in double quotes.")
