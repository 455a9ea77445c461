"""The main job on a GPU: stock kernels calibrate, generate and agree with the oracle."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from compressor.calibration.statistics import gram
from compressor.cli import main

pytestmark = pytest.mark.gpu


def run(words: list[str], output: Path) -> dict[str, dict[str, float]]:
    assert (
        main([*words, "--ratio", "0.5", "--calibration", "demo", "--device", "cuda", "--output-dir", str(output)]) == 0
    )
    return json.loads((output / "compression.json").read_text())


def test_demo_on_a_gpu(tmp_path: Path) -> None:
    report = run([], tmp_path / "out")
    assert report["verification"]["generated_by"] == "stock kernels"
    assert report["verification"]["oracle_relative_error"] < 1e-3
    assert main(["verify", str(tmp_path / "out"), "--device", "cuda"]) == 0


def test_gpu_and_cpu_choose_the_same_channels(tmp_path: Path) -> None:
    run(["--no-verify"], tmp_path / "gpu")
    assert main(["--ratio", "0.5", "--device", "cpu", "--no-verify", "--output-dir", str(tmp_path / "cpu")]) == 0
    kept = [json.loads((tmp_path / name / "selection.json").read_text())["layers"] for name in ("gpu", "cpu")]
    shared = [
        len(set(left) & set(right)) / len(left)
        for layer in kept[0]
        for left, right in zip(kept[0][layer], kept[1][layer], strict=True)
    ]
    assert min(shared) >= 0.9  # bfloat16 against float32 activations


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gdn-28m", "deltanet-14m", "deltaproduct-14m", "qwen35-18m"])
def test_trained_models(name: str, shared_models: Path, tmp_path: Path) -> None:
    if not (shared_models / name).is_dir():
        pytest.skip(f"not measured: {shared_models / name} is absent")
    report = run([str(shared_models / name), "--calibration-samples", "16"], tmp_path / "out")
    assert report["verification"]["generated_by"] == "stock kernels"
    assert 0 < report["evaluation"]["after"]["kl_text"] < 0.5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gram_on_a_gpu(dtype: torch.dtype) -> None:
    block = torch.randn(4, 2100, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = torch.einsum("hnd,hne->hde", block.double(), block.double())
    actual = gram(block.cuda()).double().cpu()
    assert float((actual - expected).norm() / expected.norm()) < 1e-6
