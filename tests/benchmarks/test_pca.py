"""The benchmark of principal directions on the bundled model, where a change of basis costs more than a cut."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import pca
from tests.benchmarks.test_selector_benchmarks import run
from tests.tiny_models import save_tiny


@pytest.mark.slow
def test_pca(tmp_path: Path) -> None:
    words = ["--samples", "4", "--ratios", "0.5", "--methods"]
    rows, _ = run(tmp_path, "pca", [*words, "drrqr"])
    assert [(row["method"], row["ratio"]) for row in rows] == [
        ("dense", 0.0),
        ("drrqr", 0.5),
        *((method, ratio) for method in ("pca-exact", "pca-nearest", "pca-shared") for ratio in (0.0, 0.5)),
    ]
    _, channels, whole, exact, nearest_whole, nearest, shared_whole, shared = rows
    assert abs(whole["kl_text"]) < 1e-6
    assert exact["kl_text"] < 1.1 * channels["kl_text"]
    # The change of basis alone costs more than half the channels do.
    for rotated in (nearest_whole, nearest, shared_whole, shared):
        assert rotated["kl_text"] > 3 * channels["kl_text"]
    assert whole["directions"]["activations"] == pytest.approx([1.0] * 12)
    retained = zip(exact["directions"]["activations"], channels["heads"]["activations"], strict=True)
    assert all(directions > kept for directions, kept in retained)
    assert exact["directions"] == nearest["directions"] == shared["directions"]
    more, printed = run(tmp_path, "pca", [*words, "energy"])
    assert more[: len(rows)] == rows
    assert [row["method"] for row in more[len(rows) :]] == ["energy"]
    assert printed.count("method=") == 1


def test_decays_of_channels_are_named_and_not_calibrated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder has no tokenizer, which would be missed after the refusal."""
    save_tiny("kda", tmp_path / "models" / "kimi")
    (tmp_path / "test_prose.txt").write_text("A text.", encoding="utf-8")
    words = ["--models", str(tmp_path / "models"), "--text", str(tmp_path), "--output", str(tmp_path / "rows.json")]
    words += ["--texts", "prose"]
    monkeypatch.setattr(sys, "argv", ["pca", *words])
    with pytest.raises(SystemExit) as exit_:
        pca.main()
    assert exit_.value.code == 2
    printed = capsys.readouterr()
    assert "error: nothing was measured: " in printed.err
    assert "kimi: not measured: key channels of Kimi delta attention (fla) decay each by" in printed.out
    assert not (tmp_path / "rows.json").exists()
