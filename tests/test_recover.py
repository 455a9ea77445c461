"""The refit inside a run, training inside a run and by `compress recover`: through the command, on real models."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from compressor.cli import main
from compressor.demo import calibration_text_path, demo_model_path
from compressor.errors import RequestError
from compressor.export.replacement import replace_tensors
from compressor.recipe import Recipe
from tests.test_pipeline import FAST, compress, make_source, make_text
from tests.tiny_models import edit_config, read_weights, write_weights
from tests.verification.facts import oracle_facts

TRAIN = ["--sequences", "12", "--sequence-length", "64", "--batch-size", "2", "--rank", "2", "--retrieval-share", "0"]


def report_of(folder: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((folder / "compression.json").read_text())
    return report


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Gated DeltaNet cut to half its width, beside its source and text."""
    folder = tmp_path_factory.mktemp("cut")
    source = make_source("gated_deltanet", folder / "source")
    assert compress(source, folder / "half", make_text(folder), "--no-verify", "--no-evaluate") == 0
    return folder / "half"


@pytest.mark.parametrize("name", ["gated_deltanet", "delta_net", "q35"])
def test_a_refit_touches_output_projections_alone(name: str, tmp_path: Path) -> None:
    source, text = make_source(name, tmp_path / "source"), make_text(tmp_path)
    assert compress(source, tmp_path / "refitted", text, "--no-verify", "--no-evaluate") == 0
    assert compress(source, tmp_path / "plain", text, "--no-refit", "--no-verify", "--no-evaluate") == 0
    refitted, plain = read_weights(tmp_path / "refitted"), read_weights(tmp_path / "plain")
    changed = {key for key in plain if not torch.equal(plain[key], refitted[key])}
    refit = report_of(tmp_path / "refitted")["recovery"]["refit"]
    assert changed <= {key for key in plain if key.endswith(("o_proj.weight", "out_proj.weight"))}
    assert len(changed) == sum(layer["ridge"] is not None for layer in refit["layers"]) * refit["kept"]
    assert refit["kl_after"] <= refit["kl_before"] or not refit["kept"]
    assert report_of(tmp_path / "plain")["recovery"] is None


@pytest.fixture
def changed_projections(cut: Path, tmp_path: Path) -> Path:
    """A cut with twice its output projections."""
    folder = Path(shutil.copytree(cut, tmp_path / "changed"))
    weights = read_weights(folder)
    replace_tensors(folder, {name: 2 * tensor for name, tensor in weights.items() if name.endswith("o_proj.weight")})
    return folder


@pytest.mark.parametrize("refitted", [False, True])
def test_a_changed_projection_is_no_slice_unless_it_was_refitted(
    refitted: bool,
    changed_projections: Path,
    cut: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = cut.parent / "source"
    options = ["--refitted"] * refitted
    facts = oracle_facts(changed_projections, source, monkeypatch, capsys, *options)
    if refitted:
        assert facts["first_difference"] is None
        assert facts["relative_error"] < 1e-4
    else:
        assert facts["first_difference"].endswith("o_proj.weight")
        assert facts["relative_error"] > 0.01


@pytest.mark.slow
@pytest.mark.parametrize(("kept", "status"), [(False, 1), (True, 0)])
def test_a_changed_projection_fails_verification_unless_the_report_says_refit(
    kept: bool, status: int, changed_projections: Path, cut: Path
) -> None:
    report = report_of(changed_projections)
    refit = {"refit": {**report["recovery"]["refit"], "kept": kept}}
    (changed_projections / "compression.json").write_text(json.dumps(report | {"recovery": refit}))
    words = ["verify", str(changed_projections), "--original", str(cut.parent / "source"), "--device", "cpu"]
    assert main(words) == status


@pytest.mark.parametrize("options", [[], pytest.param(["--no-refit"], marks=pytest.mark.slow)])
def test_both_norm_epsilons_are_reported_as_runs_of_their_own_find_them(options: list[str], tmp_path: Path) -> None:
    source, text = make_source("gated_deltanet", tmp_path / "source"), make_text(tmp_path)
    found = {}
    for policy in ("keep", "scaled", "auto"):
        words = ["--norm-epsilon", policy, "--no-verify", *options]
        assert compress(source, tmp_path / policy, text, *words) == 0
        found[policy] = report_of(tmp_path / policy)
    chosen = found["auto"]["norm_epsilon"]["policy"]
    by_policy = found["auto"]["evaluation"]["by_norm_epsilon"]
    assert set(by_policy) == {"keep", "scaled"}
    for policy in ("keep", "scaled"):
        own = found[policy]["evaluation"]["after"]
        assert by_policy[policy]["kl_text"] == pytest.approx(own["kl_text"], rel=1e-4)
    weights = [read_weights(tmp_path / name) for name in ("auto", chosen)]
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("auto", chosen)]
    assert configs[0] == configs[1]
    assert f"norm_epsilon: {chosen}" in (tmp_path / "auto" / "recipe.yaml").read_text()


