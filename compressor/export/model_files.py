"""Which files of a model folder belong to the model, by their names alone."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection
from pathlib import Path

from compressor.checkpoint.layout import INDEX_FILE
from compressor.export.companions import CHAT_TEMPLATE_FOLDER, looks_secret

CARD_FILE = "README.md"
REPORT_FILE = "compression.json"
RECIPE_FILE = "recipe.yaml"
TRAINING_FILES = ("training.jsonl", "training.png")
RECORDED_NOWHERE = frozenset({CARD_FILE, REPORT_FILE})
"""The card is anybody's to edit, and the report cannot hold its own hash."""

_WRITTEN = {"config.json", INDEX_FILE, RECIPE_FILE, "selection.json", *TRAINING_FILES}
_STANDARD = (
    RECORDED_NOWHERE
    | _WRITTEN
    | {"generation_config.json", "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"}
    | {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model"}
    | {"vocab.json", "vocab.txt", "merges.txt", "spiece.model", "sentencepiece.bpe.model", "tekken.json"}
    | {"chat_template.jinja", "chat_template.json"}
)
_CODE = ("configuration_*.py", "modeling_*.py", "tokenization_*.py", "processing_*.py", "image_processing_*.py")
_PATTERNS = (*_CODE, "*.tiktoken", f"{CHAT_TEMPLATE_FOLDER}/*.jinja")
_TERMS = ("LICENSE*", "LICENCE*", "NOTICE*", "COPYING*", "USE_POLICY*")


def is_standard(name: str) -> bool:
    """Whether model folders have a file of this name beside their weights; folders are parted by `/`."""
    if name in _STANDARD:
        return True
    terms = any(fnmatch.fnmatchcase(name.upper(), pattern) for pattern in _TERMS)
    patterns = [pattern for pattern in _PATTERNS if pattern.count("/") == name.count("/")]
    belongs = (terms and "/" not in name) or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
    return belongs and not looks_secret(name)


def is_weights(name: str) -> bool:
    """Whether engines take the file for weights."""
    return name.endswith(".safetensors")


def files_inside(folder: Path) -> tuple[str, ...]:
    """Names of what stands in a model folder and is no folder, hidden ones apart, sorted."""
    places = [folder, folder / CHAT_TEMPLATE_FOLDER]
    found = [path for place in places if place.is_dir() for path in place.iterdir() if not path.name.startswith(".")]
    return tuple(
        sorted(path.relative_to(folder).as_posix() for path in found if path.is_symlink() or not path.is_dir())
    )


def own_files(folder: Path, recorded: Collection[str]) -> tuple[str, ...]:
    """Of `files_inside`, those that `recorded` has, the standard ones and everything that looks like weights."""
    return tuple(name for name in files_inside(folder) if name in recorded or is_standard(name) or is_weights(name))
