"""Methods that run the model, and runs that try several: through the command."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from compressor.cli import main
from compressor.cutting import write_cut
from compressor.data_parallel import alone
from compressor.planning import RunOptions, held_out_to_refit, plan_run
from compressor.progress import Advance, StageReporter
from compressor.recipe import Recipe
from compressor.session import open_session
from tests.test_fisher_memory import little_memory
from tests.test_pipeline import compress, make_source, make_text

FAST = ["--no-verify", "--no-evaluate"]
MANY = ["--calibration-samples", "100000000", "--batch-size", "100000000", "--retrieval-share", "0"]
"""More tokens at once than the loss's gradient has memory for, where the text has few."""


def report_of(folder: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((folder / "compression.json").read_text(encoding="utf-8"))
    return report


def selection_of(folder: Path) -> str:
    return (folder / "selection.json").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_source("gated_deltanet", tmp_path_factory.mktemp("source") / "model")


@pytest.fixture(scope="module")
def mamba2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_source("m2", tmp_path_factory.mktemp("mamba2") / "model")


def test_fisher_chooses_and_comes_again_from_its_recipe(source: Path, tmp_path: Path) -> None:
    text, output, again = make_text(tmp_path), tmp_path / "out", tmp_path / "again"
    assert compress(source, output, text, "--method", "fisher", *FAST) == 0
    assert compress(source, tmp_path / "drrqr", text, *FAST) == 0
    report = report_of(output)
    assert report["method"] == report["selection"]["asked"] == "fisher"
    [candidate] = report["selection"]["candidates"]
    assert candidate["written"]
    assert candidate["passes"] == report["selection"]["passes"] > 8
    assert candidate["kl_after"] == report["recovery"]["refit"]["kl_after"]
    assert report["timings_s"]["selecting"] > 0
    assert selection_of(output) != selection_of(tmp_path / "drrqr")
    drrqr = report_of(tmp_path / "drrqr")["selection"]
    assert (drrqr["passes"], [cut["method"] for cut in drrqr["candidates"]]) == (0, ["drrqr"])
    assert main(["--recipe", str(output / "recipe.yaml"), "--output-dir", str(again), "--no-verify"]) == 0
    assert selection_of(again) == selection_of(output)


@pytest.mark.slow
def test_what_fisher_chose_is_verified(source: Path, tmp_path: Path) -> None:
    assert compress(source, tmp_path / "out", make_text(tmp_path), "--method", "fisher", "--no-evaluate") == 0
    assert report_of(tmp_path / "out")["verification"]["passed"]


def test_fisher_chooses_for_each_norm_epsilon(source: Path, tmp_path: Path) -> None:
    """Under auto the better of both is written, and the other's cost is counted; what judges them chooses nothing."""
    text, cuts = make_text(tmp_path), {}
    for policy in ("keep", "scaled", "auto"):
        assert compress(source, tmp_path / policy, text, "--method", "fisher", "--norm-epsilon", policy, *FAST) == 0
        cuts[policy] = report_of(tmp_path / policy)
    assert selection_of(tmp_path / "keep") != selection_of(tmp_path / "scaled")
    tried = {cut["norm_epsilon"]: cut for cut in cuts["auto"]["selection"]["candidates"]}
    for policy, cut in tried.items():
        # Five sequences of six choose.
        assert 0 < cut["passes"] < 0.9 * cuts[policy]["selection"]["passes"]
    best = min(tried, key=lambda policy: tried[policy]["kl_after"])
    assert cuts["auto"]["norm_epsilon"]["policy"] == best
    assert [policy for policy, cut in tried.items() if cut["written"]] == [best]
    assert (tmp_path / "auto" / "config.json").read_bytes() == (tmp_path / best / "config.json").read_bytes()
    assert cuts["auto"]["selection"]["passes"] == pytest.approx(sum(cut["passes"] for cut in tried.values()))
    assert cuts["auto"]["recovery"]["refit"]["kl_by_norm_epsilon"].keys() == {"keep", "scaled"}


class SelectingReporter(StageReporter):
    """Knows whether channels are being chosen."""

    selecting = False

    @contextmanager
    def stage(self, name: str, total: int, unit: str = "tokens") -> Iterator[Advance]:
        self.selecting = name == "selecting"
        with super().stage(name, total, unit) as advance:
            yield advance
        self.selecting = False


@pytest.mark.parametrize(
    ("method", "epsilon", "compared"), [("fisher", "auto", True), ("auto", "keep", True), ("fisher", "keep", False)]
)
def test_what_judges_cuts_chooses_none_of_them(
    method: str, epsilon: str, compared: bool, source: Path, tmp_path: Path
) -> None:
    """The sequences that run through the original while channels are chosen, seen by a hook."""
    settings = {
        "model": str(source),
        "output_dir": str(tmp_path / "out"),
        "selection": {"method": method, "ratio": 0.5, "round_to": 1, "norm_epsilon": epsilon},
        "calibration": {"source": str(make_text(tmp_path)), "samples": 6, "sequence_length": 80},
        "runtime": {"device": "cpu"},
        "export": {"evaluate": False},
    }
    options, reporter = RunOptions(), SelectingReporter(None)
    plan = plan_run(Recipe.from_settings(settings), options)
    plan.resume_folder.mkdir()
    session = open_session([plan], options, alone(), reporter)
    read: set[tuple[int, ...]] = set()

    def hook(_: object, arguments: tuple[Tensor, ...]) -> None:
        if reporter.selecting:
            read.update(tuple(row) for row in arguments[0].tolist())

    session.original.model.get_input_embeddings().register_forward_pre_hook(hook)
    folder = tmp_path / "cut"
    folder.mkdir()
    write_cut(plan, session.policies[0], session.original, folder, alone(), reporter)
    rows = [tuple(sequence.tolist()) for sequence in session.tokens.calibration]
    judging = held_out_to_refit(len(rows), 0.0)
    assert read == set(rows[:-judging] if compared else rows)


@pytest.mark.parametrize(
    ("sequences", "retrieval_share", "held_out"),
    [(128, 0.5, 25), (128, 0.0, 25), (4, 0.5, 2), (20, 0.05, 10), (20, 0.95, 10), (3, 0.5, 2), (2, 0.5, 1), (1, 0, 0)],
)
def test_what_a_refit_does_not_see(sequences: int, retrieval_share: float, held_out: int) -> None:
    """A fifth, and both kinds; never more than half."""
    assert held_out_to_refit(sequences, retrieval_share) == held_out


@pytest.mark.parametrize(
    ("name", "methods"),
    [
        ("gated_deltanet", ["drrqr", "energy", "fisher"]),
        pytest.param("m2", ["drrqr", "energy", "fisher", "ghost", "gradient"], marks=pytest.mark.slow),
        pytest.param("delta_net", ["drrqr", "energy", "fisher"], marks=pytest.mark.slow),
        pytest.param("m2_fla", ["drrqr", "energy", "fisher", "ghost", "gradient"], marks=pytest.mark.slow),
        pytest.param("bamba", ["drrqr", "energy", "fisher", "ghost", "gradient"], marks=pytest.mark.slow),
        pytest.param("zamba2", ["drrqr", "energy", "fisher", "ghost", "gradient"], marks=pytest.mark.slow),
    ],
)
def test_auto_writes_the_least_divergence_and_names_the_losers(
    name: str, methods: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """More methods where keys are not normalised; each candidate but fisher has the figures of a run of its own."""
    source, text, output = make_source(name, tmp_path / "source"), make_text(tmp_path), tmp_path / "out"
    assert compress(source, output, text, "--method", "auto", *FAST) == 0
    shown = " ".join(capsys.readouterr().out.split())
    report = report_of(output)
    assert report["selection"]["asked"] == "auto"
    assert [cut["method"] for cut in report["selection"]["candidates"]] == methods
    assert ("gradients" in report["timings_s"]) == ("gradient" in methods)
    tried = {cut["method"]: cut["kl_after"] for cut in report["selection"]["candidates"]}
    best = min(tried, key=lambda method: tried[method])
    assert report["method"] == best
    assert "tried:" in shown
    for method, kl in tried.items():
        folder = tmp_path / method
        assert compress(source, folder, text, "--method", method, *FAST) == 0
        if method == "fisher":
            # Alone it chooses on the sequences too that compare it here.
            assert report_of(folder)["selection"]["passes"] > report["selection"]["passes"]
            continue
        assert kl == pytest.approx(report_of(folder)["recovery"]["refit"]["kl_after"], rel=1e-6)
        assert (selection_of(folder) == selection_of(output)) == (method == best)
        if method == best:
            assert (folder / "model.safetensors").read_bytes() == (output / "model.safetensors").read_bytes()


def test_auto_without_a_refit_compares_plain_cuts(source: Path, tmp_path: Path) -> None:
    assert compress(source, tmp_path / "out", make_text(tmp_path), "--method", "auto", "--no-refit", *FAST) == 0
    report = report_of(tmp_path / "out")
    tried = report["selection"]["candidates"]
    assert all(cut["kl_before"] == cut["kl_after"] > 0 for cut in tried)
    assert report["recovery"] is None
    assert report["method"] == min(tried, key=lambda cut: cut["kl_after"])["method"]


def test_auto_leaves_out_what_does_not_fit_in_memory(
    mamba2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What needs forward passes alone is tried."""
    little_memory(monkeypatch, tmp_path)
    assert compress(mamba2, tmp_path / "out", make_text(tmp_path), "--method", "auto", *FAST, *MANY) == 0
    report, shown = report_of(tmp_path / "out"), " ".join(capsys.readouterr().out.split())
    assert [cut["method"] for cut in report["selection"]["candidates"]] == ["drrqr", "energy", "ghost"]
    assert report["method"] in ("drrqr", "energy", "ghost")
    assert "gradients" not in report["timings_s"]
    notes = [note for note in report["notes"] if "was not tried" in note]
    assert [note.partition(": ")[0] for note in notes] == [
        "the method fisher was not tried",
        "the method gradient was not tried",
    ]
    assert "Fisher selection needs about" in notes[0]
    assert "for a backward pass over 8,000,000,000 tokens and cpu has" in notes[1]
    assert "lower --batch-size or --sequence-length" in notes[1]
    assert all(f"note: {note.partition(':')[0]}" in shown for note in notes)


@pytest.mark.slow
def test_auto_reads_gradients_that_were_saved(mamba2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They need no backward pass here, whatever it would take; a file without them is refused."""
    text, saved, poor = make_text(tmp_path), tmp_path / "saved.safetensors", tmp_path / "poor.safetensors"
    auto = ["--method", "auto", *FAST]
    assert compress(mamba2, tmp_path / "first", text, *auto, "--save-statistics", str(saved)) == 0
    assert compress(mamba2, tmp_path / "second", text, *auto, "--statistics", str(saved)) == 0
    first, second = (report_of(tmp_path / name) for name in ("first", "second"))
    assert "gradients" in first["timings_s"]
    assert "gradients" not in second["timings_s"]
    assert {cut["method"]: cut["kl_after"] for cut in first["selection"]["candidates"]} == {
        cut["method"]: cut["kl_after"] for cut in second["selection"]["candidates"]
    }
    assert compress(mamba2, tmp_path / "poor", text, *FAST, "--save-statistics", str(poor)) == 0
    capsys.readouterr()
    assert compress(mamba2, tmp_path / "third", text, *auto, "--statistics", str(poor)) == 2
    assert "holds no gradient of the channels" in capsys.readouterr().err


def test_auto_makes_the_whole_width_without_gradients(mamba2: Path, tmp_path: Path) -> None:
    words = ["--method", "auto", "--target-dim", "16", *FAST, *MANY]
    assert compress(mamba2, tmp_path / "out", make_text(tmp_path), *words) == 0
    report = report_of(tmp_path / "out")
    assert [cut["method"] for cut in report["selection"]["candidates"]] == ["drrqr"]
    assert "gradients" not in report["timings_s"]
    assert not any("was not tried" in note for note in report["notes"])


@pytest.mark.parametrize("method", ["fisher", "auto"])
def test_a_whole_width_needs_no_choice(method: str, source: Path, tmp_path: Path) -> None:
    assert compress(source, tmp_path / "out", make_text(tmp_path), "--method", method, "--target-dim", "16", *FAST) == 0
    report = report_of(tmp_path / "out")
    assert len(report["selection"]["candidates"]) == 1
    assert report["selection"]["passes"] == 0
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()


@pytest.mark.parametrize("method", ["fisher", "auto"])
def test_scoring_is_refused(method: str, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compress(source, tmp_path / "out", make_text(tmp_path), "--method", method, "--scoring", "k") == 2
    assert f"Scoring 'k' means nothing to the method {method}" in capsys.readouterr().err


def test_fisher_without_enough_memory_is_refused_before_anything_is_read(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    little_memory(monkeypatch, tmp_path)
    words = [str(source), "--ratio", "0.5", "--round-to", "1", "--device", "cpu", "--method", "fisher", *MANY]
    words += ["--calibration", str(make_text(tmp_path)), "--output-dir", str(tmp_path / "out")]
    words += ["--sequence-length", "80"]
    assert main(words) == 2
    error = capsys.readouterr().err
    assert "Fisher selection needs about" in error
    assert "GB beside the model for a batch of 51 x 80 tokens and cpu has 0.0 GB free" in error
    assert "lower --batch-size or --sequence-length, or use --method drrqr, which needs no gradients" in error
    assert not (tmp_path / "out.resume").exists()