def test_too_few_tokens_to_refit_are_refused_before_anything_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = make_source("gated_deltanet", tmp_path / "source")
    words = [str(source), "--ratio", "0.5", "--calibration", str(make_text(tmp_path)), *FAST]
    assert main([*words, "--calibration-samples", "2", "--sequence-length", "20"]) == 2
    assert "needs at least" in capsys.readouterr().err


@pytest.mark.parametrize("trainable", ["lora", pytest.param("mixers", marks=pytest.mark.slow)])
def test_recovery_trains_a_cut_and_the_result_is_verified(trainable: str, cut: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    rank = ["--rank", "2"] if trainable == "lora" else []
    words = ["recover", str(cut), "--output-dir", str(output), *TRAIN[2:6], "--retrieval-share", "0", *rank]
    text = tmp_path / "few.txt"
    text.write_text(calibration_text_path().read_text(encoding="utf-8")[:270].lower(), encoding="utf-8")
    words += ["--sequences", "60", "--no-evaluate", "--text", str(text)]
    assert main([*words, "--trainable", trainable, "--learning-rate", "3e-3", "--device", "cpu"]) == 0
    before, after = read_weights(cut), read_weights(output)
    assert {name: tensor.shape for name, tensor in before.items()} == {n: t.shape for n, t in after.items()}
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed
    assert not any("mlp" in name or "embed" in name or "lm_head" in name for name in changed)
    report = report_of(output)
    training = report["recovery"]["training"]
    lines = [json.loads(line) for line in (output / "training.jsonl").read_text().splitlines()]
    assert training["steps"] == len(lines) == 30
    assert training["tokens"] == 30 * 2 * 64
    assert sum(line["kl"] for line in lines[-5:]) < sum(line["kl"] for line in lines[:5])
    assert report["evaluation"] is None
    assert report["verification"]["passed"]
    assert any("trained after the cut" in note for note in report["verification"]["notes"])
    assert (output / "training.png").stat().st_size > 1000
    if trainable == "mixers":
        assert main(["verify", str(output), "--device", "cpu"]) == 0
    assert not (tmp_path / "out.resume").exists()


def test_figures_of_training_are_logged(cut: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cut"
    shutil.copytree(cut, folder)
    settings = yaml.safe_load((folder / "recipe.yaml").read_text(encoding="utf-8"))
    settings["evaluation"] |= {"tasks": ["recall_2"], "lengths": [400], "samples": 2}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    output = tmp_path / "out"
    words = ["recover", str(folder), *TRAIN, "--output-dir", str(output), "--evaluate-every", "3", "--no-verify"]
    assert main([*words, "--device", "cpu"]) == 0
    lines = [json.loads(line) for line in (output / "training.jsonl").read_text(encoding="utf-8").splitlines()]
    figures = {line["step"]: line["evaluation"] for line in lines if "evaluation" in line}
    assert sorted(figures) == [0, 3, 6]
    assert all(set(values) == {"loss on demo", "recall_2 at 400"} for values in figures.values())
    final = report_of(output)["evaluation"]["after"]
    assert figures[6]["loss on demo"] == pytest.approx(final["texts"][0]["figures"]["loss"]["mean"], rel=1e-4)


def test_a_run_that_trains_is_the_cut_and_then_the_training(cut: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    settings = "train: true, sequences: 12, sequence_length: 64, batch_size: 2, rank: 2, retrieval_share: 0.0"
    recipe.write_text(f"selection: {{ratio: 0.5}}\nrecovery: {{{settings}}}\n", encoding="utf-8")
    words = [str(cut.parent / "source"), "--recipe", str(recipe), "--output-dir", str(tmp_path / "one")]
    words += ["--calibration", str(cut.parent / "text.txt"), *FAST, "--no-verify", "--no-evaluate"]
    assert main(words) == 0
    words = ["recover", str(cut), "--output-dir", str(tmp_path / "two"), *TRAIN, "--no-verify", "--no-evaluate"]
    assert main([*words, "--device", "cpu"]) == 0
    one, two = read_weights(tmp_path / "one"), read_weights(tmp_path / "two")
    assert all(torch.equal(one[name], two[name]) for name in two)


@pytest.mark.slow
@pytest.mark.parametrize("stop", [signal.SIGKILL, signal.SIGINT])
def test_an_interrupted_run_ends_with_the_same_weights(stop: signal.Signals, cut: Path, tmp_path: Path) -> None:
    words = [
        "recover",
        str(cut),
        *TRAIN[2:],
        "--sequences",
        "60",
        "--checkpoint-every",
        "3",
        "--device",
        "cpu",
        "--no-evaluate",
    ]
    words += ["--no-verify"]
    assert main([*words, "--output-dir", str(tmp_path / "whole")]) == 0
    command = [sys.executable, "-m", "compressor", *words, "--output-dir", str(tmp_path / "parts")]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    work = tmp_path / "parts.resume" / "training"
    for _ in range(1200):
        if list(work.glob("checkpoint-*")) or running.poll() is not None:
            break
        time.sleep(0.05)
    running.send_signal(stop)
    output, _ = running.communicate(timeout=120)
    assert running.returncode not in (0, 1, 2), output
    assert not (tmp_path / "parts").exists()
    assert list(work.glob("checkpoint-*"))
    words += ["--output-dir", str(tmp_path / "parts")]
    assert main(words) == 2
    for other in (["--alpha", "9"], ["--retrieval-share", "0.5", "--sequence-length", "300"], ["--text", "demo"]):
        assert main([*words, "--resume", *other]) == 2
    assert main([*words, "--resume", "--checkpoint-every", "4"]) == 0
    one, two = read_weights(tmp_path / "whole"), read_weights(tmp_path / "parts")
    assert all(torch.equal(one[name], two[name]) for name in one)


def refused(capsys: pytest.CaptureFixture[str], words: list[str], *parts: str) -> None:
    assert main(["recover", *words, "--device", "cpu"]) == 2
    message = capsys.readouterr().err
    assert all(part in message for part in parts), message


def test_impossible_requests_are_refused(cut: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, output = cut.parent / "source", ["--output-dir", str(tmp_path / "out")]
    refused(capsys, [str(source), *TRAIN, *output], "was not compressed")
    refused(capsys, [str(tmp_path / "absent"), *TRAIN, *output], "there is no folder")
    refused(capsys, [str(cut), *TRAIN, *output, "--teacher", str(cut)], "can teach nothing")
    refused(capsys, [str(cut), *TRAIN, *output, "--teacher", str(demo_model_path())], "vocabulary")
    refused(capsys, [str(cut), *TRAIN, *output, "--rank", "500"], "rank", "500")
    refused(capsys, [str(cut), *TRAIN, *output, "--targets", "q_projj"], "q_projj", "did you mean q_proj")
    refused(capsys, [str(cut), *TRAIN, *output, "--text", str(tmp_path / "absent.txt")], "does not exist")
    refused(capsys, [str(cut), *TRAIN, *output, "--sequences", "0", "--alpha", "-1"], "sequences", "alpha")
    refused(capsys, [str(cut), *TRAIN, *output, "--kl-weight", "0"], "nothing is learnt")
    refused(
        capsys, [str(cut), *TRAIN, *output, "--evaluate-every", "2", "--no-evaluate"], "--evaluate-every 2", "leave one"
    )
    refused(capsys, [str(cut), *TRAIN, *output, "--sequence-length", "4096"], "4096", "2048 positions")
    refused(capsys, [str(cut), *TRAIN, "--output-dir", str(cut)], "source folder")
    other = tmp_path / "other"
    shutil.copytree(source, other)
    edit_config(other, {"num_hidden_layers": 1})
    assert main(["recover", str(cut), *TRAIN, *output, "--teacher", str(other), "--device", "cpu"]) == 2
    assert not (tmp_path / "out").exists()


def test_a_teacher_of_other_weights_is_refused(cut: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other"
    shutil.copytree(cut.parent / "source", other)
    weights = read_weights(other)
    name = next(name for name in weights if "mlp" in name and name.endswith("weight"))
    weights[name][0, 0] += 1
    write_weights(other, weights)
    words = [str(cut), *TRAIN, "--output-dir", str(tmp_path / "out"), "--teacher", str(other)]
    refused(capsys, words, "are not those that half was cut from")
    assert not (tmp_path / "out").exists()


def test_a_trained_folder_is_not_trained_again(cut: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    once = tmp_path / "once"
    words = [str(cut), *TRAIN, "--output-dir", str(once), "--no-evaluate", "--no-verify", "--device", "cpu"]
    assert main(["recover", *words]) == 0
    report = report_of(once)
    assert f"from_pretrained('{once}')" in report["load_line"]
    assert f"output_dir: {once}" in (once / "recipe.yaml").read_text(encoding="utf-8")
    refused(capsys, [str(once), *TRAIN, "--output-dir", str(tmp_path / "twice")], "was trained already (6 steps)")


@pytest.mark.slow
def test_fifty_steps_of_the_demo_lower_its_divergence(tmp_path: Path) -> None:
    half = tmp_path / "half"
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("evaluation: {tasks: [recall, fwe], samples: 8}\n", encoding="utf-8")
    options = ["--calibration-samples", "6", "--sequence-length", "512", "--no-verify", "--no-refit", "--device", "cpu"]
    assert main(["--ratio", "0.75", "--output-dir", str(half), "--recipe", str(recipe), *options]) == 0
    words = ["recover", str(half), "--output-dir", str(tmp_path / "out"), "--sequences", "100", "--batch-size", "2"]
    words += ["--sequence-length", "256", "--learning-rate", "2e-3", "--retrieval-share", "0.5", "--device", "cpu"]
    assert main([*words, "--no-verify"]) == 0
    before, after = (report_of(folder)["evaluation"]["after"] for folder in (half, tmp_path / "out"))
    assert report_of(tmp_path / "out")["recovery"]["training"]["steps"] == 50
    assert after["kl_prompts"] < 0.8 * before["kl_prompts"]
    lines = [json.loads(line) for line in (tmp_path / "out" / "training.jsonl").read_text().splitlines()]
    assert sum(line["kl"] for line in lines[-5:]) < 0.3 * sum(line["kl"] for line in lines[:5])


def test_refusals_are_request_errors() -> None:
    with pytest.raises(RequestError, match="recovery"):
        Recipe.from_settings({"selection": {"ratio": 0.5}, "recovery": {"trainable": "all"}})
