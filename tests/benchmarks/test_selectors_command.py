"""benchmarks.selectors end to end on tiny models: every method and scoring, its order, its budget, what is compared."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import selectors
from benchmarks.cuts import Bench
from benchmarks.options import check_widths
from benchmarks.resumable import Budget, Row
from benchmarks.selector_cuts import check_scorings, made_cuts
from benchmarks.selector_measures import RememberedModel, answers, memory_difference, questions
from compressor.calibration.tokenizer import load_tokenizer
from compressor.errors import RequestError
from compressor.evaluation.measure import Material
from compressor.evaluation.prompt_sets import make_prompt_sets
from compressor.preparation import open_model, open_source
from compressor.prompts.registry import find_task
from compressor.selection.request import SCORINGS
from tests.families import open_tiny, tiny_checkpoint, tiny_tokens
from tests.tiny_models import save_tiny, save_tiny_tokenizer

SCORED = ("drrqr", "energy", "l1", "s-wanda", "gradient")
TEXT = "the quick brown fox jumps over the lazy dog, and then it sleeps for a while. " * 60


def run(folder: Path, monkeypatch: pytest.MonkeyPatch, *more: str) -> list[Row]:
    """The rows written of the models below `folder`."""
    (folder / "test_prose.txt").write_text(TEXT, encoding="utf-8")
    (folder / "calibration.txt").write_text(TEXT[::-1], encoding="utf-8")
    output = folder / "rows.json"
    command = ["selectors", "--models", str(folder / "models"), "--text", str(folder), "--output", str(output)]
    command += ["--calibration", str(folder / "calibration.txt"), "--samples", "8", "--retrieval-share", "0"]
    command += ["--texts", "prose", "--windows", "2", "--window", "64", "--tasks", "recall", "--length", "600"]
    command += ["--prompts", "2", "--memory-prompts", "3", "--batch-size", "4", "--device", "cpu", *more]
    monkeypatch.setattr(sys, "argv", command)
    selectors.main()
    rows: list[Row] = json.loads(output.read_text(encoding="utf-8"))["rows"]
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gated_deltanet", "m2_one_group"])
def test_every_method_and_scoring(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny_tokenizer(save_tiny(family, tmp_path / "models" / "tiny"))
    rows = run(tmp_path, monkeypatch, "--ratios", "0.25", "0.5", "--norm-epsilon", "scaled")
    cuts = [(row["method"], row["scoring"], row["ratio"]) for row in rows]
    single = ["fisher", "random", *(["ghost"] if family.startswith("m2") else [])]
    asked = {(method, scoring, ratio) for method in SCORED for scoring in SCORINGS for ratio in (0.25, 0.5)}
    asked |= {(method, "qk", ratio) for method in single for ratio in (0.25, 0.5)}
    assert cuts[0] == ("dense", "qk", 0.0)
    assert set(cuts[1:]) == asked
    assert len(cuts) == 1 + len(asked)
    assert cuts[1:5] == [(method, "qk", 0.5) for method in ("drrqr", "fisher", "energy", "l1")]
    assert cuts[5:9] == [(method, "qk", 0.25) for method in ("drrqr", "fisher", "energy", "l1")]
    late = [scoring for _, scoring, _ in cuts]
    assert "qk" not in late[late.index("k") :]
    for row in rows[1:]:
        prompts = 3 if row["method"] in ("drrqr", "fisher") and row["scoring"] == "qk" else 2
        for figures in (row, row["after_refit"]):
            assert figures["perplexity"]["prose"] > 1
            assert figures["kl_text"] > 0
            assert len(figures["scores"]["recall"].split()) == prompts


def test_a_budget_leaves_rows_and_the_same_command_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_tiny_tokenizer(save_tiny("gated_deltanet", tmp_path / "models" / "tiny"))
    words = ["--ratios", "0.5", "--methods", "drrqr", "random", "--scorings", "qk", "--no-refit"]
    run(tmp_path, monkeypatch, *words, "--methods", "random")
    # A row that took so long does not fit again: the original's kind is the same as drrqr's.
    stored = json.loads((tmp_path / "rows.json").read_text(encoding="utf-8"))
    stored["rows"][0]["seconds"] = 1000.0
    (tmp_path / "rows.json").write_text(json.dumps(stored), encoding="utf-8")
    capsys.readouterr()
    assert run(tmp_path, monkeypatch, *words, "--budget-seconds", "900") == stored["rows"]
    told = capsys.readouterr().out
    assert "tiny: 1 rows are left after the budget; none was measured: calibrating took " in told
    assert " s and such a row 1000 s, and with a --budget-seconds of less the same command never goes on." in told
    more = run(tmp_path, monkeypatch, *words)
    assert more[:2] == stored["rows"]
    assert [row["method"] for row in more] == ["dense", "random", "drrqr"]
    assert not any("after_refit" in row for row in more)


def test_a_budget_that_ends_between_rows_says_how_many_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_tiny_tokenizer(save_tiny("gated_deltanet", tmp_path / "models" / "tiny"))
    words = ["--ratios", "0.5", "--methods", "drrqr", "random", "--scorings", "qk", "--no-refit"]
    # As if it were over with the first row.
    monkeypatch.setattr(Budget, "allows", lambda self, kind: not self.longest)
    assert [row["method"] for row in run(tmp_path, monkeypatch, *words, "--budget-seconds", "1")] == ["dense"]
    assert "tiny: 2 rows are left after the budget.\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--models is missing; name a folder"),
        (["--models", "absent", "--text", "."], "--models absent is no folder"),
        (["--models", "."], "--text is missing"),
        (["--models", "models", "--text", "."], "nothing was measured: models holds no folder of a supported family"),
        (
            ["--models", "models", "--text", ".", "--methods", "random", "--scorings", "k"],
            "add qk, or leave the method",
        ),
        (["--results", "rows.json", "--figure", "a.foo"], '".foo" is not drawn'),
        (["--results", "rows.json", "--heads-figure", "a.png"], "--heads-figure a.png: no cut that it shows was"),
        (["--models", "models", "--text", ".", "--output", "empty.json"], "empty.json cannot be read (no JSON"),
    ],
)
def test_what_cannot_be_done_is_refused(
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("models").mkdir()
    Path("empty.json").write_text("", encoding="utf-8")
    for name in ("prose", "docs", "code"):
        Path(f"test_{name}.txt").write_text("A text.", encoding="utf-8")
    dense = {"model": "m", "method": "dense", "scoring": "qk", "ratio": 0.0, "norm_epsilon": "keep", "memory": None}
    row = {**dense, "perplexity": {"prose": 2.0}, "kl_text": 0.0, "kl_prompts": 0.0, "scores": {}}
    Path("rows.json").write_text(json.dumps({"rows": [row]}), encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["selectors", *words])
    with pytest.raises(SystemExit) as exit_:
        selectors.main()
    told = capsys.readouterr().err
    assert exit_.value.code == 2
    assert message in told
    assert len(told.splitlines()) == 1


def test_a_budget_counts_what_a_row_of_the_kind_took(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("benchmarks.resumable.time.perf_counter", lambda: now[0])
    budget = Budget(60.0, started=now[0])
    budget.took("dear", 20.0)
    budget.took("dear", 10.0)
    now[0] += 39.0
    assert budget.allows("dear")
    now[0] += 2.0
    assert not budget.allows("dear")
    assert budget.allows("cheap")
    now[0] += 20.0
    assert not budget.allows("cheap")
    assert Budget(None).allows("dear")


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("gated_deltanet", {}),
        ("m2_one_group", {}),
        ("qw", {}),
        # Their classes scale what the head gives.
        ("granite", {"logits_scaling": 6.0}),
        ("falcon_h1", {"lm_head_multiplier": 0.3}),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_remembered_model_answers_as_the_model(
    family: str, overrides: dict[str, Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    tiny = open_tiny(save_tiny(family, tmp_path, overrides=overrides))
    tiny.model.to(dtype)
    remembered = RememberedModel(tiny.model, tiny.architecture.decoder(tiny.model))
    first, second = (torch.stack([tiny_tokens(20, seed), tiny_tokens(20, seed + 1)]) for seed in (0, 5))
    with torch.inference_mode():
        for ids in (first, second, first, first[:, :10]):
            expected = tiny.model(input_ids=ids, use_cache=False).logits
            assert torch.equal(remembered(ids, use_cache=False).logits, expected)
        for parameter in tiny.architecture.decoder(tiny.model).get_submodule("layers").parameters():
            parameter.zero_()
        assert torch.equal(remembered(ids, use_cache=False).logits, expected)
        assert not torch.equal(tiny.model(input_ids=ids, use_cache=False).logits, expected)


def test_further_prompts_count_for_memory_alone(tmp_path: Path) -> None:
    """The answers to 3 of 5 prompts and 2 more are those to 5, but for the KL, which is that of the 3."""
    tiny = tiny_checkpoint("gated_deltanet", tmp_path / "model")
    save_tiny_tokenizer(tiny.folder)
    source = open_source(open_model(str(tiny.folder), None))
    tokenizer = load_tokenizer(source.folder, trust_remote_code=False)

    def asked(prompts: int) -> Bench:
        sets = make_prompt_sets([find_task("recall")], [600], prompts, 0, tokenizer, 64)
        return Bench(source, tiny.model, tiny.model, tokenizer, Material((), sets, "teacher-forced", 2))

    five = asked(5)
    divided, whole, three = questions(five, 3), questions(five, 5), questions(asked(3), 3)
    assert whole.more is None
    assert answers(divided, more=True)["scores"] == answers(whole, more=True)["scores"]
    assert answers(divided, more=False) == answers(three, more=True)
    assert answers(divided, more=True)["kl_prompts"] == answers(three, more=True)["kl_prompts"]


def test_paired_differences_are_those_of_the_prompts_both_were_asked() -> None:
    one: dict[str, Any] = {"scores": {"vt": "1 0.5 0 1", "recall": "1 1 1 0"}}
    other: dict[str, Any] = {"scores": {"vt": "1 0 0.5", "recall": "0 1 0"}}
    changes = torch.tensor([[0.0, 0.5, -0.5], [1.0, 0.0, 1.0]], dtype=torch.float64)
    errors = changes.std(dim=1) / 3**0.5
    found = memory_difference(one, other)
    expected = (100 * float(changes.mean()), 100 * float(errors.square().sum().sqrt()) / 2)
    assert found == pytest.approx(expected)
    back = memory_difference(other, one)
    assert back == pytest.approx((-expected[0], expected[1]))
    assert memory_difference(one, {"scores": {"vt": "1"}}) is None
    assert memory_difference({"scores": {"vt": "1"}}, {"scores": {"vt": "0"}}) == (100.0, None)


def test_methods_have_those_of_the_scorings_that_mean_something_to_them() -> None:
    cuts = made_cuts(["drrqr", "random"], ["k", "q"], [0.5], ["keep"])
    assert [(cut["method"], cut["scoring"]) for cut in cuts] == [("drrqr", "k"), ("drrqr", "q")]
    message = (
        "^--methods random has the scoring qk alone, which --scorings k q leaves out; add qk, or leave the method "
    )
    with pytest.raises(RequestError, match=message):
        check_scorings(["drrqr", "random"], ["k", "q"])
    check_scorings(["random"], ["k", "qk"])


def test_a_ratio_that_removes_no_channel_is_refused(tmp_path: Path) -> None:
    source = open_source(open_model(str(save_tiny("gated_deltanet", tmp_path / "tiny")), None))
    with pytest.raises(
        RequestError, match=r"^a ratio of 0.001 removes none of the 16 key channels of tiny; give at .*"
    ):
        check_widths(source, [0.5, 0.001])
    check_widths(source, [0.0, 1 / 16])
