"""`compress evaluate` and `compress compare` as a user runs them, on the bundled model."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from compressor.calibration.tokenizer import load_tokenizer
from compressor.cli import main
from compressor.evaluation.result_files import read_models
from tests.test_interruption import file_size_limit
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
    assert [path.name for path in tmp_path.iterdir()] == ["same.json"]


def test_a_result_says_what_was_measured(tmp_path: Path, demo_model: Path) -> None:
    sliding = ["--windowing", "sliding", "--baseline", str(demo_model), "--tasks", "recall", "--samples", "1"]
    result = evaluate(tmp_path / "result.json", *sliding)
    assert result["settings"]["stride"] == 128
    weights = (demo_model / "model.safetensors").read_bytes()
    listed = f"{hashlib.sha256(weights).hexdigest()}  model.safetensors\n"
    for name, given in (("model", None), ("baseline", str(demo_model))):
        source = result[name]["source"]
        assert (source["given"], source["revision"]) == (given, None)
        assert source["weights_sha256"] == hashlib.sha256(listed.encode()).hexdigest()
    assert result["model"]["source"]["tokenizer_sha256"] == result["baseline"]["source"]["tokenizer_sha256"]
    again = evaluate(tmp_path / "again.json", "--windowing", "sliding", "--stride", "100")
    assert again["settings"]["stride"] == 100


@pytest.mark.slow
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


@pytest.mark.parametrize("mode", ["teacher-forced", "generation"])
def test_padding_side_moves_nothing(mode: str, tmp_path: Path, demo_model: Path) -> None:
    """Whichever side a tokenizer pads on, batches are padded on the right or not at all: every figure is the same."""
    measured = []
    for side in ("right", "left"):
        folder = tmp_path / side
        shutil.copytree(demo_model, folder)
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "padding_side": side}))
        assert load_tokenizer(folder, trust_remote_code=False).padding_side == side
        measured.append(evaluate(tmp_path / f"{side}.json", "--mode", mode, str(folder))["model"])
    first, second = measured
    assert {len(task["scores"]) for task in first["tasks"]} == {4}
    for name in ("texts", "tasks", "seen", "unseen"):
        assert first[name] == second[name]


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
        (["--tasks", "vt", "--lengths", "many"], '--lengths: "many" is no whole number'),
        (["--lengths", ""], 'lengths: "" is no whole number'),
        (["--lengths", "512,--5"], 'lengths: "--5" is no whole number'),
        (["--lengths", "\u00b2"], 'lengths: "\u00b2" is no whole number'),
        (["--lengths", f"512,{2**24 + 1}"], "less than or equal to 16777216"),
        (["--samples", "1000001"], "less than or equal to 1000000"),
        (["--windows", "9" * 30], "less than or equal to 1000000"),
        (["--window-length", "99999999"], "less than or equal to 16777216"),
        (["--batch-size", "99999999"], "less than or equal to 1000000"),
        (["--tasks", ""], "tasks: name at least one"),
        (["--tasks", "vt,recall,vt"], "--tasks: vt is named twice; leave one out."),
        (["--tasks", "lm_eval:piqa,piqa"], "--tasks: piqa is named twice"),
        (["--lengths", "512,600,512"], "--lengths: 512 is named twice"),
        (["--text", "demo", "--text", "demo"], "--text: demo is named twice"),
        (["--tasks", "vt,lm_eval:"], "--tasks: no name stands after lm_eval: where one is needed; write lm_eval:NAME"),
        (["--tasks", "niah_keys_03"], "did you mean niah_keys_3?"),
        (["--lengths", "4096", "--tasks", "vt"], "add --allow-extrapolation"),
        (["--tasks", "wikitext"], 'unknown task "wikitext"; did you mean lm_eval:wikitext? Tasks of lm-eval come last'),
        (["--tasks", "hella_swag"], "did you mean lm_eval:hellaswag"),
        (["--tasks", "grammar"], "a task of lm-eval is written lm_eval:NAME"),
        (["--samples", "0"], "greater than or equal to 1 (got 0)"),
        (["--suite", "slow"], "'quick' or 'full'"),
        (["--text", "absent.txt"], "does not exist"),
        (["--haystack", "absent.txt"], "--haystack would change nothing here; add a task that hides needles in text"),
        (["--haystack", "absent.txt", "--tasks", "niah_single_2"], "cannot be read"),
        (["--windowing", "sliding", "--window-length", "64", "--stride", "64"], "use one from 1 to 63"),
        (["--output", "absent/result.json"], "make it first"),
        (["--seed", "-1"], "seed: Input should be greater than or equal to 0 (got -1)"),
        (["--seed", str(2**63)], "seed: "),
        (["--device", "tpu"], "device: "),
        (["--dtype", "float8"], "'auto', 'float32', 'bfloat16' or 'float16' (got 'float8')"),
        (["--samples", "0", "--seed", "-1"], "samples: "),
        (["--baseline-revision", "main"], "add --baseline"),
        (["--overwrite"], "add --output"),
        (["--text", ""], '--text: "" is empty'),
        (["--haystack", ""], '--haystack: "" is empty'),
        (["--completion", ""], '--completion: "" is empty'),
        (["--lm-eval-tasks", ""], '--lm-eval-tasks: "" is empty'),
        (["--output", ""], '--output "" is empty'),
        (["--baseline", " "], '--baseline " " is empty'),
        ([""], 'MODEL "" is empty'),
    ],
)
def test_bad_requests_get_one_sentence(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", "--device", "cpu", *options]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert "Traceback" not in captured.err
    assert captured.out == ""


def test_another_vocabulary_is_no_baseline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = save_tiny_tokenizer(save_tiny("gated_deltanet", tmp_path / "other"))
    assert main(["evaluate", "--baseline", str(other), "--device", "cpu"]) == 2
    assert "evaluate each alone and use compress compare" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is no JSON"),
        ("{}", "holds no evaluation"),
        ('{"model": {"model": 1}}', "measure again"),
        ('{"schema": 1, "model": {"model": 1}}', "measure again"),
        ("[" * 100_000, "is no JSON"),
    ],
)
def test_files_that_hold_no_results(
    content: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "result.json"
    path.write_text(content)
    assert main(["compare", str(path)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [([""], 'FILE "" is empty'), (["{file}", ""], 'FILE "" is empty'), (["{file}", "--figure", ""], "--figure")],
)
def test_empty_names_are_refused_by_compare(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", *(word.format(file=tmp_path / "a.json") for word in words)]) == 2
    assert message in capsys.readouterr().err


def test_results_with_nothing_in_common(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "other[b].txt"
    text.write_text("It is a text of its own, and not a long one. " * 20)
    evaluate(tmp_path / "a.json")
    evaluate(tmp_path / "b.json", "--text", str(text), "--tasks", "recall", "--lengths", "600")
    assert "note: text " + str(text) in capsys.readouterr().out
    assert main(["compare", str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 2
    assert "were measured on different texts and tasks" in capsys.readouterr().err


def test_figures_are_shown_where_they_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with file_size_limit(1000):
        assert main(["evaluate", *FEW, "--device", "cpu", "--output", str(tmp_path / "a.json")]) == 1
    captured = capsys.readouterr()
    assert "niah_single_1 at 512" in captured.out
    assert "could not be written" in captured.err
    assert list(tmp_path.iterdir()) == []


def test_a_terminated_evaluation_says_so_in_one_line(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    command = [sys.executable, "-u", "-m", "compressor", "evaluate", "--device", "cpu", "--output", str(output)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        while not process.stdout.readline().startswith("evaluating"):
            assert process.poll() is None, process.stderr.read()
        process.terminate()
        assert process.wait(timeout=60) == 143
        assert process.stderr.read() == "compress: error: terminated; nothing was written.\n"
    assert list(tmp_path.iterdir()) == []
