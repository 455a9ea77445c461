"""The parts together: a checkpoint in a Hub cache, written as an output folder, read by stock transformers."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from compressor.export.companions import copy_companions
from compressor.export.folder import OutputFolder
from compressor.export.weights import OutputTensor, write_weights
from tests.tiny_models import read_weights, save_tiny, save_tiny_tokenizer


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    plain = save_tiny_tokenizer(save_tiny("q35", tmp_path / "plain"))
    blobs, folder = tmp_path / "cache" / "blobs", tmp_path / "cache" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    folder.mkdir(parents=True)
    for path in plain.iterdir():
        path.rename(blobs / f"hash-of-{path.name}")
        (folder / path.name).symlink_to(Path("../../blobs") / f"hash-of-{path.name}")
    return folder


def test_an_output_outlives_the_cache_and_serves_every_user(snapshot: Path, tmp_path: Path) -> None:
    tensors = read_weights(snapshot)
    planned = [
        OutputTensor(name, tensor.dtype, tuple(tensor.shape), tensor.clone)
        for name, tensor in sorted(tensors.items(), reverse=True)
    ]
    blobs = snapshot.parents[1] / "blobs"
    before = {path.name: path.read_bytes() for path in blobs.iterdir()}
    output = OutputFolder(tmp_path / "shared" / "out", False)
    mask = os.umask(0o022)
    try:
        output.check(snapshot)
        with output.lock(), output.staged() as folder:
            (folder / "config.json").write_bytes((snapshot / "config.json").read_bytes())
            names = copy_companions(snapshot, folder)
            weights = write_weights(planned, folder, 20_000, None)
    finally:
        os.umask(mask)
    assert {path.name: path.read_bytes() for path in blobs.iterdir()} == before
    shutil.rmtree(tmp_path / "cache")

    assert [path.name for path in output.path.parent.iterdir()] == ["out"]
    written = {path.name: path.lstat().st_mode for path in output.path.iterdir()}
    assert written.keys() == {"config.json", *names, *weights.files, "model.safetensors.index.json"}
    assert set(written.values()) == {0o100644}
    assert output.path.stat().st_mode & 0o7777 == 0o755
    model = AutoModelForCausalLM.from_pretrained(output.path)
    state = model.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in tensors.items())
    assert AutoTokenizer.from_pretrained(output.path)("a b")["input_ids"] != []
