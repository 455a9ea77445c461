"""The Markdown table of the selectors: every figure is the result file's, and what is missing is told."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import selector_table, selectors
from benchmarks.resumable import Row
from benchmarks.selector_cuts import METHODS
from benchmarks.selector_table import NOT_MEASURED, markdown, merged

TEXTS = ("prose", "docs", "code")


def figures(seed: int, scores: str) -> Row:
    """Numbers that no other seed has."""
    return {
        "perplexity": {name: 30.0 + seed + place / 10 for place, name in enumerate(TEXTS)},
        "kl_text": 0.1 + seed / 1000,
        "kl_prompts": 0.5 + seed / 1000,
        "memory": 40.0 + seed,
        "scores": {"recall": scores},
    }


def row(method: str, ratio: float, seed: int, *, scoring: str = "qk", refit: bool = True, **more: Any) -> Row:
    known_by = {"model": "m", "method": method, "scoring": scoring, "ratio": ratio, "norm_epsilon": "scaled"}
    found: Row = {**known_by, **figures(seed, "1 0 1 0" if method == "drrqr" else "1 1 1 1"), **more}
    if refit and method != "dense":
        found["after_refit"] = figures(seed + 20, "1 1 1 0")
    return found


def recovered(method: str, variant: str, kl: float, ratio: float = 0.5) -> Row:
    return {
        "model": "m", "ratio": ratio, "variant": variant, "method": method, "kl_text": kl, "kl_prompts": kl / 4,
        "memory": 0.7 + kl,
    }  # fmt: skip


ROWS = [
    row("dense", 0.0, 1, norm_epsilon="keep", methods=["drrqr", "ghost"]),
    row("drrqr", 0.5, 2),
    row("fisher", 0.5, 3),
    row("l1", 0.25, 4, scoring="k", refit=False),
]
RECOVERED = [
    recovered("drrqr", "mixers-4M", 0.08),
    recovered("fisher, tangent", "mixers-4M-from-refit-scaled", 0.07),
    recovered("fisher", "mixers-4M-from-refit-scaled", 0.06),
    recovered("fisher", "mixers-20M-from-refit-scaled", 0.01),
    recovered("fisher", "mixers-4M", 0.05),
    recovered("drrqr", "lora-4M", 0.02),
]


def cells(table: str) -> dict[tuple[str, ...], list[str]]:
    """By model, share removed, method and scoring: the cells behind the epsilon."""
    found = {}
    for line in table.splitlines()[2:]:
        parts = [part.strip() for part in line.strip("|").split("|")]
        found[tuple(parts[:4])] = parts[5:]
    return found


def test_figures_are_those_of_the_rows() -> None:
    table = cells(markdown(ROWS, RECOVERED, [0.25, 0.5]))
    assert table["m", "0", "original", ""][:4] == ["31.0 / 31.1 / 31.2", "0", "0", "41.0"]
    for method, seed in (("drrqr", 2), ("fisher", 3)):
        perplexity, text, prompts, memory = table["m", "0.5", method, "qk"][:4]
        first, second = 30 + seed, 50 + seed
        assert perplexity == " → ".join(f"{each}.0 / {each}.1 / {each}.2" for each in (first, second))
        assert text == f"0.10{seed} → 0.12{seed}"
        assert prompts == f"0.50{seed} → 0.52{seed}"
        assert memory == f"{40 + seed}.0 → {60 + seed}.0"
    # Against scores of 1 1 1 1 before; the original is not refitted.
    assert table["m", "0.5", "drrqr", "qk"][4:6] == ["-50.0 ± 28.9 → -25.0 ± 25.0", ""]
    assert table["m", "0.5", "fisher", "qk"][4:6] == ["+0.0 ± <25.0 → -25.0 ± 25.0", "+50.0 ± 28.9 → +0.0 ± <25.0"]


def test_prompts_that_all_agree_leave_what_one_would_have_told() -> None:
    """The cut fails every prompt of one of two tasks; both were asked 4 prompts of the one, 2 of the other."""
    dense = {**ROWS[0], "scores": {"recall": "1 1 1 1 0", "vt": "1 1"}}
    cut = {**ROWS[1], "scores": {"recall": "1 1 1 1", "vt": "0 0 1"}}
    one_of_each = [torch.tensor([1.0] + [0.0] * (count - 1), dtype=torch.float64) for count in (4, 2)]
    errors = [float(values.std()) / len(values) ** 0.5 for values in one_of_each]
    expected = 100 * (errors[0] ** 2 + errors[1] ** 2) ** 0.5 / 2
    table = cells(markdown([dense, cut], [], [0.5]))
    assert table["m", "0.5", "drrqr", "qk"][4].startswith(f"-50.0 ± <{expected:.1f}")


def test_what_is_missing_is_told() -> None:
    table = cells(markdown(ROWS, [], [0.25, 0.5]))
    assert len(table) == 1 + 2 * (5 * 3 + 3)
    assert {place[2] for place in table} == {*METHODS, "ghost", "original"}
    assert table["m", "0.5", "energy", "q"] == [NOT_MEASURED] * 6 + [""]
    assert table["m", "0.25", "drrqr", "qk"] == [NOT_MEASURED] * 7
    alone = table["m", "0.25", "l1", "k"]
    assert alone[1] == f"0.104 → {NOT_MEASURED}"
    assert alone[4] == f"+0.0 ± <25.0 → {NOT_MEASURED}"
    assert alone[5] == NOT_MEASURED
    assert table["m", "0.5", "fisher", "qk"][-1] == NOT_MEASURED


def test_training_is_that_of_the_cut_with_its_epsilon_where_there_is_one() -> None:
    table = cells(markdown(ROWS, RECOVERED, [0.25, 0.5]))
    assert table["m", "0.5", "fisher", "qk"][-1] == "0.060, 0.015, 76.0"
    assert table["m", "0.5", "drrqr", "qk"][-1] == "0.080, 0.020, 78.0 (epsilon keep)"
    tangent = cells(markdown(ROWS, RECOVERED[:2], [0.5]))
    assert tangent["m", "0.5", "fisher", "qk"][-1] == "0.070, 0.018, 77.0 (tangent)"
    assert table["m", "0.25", "fisher", "qk"][-1] == NOT_MEASURED
    assert table["m", "0.5", "energy", "qk"][-1] == ""


def test_files_of_one_model_are_merged_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for file, rows in zip(files, (ROWS[:2], [ROWS[0], *ROWS[2:]]), strict=True):
        file.write_text(json.dumps({"rows": rows}), encoding="utf-8")
    recovery = tmp_path / "recovery.json"
    recovery.write_text(json.dumps({"rows": RECOVERED}), encoding="utf-8")
    assert merged([*ROWS[:2], ROWS[0], *ROWS[2:]]) == ROWS
    command = ["selector_table", "--results", *map(str, files), "--recovery", str(recovery), "--ratios", "0.25", "0.5"]
    monkeypatch.setattr(sys, "argv", [*command, "--figure", str(tmp_path / "figure.png")])
    selector_table.main()
    expected = markdown(ROWS, RECOVERED, [0.25, 0.5])
    assert capsys.readouterr().out == expected + "\n"
    assert (tmp_path / "figure.png").stat().st_size > 0
    monkeypatch.setattr(sys, "argv", [*command, "--output", str(tmp_path / "table.md")])
    selector_table.main()
    assert (tmp_path / "table.md").read_text(encoding="utf-8") == expected
    assert capsys.readouterr().out == ""


WRONG_FILES: list[tuple[str, object, str]] = [
    ("absent.json", None, "absent.json cannot be read (No such file or directory); give a result file of "),
    ("empty.json", "", "empty.json cannot be read (no JSON: "),
    ("folder.json", "folder", "folder.json cannot be read (Is a directory); "),
    ("list.json", [], "list.json holds no rows; "),
    ("null.json", {"rows": None}, "null.json holds no rows; "),
    ("none.json", {"rows": []}, "none.json holds no rows; "),
    ("words.json", {"rows": ["model"]}, "words.json holds no rows; "),
    ("runs.json", {"runs": [{"settings": {}}]}, "runs.json holds no rows; "),
    ("keyless.json", {"rows": [{}]}, "is no result of benchmarks."),
    ("probe.json", {"rows": [{"model": "m", "method": "drrqr", "ratio": 0.5}]}, "kl_text, kl_prompts, "),
    ("kind.json", {"rows": [{**ROWS[1], "variant": "mixers-4M", "ratio": "0.5"}]}, ": ratio is missing or of another "),
    ("settings.json", {"rows": [{**ROWS[1], "variant": "mixers-4M"}], "settings": 1}, ": settings is missing or of "),
]


@pytest.mark.parametrize(("name", "content", "message"), WRONG_FILES, ids=[name for name, *_ in WRONG_FILES])
def test_a_wrong_file_is_refused_in_a_sentence(
    name: str,
    content: object,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    wrong, right, table = tmp_path / name, tmp_path / "right.json", tmp_path / "table.md"
    right.write_text(json.dumps({"rows": ROWS}), encoding="utf-8")
    if content == "folder":
        wrong.mkdir()
    elif content is not None:
        wrong.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    for main, words in (
        (selector_table.main, ["--results", str(right), str(wrong), "--output", str(table)]),
        (selector_table.main, ["--results", str(right), "--recovery", str(wrong), "--output", str(table)]),
        (selectors.main, ["--results", str(wrong), "--figure", str(tmp_path / "figure.png")]),
    ):
        monkeypatch.setattr(sys, "argv", ["benchmark", *words])
        with pytest.raises(SystemExit) as exit_:
            main()
        told = capsys.readouterr()
        assert (exit_.value.code, told.out) == (2, "")
        assert told.err.startswith(f"error: {wrong} ")
        assert message in told.err
        assert len(told.err.splitlines()) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        {"right.json", name} if content is not None else {"right.json"}
    )


def refused(words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """What benchmarks.selector_table says."""
    monkeypatch.setattr(sys, "argv", ["selector_table", *words])
    with pytest.raises(SystemExit) as exit_:
        selector_table.main()
    assert exit_.value.code == 2
    return capsys.readouterr().err


def test_files_of_one_model_under_other_settings_are_not_paired(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"seed": 0, "length": 1536, "prompts": 8, "device": "cuda", "calibration": "a/train.txt"}
    others = {"device": "cpu", "batch_size": 4, "memory_prompts": 9, "calibration": "b/train.txt", "text": "b"}
    files = [str(tmp_path / f"{name}.json") for name in ("first", "same", "seed", "other")]
    for file, changed, model in zip(
        files, ({}, others, {"seed": 1, "length": 512}, {"seed": 1}), ("m", "m", "m", "another"), strict=True
    ):
        rows = [{**row, "model": model} for row in ROWS]
        Path(file).write_text(json.dumps({"settings": {**settings, **changed}, "rows": rows}), encoding="utf-8")
    told = refused(["--results", files[0], files[2]], monkeypatch, capsys)
    assert (
        f"{files[2]} has measured m with another length, seed than {files[0]}: their prompts cannot be paired" in told
    )
    monkeypatch.setattr(sys, "argv", ["selector_table", "--results", files[0], files[1], files[3], "--ratios", "0.5"])
    selector_table.main()
    assert capsys.readouterr().out.count("| original |") == 2


def test_a_figure_that_cannot_be_drawn_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results, table = tmp_path / "rows.json", tmp_path / "table.md"
    results.write_text(json.dumps({"rows": [ROWS[0], ROWS[3]]}), encoding="utf-8")
    words = ["--results", str(results), "--output", str(table), "--figure"]
    assert '".foo" is not drawn; use .png' in refused([*words, str(tmp_path / "a.foo")], monkeypatch, capsys)
    assert not table.exists()
    told = refused([*words, str(tmp_path / "a.png")], monkeypatch, capsys)
    assert "no cut that it shows was measured" in told
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.json", "table.md"]
