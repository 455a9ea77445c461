"""docs/families.md against the registry, and against what a cut of the tiny models of every family changes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from compressor.architectures.base import Architecture
from compressor.architectures.family import FLA_MAMBA2, family_of
from compressor.architectures.registry import architecture_of, find_architecture, known_model_types
from compressor.checkpoint.config_file import CONFIG_FILE, read_config
from compressor.errors import RequestError
from compressor.inspection import inspect_model
from tests.tiny_models import VARIANTS, save_tiny

PAGE = Path(__file__).parents[2] / "docs" / "families.md"


def rows(heading: str) -> dict[str, list[str]]:
    """`model_type` -> the other cells of its row in the table below `heading`."""
    section = PAGE.read_text(encoding="utf-8").partition(f"## {heading}\n")[2].partition("\n## ")[0]
    cells = [line.strip("| ").split("|") for line in section.splitlines() if line.startswith("| `")]
    return {each[0].strip(" `"): [cell.strip() for cell in each[1:]] for each in cells if each[0] != "`model_type` "}


def test_every_family_has_its_row() -> None:
    assert sorted(rows("What is cut")) == sorted([*known_model_types(), FLA_MAMBA2])


def test_rows_say_what_a_cut_changes(tmp_path: Path) -> None:
    architectures: dict[str, Architecture] = {}
    tensors: dict[str, set[str]] = {}
    fields: dict[str, set[str]] = {}
    for name in VARIANTS:
        folder = save_tiny(name, tmp_path / name)
        raw_config, inspection = read_config(folder / CONFIG_FILE), inspect_model(str(folder))
        family = family_of(raw_config)
        architectures[family] = architecture_of(raw_config)
        own = {re.sub(r"\.(weight|bias)$", "", tensor.name) for tensor in inspection.cut_tensors}
        tensors.setdefault(family, set()).update(own)
        fields.setdefault(family, set()).update(inspection.cut_fields)
    for family, (needs, cut, written, epsilon) in rows("What is cut").items():
        architecture = architectures[family]
        assert needs.strip("`") == architecture.load_line, family
        assert set(re.findall(r"`([^`]+)`", cut)) == tensors[family], family
        assert set(re.findall(r"`([^`]+)`", written)) == fields[family], family
        scalable = architecture.scales_by_width and architecture.norm_epsilon_in_config
        assert epsilon == ("can be scaled" if scalable else "stays"), family


def test_every_refusal_has_its_reason() -> None:
    refused = rows("What is refused, and why")
    assert set(refused) == {"gla", "kimi_linear", "retnet", "rwkv7"}
    for model_type, (reason,) in refused.items():
        with pytest.raises(RequestError, match=re.escape(f"cannot be cut: {reason}; use a model of another family")):
            find_architecture(model_type)
