"""`compress evaluate` and `compress compare` as a user runs them, on the bundled model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from compressor.cli import main
from compressor.evaluation.result_files import read_models
from tests.tiny_models import save_tiny, save_tiny_tokenizer

FEW = ["--tasks", "niah_single_1,recall", "--samples", "4", "--windows", "3", "--window-length", "256"]


def evaluate(output: Path, *options: str) -> dict[str, Any]:
    assert main(["evaluate", *FEW, "--device", "cpu", "--output", str(output), *options]) == 0
    return json.loads(output.read_text())


def test_a_model_against_itself_shows_no_difference(tmp_path: Path, demo_model: Path) -> None:
    result = evaluate(tmp_path / "same.json", "--baseline", str(demo_model))
    assert [change["difference"] for change in result["differences"]] == [0, 0, 0]
    assert all(change["paired"] for change in result["differences"])
    assert result["model"]["kl_text"] == pytest.approx(0, abs=1e-7)
    assert result["model"]["kl_prompts"] == pytest.approx(0, abs=1e-7)
    assert result["settings"]["samples"] == 4
    assert result["settings"]["lengths"] == [512]
    assert read_models(tmp_path / "same.json")[-1].tasks[0].task == "niah_single_1"
    assert not list(tmp_path.glob("*.partial"))


def test_batch_size_and_dtype_move_no_score(tmp_path: Path) -> None:
    """Prompts stay the same, so scores pair; bfloat16 moves the loss by far less than its standard error."""
    reference = evaluate(tmp_path / "a.json")["model"]
    for number, options in enumerate((["--batch-size", "1"], ["--dtype", "bfloat16"])):
        other = evaluate(tmp_path / f"{number}.json", *options)["model"]
        for one, two in zip(reference["tasks"], other["tasks"], strict=True):
            assert one["prompts_sha256"] == two["prompts_sha256"]
            assert one["scores"] == two["scores"]
        loss, other_loss = (figures["texts"][0]["figures"]["loss"] for figures in (reference, other))
        assert abs(loss["mean"] - other_loss["mean"]) < 0.1 * loss["standard_error"]


def test_generation_agrees_where_there_is_one_answer(tmp_path: Path) -> None:
    forced, generated = (
        evaluate(tmp_path / f"{mode}.json", "--mode", mode) for mode in ("teacher-forced", "generation")
    )
    for one, two in zip(forced["model"]["tasks"], generated["model"]["tasks"], strict=True):
        assert (one["mode"], two["mode"]) == ("teacher-forced", "generation")
        assert one["scores"] == two["scores"]


def test_compare_prints_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evaluate(tmp_path / "a.json")
    evaluate(tmp_path / "b.json", "--seed", "1")
    figure = tmp_path / "quality.png"
    assert main(["compare", str(tmp_path / "a.json"), str(tmp_path / "b.json"), "--figure", str(figure)]) == 0
    assert "unpaired" in capsys.readouterr().out
    assert figure.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tasks", "niah_singel_1"], "did you mean niah_single_1?"),
        (["--tasks", "vt", "--lengths", "100"], "length 100 is too short"),
        (["--tasks", "vt", "--lengths", "many"], "valid integer"),
        (["--lengths", "4096", "--tasks", "vt"], "add --allow-extrapolation"),
        (["--samples", "0"], "greater than or equal to 1 (got 0)"),
        (["--suite", "slow"], "'quick' or 'full'"),
        (["--text", "absent.txt"], "does not exist"),
        (["--haystack", "absent.txt"], "cannot be read"),
        (["--windowing", "sliding", "--window-length", "64", "--stride", "64"], "use one from 1 to 63"),
        (["--output", "absent/result.json"], "make it first"),
        (["--seed", "-1"], "use 0 or more"),
    ],
)
def test_bad_requests_get_one_sentence(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", "--device", "cpu", *options]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_another_vocabulary_is_no_baseline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = save_tiny_tokenizer(save_tiny("gated_deltanet", tmp_path / "other"))
    assert main(["evaluate", "--baseline", str(other), "--device", "cpu"]) == 2
    assert "evaluate each alone and use compress compare" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [("", "is no JSON"), ("{}", "holds no evaluation"), ('{"model": {"model": 1}}', "measure again")],
)
def test_files_that_hold_no_results(
    content: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "result.json"
    path.write_text(content)
    assert main(["compare", str(path)]) == 2
    assert message in capsys.readouterr().err
