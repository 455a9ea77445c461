"""Config and tokenizer of a cut against those of its original: a cut changes widths and an epsilon alone."""

from __future__ import annotations

import filecmp
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from compressor.abbreviation import shown
from compressor.architectures.base import Architecture
from compressor.checkpoint.config_file import CONFIG_FILE, dump_config, read_config
from compressor.loading import refused_by_stock_classes

# What writers note of themselves, at any depth; no model is another by it.
_BOOKKEEPING = frozenset({"architectures", "transformers_version", "_name_or_path"})
_TOKENIZER_NAMES = ("tokenizer", "special_tokens_map", "added_tokens", "vocab.", "merges.", "chat_template")
_TOKENIZER_SUFFIXES = frozenset({".model", ".tiktoken", ".spm", ".vocab", ".bpe"})


def config_difference(architecture: Architecture, original: Path, folder: Path, scaled: bool) -> str | None:
    """Where config.json of `folder` is not what a cut of `original` to its width writes; None where it is.

    `scaled`: the cut multiplied the norm epsilon by d_k / k. What the stock classes read the same is the same.

    Raises:
        RequestError: the stock classes cannot read one of them, or no cut to that width can be.
    """
    before, after = (read_config(each / CONFIG_FILE) for each in (original, folder))
    if before["model_type"] != after["model_type"]:
        return _told(folder, original, [("model_type", after["model_type"], before["model_type"])])
    expected = _cut_config(architecture, original, folder, before, scaled)
    if expected is None:
        return f"only one of {folder / CONFIG_FILE} and {original / CONFIG_FILE} has linear-attention layers"
    if expected == after:
        return None
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / CONFIG_FILE).write_text(dump_config(expected), encoding="utf-8")
        wanted = _fields(architecture, Path(place))
    found = _fields(architecture, folder)
    differing = [
        (name, found.get(name, _ABSENT), wanted.get(name, _ABSENT))
        for name in sorted(found.keys() | wanted.keys())
        if found.get(name, _ABSENT) != wanted.get(name, _ABSENT)
    ]
    return _told(folder, original, differing) if differing else None


class _Absent:
    def __repr__(self) -> str:
        return "nothing"


_ABSENT = _Absent()


def _told(folder: Path, original: Path, differing: list[tuple[str, object, object]]) -> str:
    name, found, wanted = differing[0]
    more = f" ({len(differing) - 1} more fields differ)" if len(differing) > 1 else ""
    return (
        f"{folder / CONFIG_FILE} has {name} = {shown(found)} where the cut of {original / CONFIG_FILE} has "
        f"{shown(wanted)}{more}"
    )


def _cut_config(
    architecture: Architecture, original: Path, folder: Path, raw_config: Mapping[str, Any], scaled: bool
) -> dict[str, Any] | None:
    """What a cut to the width of `folder` writes; None where one of the two has nothing to cut."""
    with refused_by_stock_classes(folder):
        after = architecture.mixers(architecture.load_config(folder), ())
    with refused_by_stock_classes(original):
        config = architecture.load_config(original)
        before = architecture.mixers(config, ())
        epsilon = architecture.norm_epsilon(config)
    if not before or not after:
        return None
    keep = after[0].head_k_dim
    return architecture.cut_config(raw_config, config, keep, epsilon * before[0].head_k_dim / keep if scaled else None)


def _fields(architecture: Architecture, folder: Path) -> dict[str, object]:
    """Of the config as the stock class reads it, by dotted name."""
    with refused_by_stock_classes(folder):
        return dict(_flat(architecture.load_config(folder).to_dict(), ""))


def _flat(config: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, object]]:
    for name, value in config.items():
        if name in _BOOKKEEPING:
            continue
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def tokenizer_note(original: Path, folder: Path) -> str | None:
    """Which files of the tokenizer, which a cut copies, are not the original's; None where all are."""
    names = sorted({path.name for each in (original, folder) for path in each.iterdir() if _is_of_tokenizer(path)})
    changed = [name for name in names if not _are_alike(original / name, folder / name)]
    if not changed:
        return None
    return f"{', '.join(changed)}: not as in the original, so that the same text may be other tokens"


def _is_of_tokenizer(path: Path) -> bool:
    return path.name.startswith(_TOKENIZER_NAMES) or path.suffix in _TOKENIZER_SUFFIXES


def _are_alike(first: Path, second: Path) -> bool:
    if first.is_file() and second.is_file():
        return filecmp.cmp(first, second, shallow=False)
    return first.is_file() == second.is_file()
