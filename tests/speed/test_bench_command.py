"""`compress bench` on a CPU: figures, ratios to a baseline, JSON; what cannot be measured is refused before loading."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import compressor.loading
from compressor.bench_command import BenchSection, checked_sources
from compressor.cli import main
from compressor.errors import RequestError
from tests.tiny_models import read_weights, save_tiny, write_weights

FAST = ["--device", "cpu", "--prompt-length", "8", "--prefill-lengths", "16", "--steps", "2", "--warm-up", "1"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("gated_deltanet", tmp_path_factory.mktemp("models") / "dense")


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "narrow"
    return save_tiny("gated_deltanet", folder, overrides={"head_dim": 8, "expand_v": 2.0})


def test_a_model_against_a_baseline(
    model: Path, narrow: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "bench.json"
    words = ["bench", str(narrow), "--baseline", str(model), *FAST, "--batch-sizes", "1,3", "--repeats", "2"]
    assert main([*words, "--output", str(output)]) == 0
    printed = capsys.readouterr().out
    assert "loading dense" in printed
    assert "note: on a CPU recurrences are plain torch, not a GPU's kernels" in printed
    assert "decode: narrow batch 3 length 8: plain:" in printed
    assert "speed ratio" in printed
    assert "…" not in printed  # a terminal of 80 columns takes no digits away
    result = json.loads(output.read_text())
    assert [each["name"] for each in result["models"]] == ["dense", "narrow"]
    assert [each["folder"] for each in result["models"]] == [str(model), str(narrow)]
    assert {each["dtype"] for each in result["models"]} == {"float32"}
    assert len({each["weights_sha256"] for each in result["models"]}) == 2
    assert result["baseline"] == "dense"
    first, second = result["cells"][:2]
    assert second["speed_ratio"] == pytest.approx(first["seconds"] / second["seconds"])
    assert [(cell["part"], cell["model"], cell["batch"], cell["length"]) for cell in result["cells"]] == [
        ("decode", "dense", 1, 8), ("decode", "narrow", 1, 8), ("decode", "dense", 3, 8), ("decode", "narrow", 3, 8),
        ("prefill", "dense", 1, 16), ("prefill", "narrow", 1, 16),
    ]  # fmt: skip
    # 2 layers: float32 states of 2 heads x 16 x k, and convolutions of 2 * 2 * k + 2 * 16 channels with 4 taps.
    assert [cell["state_bytes_per_sequence"] for cell in result["cells"][:2]] == [
        4 * 2 * (2 * 16 * k + 4 * (4 * k + 32)) for k in (16, 8)
    ]
    assert all(cell["seconds"] > 0 and len(cell["rounds"]) == 2 for cell in result["cells"])
    assert result["settings"]["steps"] == 2
    assert result["environment"]["versions"]["torch"] == torch.__version__


def test_a_model_whose_logits_are_no_numbers_is_told(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its times look like any other's."""
    broken, output = save_tiny("gated_deltanet", tmp_path / "broken"), tmp_path / "bench.json"
    weights = read_weights(broken)
    name = next(name for name in weights if name.endswith("norm.weight"))
    write_weights(broken, weights | {name: torch.full_like(weights[name], torch.nan)})
    words = ["bench", str(broken), "--baseline", str(model), *FAST, "--batch-sizes", "1", "--repeats", "1"]
    assert main([*words, "--output", str(output)]) == 0
    printed = capsys.readouterr().out
    message = "warning: broken gives logits that are NaN or infinite; it is measured as it is, and what is measured "
    assert printed.count(message + "answers nothing: check its weights.\n") == 2
    assert "warning: dense" not in printed
    narrow = ["bench", str(broken), "--dtype", "bfloat16", *FAST, "--batch-sizes", "1", "--repeats", "1"]
    assert main(narrow) == 0
    assert "check its weights, or give --dtype float32.\n" in capsys.readouterr().out
    result = json.loads(output.read_text())
    assert [(each["name"], each["finite_logits"]) for each in result["models"]] == [("dense", True), ("broken", False)]
    assert all(cell["seconds"] > 0 for cell in result["cells"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--batch-sizes", "4,0"], "--batch-sizes: Input should be greater than or equal to 1 (got 0)"),
        (["--batch-sizes", "many"], '--batch-sizes: "many" is no whole number'),
        (["--batch-sizes", "1,16,1"], "--batch-sizes: 1 is named twice; leave one out."),
        (["--prefill-lengths", "64,64"], "--prefill-lengths: 64 is named twice"),
        (["--steps", "0"], "--steps: Input should be greater than or equal to 1 (got 0)"),
        (["--warm-up", "-1"], "--warm-up: Input should be greater than or equal to 0 (got -1)"),
        (["--prompt-length", "4096"], "--prompt-length 4096 is over the 2048 tokens of context that the model's"),
        (["--prefill-lengths", "16,2049"], "--prefill-lengths 2049 is over the 2048 tokens of context"),
        (["--device", "tpu"], '--device: "tpu" is no device; give auto, cpu, cuda or cuda:N'),
        (["--largest-batch"], "--largest-batch fills the memory of a GPU, and the device is cpu; leave it out."),
        (["--overwrite"], "--overwrite would change nothing here; add --output, or leave it out."),
        (["--output", "missing/bench.json"], "there is no folder"),
        (["--baseline", "./nowhere"], "nowhere"),
    ],
)
def test_impossible_requests_are_refused_before_loading(
    words: list[str],
    message: str,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def load(*_: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(compressor.loading, "load_model", load)
    monkeypatch.chdir(tmp_path)
    assert main(["bench", str(model), "--device", "cpu", *words]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert message in lines[0]


def test_a_gpu_that_is_not_there_is_refused(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", str(model), "--device", "cuda:99"]) == 2
    assert "--device cuda:99" in capsys.readouterr().err


def test_defaults_fit_the_context(model: Path) -> None:
    section, _ = checked_sources([str(model)], BenchSection(), torch.device("cpu"))
    assert (section.prompt_length, section.prefill_lengths) == (512, [2048])
    short = BenchSection().fitted_to(256)
    assert (short.prompt_length, short.prefill_lengths) == (256, [256])
    assert BenchSection().fitted_to(None).prefill_lengths == [2048, 8192, 16384]


def test_extrapolation_is_allowed_when_asked_for(model: Path) -> None:
    section = BenchSection(prompt_length=4096, prefill_lengths=[16384])
    with pytest.raises(RequestError, match="4096"):
        checked_sources([str(model)], section, torch.device("cpu"))
    wide = section.model_copy(update={"allow_extrapolation": True})
    assert checked_sources([str(model)], wide, torch.device("cpu"))[0].prompt_length == 4096


@pytest.mark.gpu
def test_on_a_gpu_steps_are_a_graph_that_agrees(tmp_path: Path) -> None:
    output = tmp_path / "bench.json"
    words = ["bench", "--batch-sizes", "1,8", "--prompt-length", "64", "--prefill-lengths", "128", "--steps", "20"]
    assert main([*words, "--largest-batch", "--output", str(output)]) == 0
    cells = json.loads(output.read_text())["cells"]
    assert [(cell["part"], cell["mode"]) for cell in cells] == [
        ("decode", "graph"), ("decode", "graph"), ("prefill", "plain"), ("largest batch", "plain"),
    ]  # fmt: skip
    assert all(cell["replay_agrees"] for cell in cells[:2])
    assert all(cell["failed"] is None for cell in cells)
    assert cells[-1]["batch"] > 8
