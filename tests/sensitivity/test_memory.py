"""The estimate of what backward passes take, against a process that runs them, and the refusal it leads to."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from compressor.errors import RequestError
from compressor.naming import key_of, option_of
from compressor.sensitivity.memory import BackwardPass, available_bytes, refuse_beyond

ROOT = Path(__file__).resolve().parents[2]
NEED = BackwardPass(
    tokens=1000,
    element_bytes=2,
    parameters=500,
    differentiated=100,
    layers=3,
    hidden_size=16,
    layer_width=100,
    state_elements=10,
    vocabulary=7,
)


def test_estimate_by_hand() -> None:
    """16 chunks of tokens; activations outweigh logits, unless the vocabulary is large: then a chunk of rows does."""
    base = 500 * 2 + 100 * 6 + 2 * 1000 * 3 * 16 * 2
    assert NEED.bytes == base + (6 * 1000 * 100 + 4 * 16 * 10) * 4
    assert replace(NEED, vocabulary=60_000).bytes == base + 4 * 60_000_000 * 4
    assert replace(NEED, vocabulary=100_000).bytes == base + 4 * 2**26 * 4


def test_refusal_tells_need_limit_and_remedy() -> None:
    cpu = torch.device("cpu")
    need = replace(NEED, tokens=10**6)
    refuse_beyond(need, need.bytes, cpu, option_of)
    with pytest.raises(RequestError) as caught:
        refuse_beyond(need, 10**9, cpu, option_of)
    assert str(caught.value) == (
        "the loss's gradient needs about 2.6 GB for a backward pass over 1,000,000 tokens and cpu has 1.0 GB free; "
        "lower --batch-size or --sequence-length, or choose a method without backward passes, such as drrqr."
    )
    with pytest.raises(RequestError, match=r"lower calibration\.batch_size or calibration\.sequence_length, or choose"):
        refuse_beyond(need, 10**9, cpu, key_of)


def test_available_memory_is_that_of_the_machine() -> None:
    lines = Path("/proc/meminfo").read_text().splitlines()
    total = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemTotal"))
    assert 10**8 < available_bytes(torch.device("cpu")) < total


MEASURE = """
import json, sys
from pathlib import Path
import torch
from compressor.calibration.tokens import TokenBatch
from compressor.needed_statistics import backward_pass
from compressor.loading import load_model
from compressor.preparation import open_model, open_source
from compressor.sensitivity.gradients import loss_gradients

def memory(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

source, cpu = open_source(open_model(None, None)), torch.device("cpu")
model = load_model(source.architecture, source.folder, source.checkpoint.raw_config, torch.float32, cpu)

def run(rows, length):
    batch = TokenBatch(torch.randint(0, 4000, (rows, length)), None)
    loss_gradients(source.architecture, model, source.mixers, [batch], lambda tokens: None)

run(1, 128)
before = memory("VmRSS")
Path("/proc/self/clear_refs").write_text("5")
rows, length = int(sys.argv[1]), int(sys.argv[2])
run(rows, length)
need = backward_pass(source, rows * length, 4)
print(json.dumps({"measured": memory("VmHWM") - before, "estimated": need.bytes - 4 * need.parameters}))
"""


@pytest.mark.parametrize("shape", [(8, 256), pytest.param((1, 1024), marks=pytest.mark.slow)])
def test_estimate_covers_what_a_process_takes(shape: tuple[int, int]) -> None:
    """On the bundled model, the weights that are loaded already left out."""
    command = [sys.executable, "-c", MEASURE, *map(str, shape)]
    child = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    figures = json.loads(child.stdout.splitlines()[-1])
    assert 0.4 * figures["estimated"] < figures["measured"] < figures["estimated"]
