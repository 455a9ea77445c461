"""Qwen3.5 and its kin with fla importable: they must equal themselves in a process that cannot see fla."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from compressor.errors import RunError
from compressor.reference.backend import enable_for_transformers
from tests.reference.formulas import relative_error
from tests.tiny_models import save_tiny

PROMPT = 70

WITHOUT_FLA = """
import sys
sys.modules["fla"] = None
import torch
from pathlib import Path
from safetensors.torch import save_file
from tests.reference.test_qwen3_5 import evaluate
from transformers import AutoModelForCausalLM
for folder in map(Path, sys.argv[1:]):
    model = AutoModelForCausalLM.from_pretrained(folder)
    recurrence = vars(sys.modules[type(model).__module__])["torch_chunk_gated_delta_rule"]
    assert recurrence.__module__.startswith("transformers")
    save_file(evaluate(model), folder / "result.safetensors")
"""


def evaluate(model: Any) -> dict[str, Tensor]:
    """Logits of a batch padded on the left, and what greedy generation makes of it."""
    tokens = torch.randint(2, 64, (2, PROMPT), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(tokens)
    mask[1, :9] = 0
    with torch.no_grad():
        logits = model(tokens, attention_mask=mask, use_cache=False).logits
        generated = model.generate(tokens, attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0)
    return {"logits": logits.contiguous(), "generated": generated}


FAMILIES = {
    "q35": "qwen3_5",
    "qn": "qwen3_next",
    "qn_experts": "qwen3_next",
    "q35_experts": "qwen3_5_moe",
    "oh": "olmo_hybrid",
}


@pytest.fixture(scope="module", params=FAMILIES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each family, with what one process that cannot see fla gave for it in result.safetensors."""
    folder = tmp_path_factory.mktemp("checkpoints")
    saved = [str(save_tiny(name, folder / name)) for name in FAMILIES]
    root = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])}
    subprocess.run([sys.executable, "-c", WITHOUT_FLA, *saved], env=environment, check=True)
    return folder


@pytest.fixture(scope="module")
def model(name: str, checkpoints: Path) -> Any:
    from transformers import AutoModelForCausalLM

    enable_for_transformers(f"transformers.models.{FAMILIES[name]}.modeling_{FAMILIES[name]}")
    return AutoModelForCausalLM.from_pretrained(checkpoints / name)


def test_equals_transformers_without_fla(name, model, checkpoints):
    expected, actual = load_file(checkpoints / name / "result.safetensors"), evaluate(model)
    assert relative_error(actual["logits"], expected["logits"]) < 1e-5
    assert torch.equal(actual["generated"], expected["generated"])


def test_generation_equals_single_passes_without_cache(model):
    result = evaluate(model)["generated"]
    tokens = result[:1, :PROMPT]
    for _ in range(6):
        with torch.no_grad():
            logits = model(tokens, use_cache=False).logits[:, -1]
        tokens = torch.cat([tokens, logits.argmax(-1, keepdim=True)], dim=1)
    assert torch.equal(result[:1], tokens)


def test_packed_sequences_are_refused(model):
    tokens = torch.randint(2, 64, (1, 20), generator=torch.Generator().manual_seed(0))
    for packing in ({"cu_seq_lens_q": torch.tensor([0, 5, 20])}, {"seq_idx": torch.zeros(1, 20, dtype=torch.int32)}):
        with pytest.raises(RunError, match=r"the model got packed sequences .* on the CPU.*: pad the batch"):
            model(tokens, **packing)


def test_every_parameter_gets_a_gradient(model):
    tokens = torch.randint(2, 64, (2, PROMPT), generator=torch.Generator().manual_seed(0))
    model(tokens).logits.square().mean().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
    model.zero_grad()
