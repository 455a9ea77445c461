"""Every setting of the section `recovery:` stands in the documentation, with its default and a sentence."""

from __future__ import annotations

from pathlib import Path

from compressor.recipe import RecoverySection

PAGE = Path(__file__).resolve().parents[2] / "docs" / "recovery.md"


def test_every_setting_is_documented() -> None:
    rows = [line.strip("| ").split(" | ") for line in PAGE.read_text(encoding="utf-8").splitlines()]
    documented = {row[0].strip("`"): row for row in rows if row[0].strip("`") in RecoverySection.model_fields}
    assert list(documented) == list(RecoverySection.model_fields)
    for name, field in RecoverySection.model_fields.items():
        default = str(field.default).lower() if isinstance(field.default, bool) else str(field.default)
        assert documented[name][1] == default, name
        assert documented[name][-1].endswith("."), name
