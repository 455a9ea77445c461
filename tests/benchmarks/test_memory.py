"""The memory benchmark measures what a process and its children allocate, on a checkpoint that opens."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.memory import cut, watched
from benchmarks.random_checkpoint import make_checkpoint
from compressor.errors import RunError
from compressor.preparation import open_model, open_source
from tests.tiny_models import read_weights

ALLOCATE = "import time; memory = bytearray(b'x') * {}; time.sleep(1)"


def test_anonymous_memory_of_a_child_counts() -> None:
    inner = ALLOCATE.format(150_000_000)
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}], check=True)"
    figures = watched([sys.executable, "-c", outer])
    assert 150_000_000 < figures["peak_rss_anon"] < 250_000_000


def test_a_process_that_fails_is_said() -> None:
    with pytest.raises(RunError, match="failed with status 3; what it said is above."):
        watched([sys.executable, "-c", "raise SystemExit(3)"])


def test_a_random_checkpoint_is_cut(tmp_path: Path) -> None:
    size = make_checkpoint(tmp_path / "model", 4, 64, 0)
    weights = read_weights(tmp_path / "model")
    assert size == sum(tensor.nbytes for tensor in weights.values())
    source = open_source(open_model(str(tmp_path / "model"), None))
    assert len(source.mixers) == 3
    cut(tmp_path / "model", tmp_path / "cut")
    smaller = read_weights(tmp_path / "cut")
    assert {name for name in weights if weights[name].shape != smaller[name].shape} == {
        f"{mixer.tensors}.{name}.weight" for mixer in source.mixers for name in ("in_proj_qkv", "conv1d")
    }
