"""Whole runs of two processes, as accelerate launches them, against those of one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from compressor.cli import main
from tests.families import open_tiny, tiny_tokens
from tests.test_pipeline import FAST, compress, make_source, make_text
from tests.tiny_models import read_weights

ROOT = Path(__file__).resolve().parents[1]
LAUNCH = (
    *("-m", "accelerate.commands.launch", "--num_processes", "2", "--num_machines", "1"),
    *("--mixed_precision", "no", "--dynamo_backend", "no", "--num_cpu_threads_per_process", "1"),
    *("--main_process_port", "0", "--module"),
)
ENGINES = {"replicated": ("--multi_gpu",), "sharded": ("--use_fsdp", "--fsdp_version", "2")}
SETTINGS = "sequences: 12, sequence_length: 64, batch_size: 2, rank: 2, retrieval_share: 0.0, learning_rate: 0.001"


def launched(
    *words: str, engine: tuple[str, ...] = ("--multi_gpu",), module: str = "compressor"
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *LAUNCH[:2], *engine, *LAUNCH[2:], module, *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def report_of(folder: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((folder / "compression.json").read_text(encoding="utf-8"))
    return report


def check_same(one: Path, two: Path) -> None:
    """The same selection and, but for the order of sums, the same weights; these load and run."""
    assert (one / "selection.json").read_bytes() == (two / "selection.json").read_bytes()
    assert (one / "config.json").read_bytes() == (two / "config.json").read_bytes()
    assert {path.name for path in one.iterdir()} == {path.name for path in two.iterdir()}
    first, second = read_weights(one), read_weights(two)
    assert first.keys() == second.keys()
    assert max(float((first[name] - second[name]).abs().max()) for name in first) < 1e-5
    of_one, of_two = (report_of(folder)["recovery"] for folder in (one, two))
    assert of_one["training"]["steps"] == of_two["training"]["steps"] == 6
    assert of_one["refit"]["tokens"] == of_two["refit"]["tokens"] > 0
    assert of_two["refit"]["kl_before"] == pytest.approx(of_one["refit"]["kl_before"], rel=1e-6)
    assert of_two["refit"]["kl_after"] == pytest.approx(of_one["refit"]["kl_after"], rel=1e-6)
    errors = [[layer["error_after"] for layer in found["refit"]["layers"]] for found in (of_one, of_two)]
    assert errors[1] == pytest.approx(errors[0], rel=1e-6)
    with torch.inference_mode():
        assert bool(open_tiny(two).model(input_ids=tiny_tokens(70)[None]).logits.isfinite().all())


@pytest.mark.slow
def test_a_run_with_training_and_adapter(tmp_path: Path) -> None:
    """Three batches for two processes, one of which has no held-out sequence of the refit."""
    source, recipe = make_source("gated_deltanet", tmp_path / "source"), tmp_path / "recipe.yaml"
    recipe.write_text(f"selection: {{ratio: 0.5}}\nrecovery: {{{SETTINGS}}}\n", encoding="utf-8")
    words = [str(source), "--recipe", str(recipe), "--calibration", str(make_text(tmp_path)), *FAST]
    words += ["--batch-size", "2", "--recover", "--no-evaluate"]
    one, two, adapter = tmp_path / "one", tmp_path / "two", tmp_path / "adapter"
    done = launched(*words, "--output-dir", str(two), "--save-adapter", str(adapter))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("result:") == done.stdout.count("calibrating:") == 1
    assert report_of(two)["verification"]["passed"]
    assert report_of(two)["calibration"]["tokens"] == 480
    assert (adapter / "adapter_config.json").exists()
    assert main([*words, "--output-dir", str(one), "--no-verify"]) == 0
    check_same(one, two)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"source", "text.txt", "recipe.yaml", "one", "two", "adapter"}


@pytest.mark.slow
def test_recovery_of_a_folder(tmp_path: Path) -> None:
    source, cut, recipe = make_source("delta_net", tmp_path / "source"), tmp_path / "cut", tmp_path / "recipe.yaml"
    recipe.write_text(f"recovery: {{{SETTINGS}}}\n", encoding="utf-8")
    assert compress(source, cut, make_text(tmp_path), "--no-verify", "--no-evaluate") == 0
    words = ["recover", str(cut), "--recipe", str(recipe), "--device", "cpu", "--no-evaluate", "--no-verify"]
    one = tmp_path / "one"
    assert main([*words, "--output-dir", str(one)]) == 0
    for name, engine in ENGINES.items():
        done = launched(*words, "--output-dir", str(tmp_path / name), engine=engine)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("result:") == done.stdout.count("training:") == 1
        assert "Warning" not in done.stderr
        check_same(one, tmp_path / name)
        assert not (tmp_path / f"{name}.resume").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "further"), [("gated_deltanet", set()), ("m2", {"ghost", "gradient"})])
def test_fisher_and_auto_choose_once_for_all_processes(name: str, further: set[str], tmp_path: Path) -> None:
    """Three sequences for each process; labels are drawn anew, so that the choice is not that of one process."""
    source, out = make_source(name, tmp_path / "source"), tmp_path / "out"
    words = [str(source), "--ratio", "0.5", "--calibration", str(make_text(tmp_path)), *FAST]
    done = launched(*words, "--method", "auto", "--no-evaluate", "--output-dir", str(out))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("result:") == 1
    report = report_of(out)
    assert report["verification"]["passed"]
    tried = {cut["method"]: cut for cut in report["selection"]["candidates"]}
    assert tried.keys() == {"drrqr", "energy", "fisher"} | further
    assert tried["fisher"]["passes"] > 8
    assert report["method"] == min(tried, key=lambda method: tried[method]["kl_after"])
    many = ["--calibration-samples", "1", "--sequence-length", "240", "--batch-size", "1"]
    few = launched(*words, *many, "--method", "fisher", "--no-refit", "--output-dir", str(tmp_path / "few"))
    assert few.returncode != 0
    assert "1 calibration sequences for 2 processes and needs one for each" in few.stderr


@pytest.mark.slow
def test_processes_leave_out_the_same_methods(tmp_path: Path) -> None:
    """Where one has too little memory, the other would wait for it in the passes that it does not make."""
    words = [str(make_source("m2", tmp_path / "source")), str(make_text(tmp_path)), str(tmp_path)]
    done = launched(*words, module="tests.left_out_process")
    assert done.returncode == 0, done.stderr
    first, second = (json.loads((tmp_path / index).read_text(encoding="utf-8")) for index in "01")
    assert first["methods"] == second["methods"] == ["drrqr", "energy", "fisher", "ghost"]
    reasons = [[note for note in each["notes"] if "was not tried" in note] for each in (first, second)]
    assert [len(each) for each in reasons] == [1, 1]
    assert reasons[0][0].startswith("the method gradient was not tried: the loss's gradient needs about ")
    assert reasons[1][0] == "the method gradient was not tried: another process has too little memory for it."
