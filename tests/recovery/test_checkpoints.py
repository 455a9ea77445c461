"""Checkpoints as files: exact, whole, no pickles, and only as many as are kept."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from compressor.errors import RequestError, RunError
from compressor.recovery import checkpoints
from compressor.recovery.checkpoints import (
    Checkpoint,
    checkpoints_in,
    newest_checkpoint,
    save_checkpoint,
    training_state,
)
from compressor.recovery.log import StepRecord
from compressor.recovery.settings import Identity

IDENTITY: Identity = {"learning_rate": 0.1, "steps": 9, "run_key": "a"}


def record(step: int) -> StepRecord:
    return StepRecord(step, 1 / 3, 0.1, 2.0, 0.0, 1e-3, 0.7, 128 * step, 0.1 + 0.2, 1e5 / 3)


class Trained:
    """Some tensors and their optimiser; the last tensor gets no gradient and so has no moments."""

    def __init__(self, seed: int, dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tensors = {
            "layers.0.a.weight": nn.Parameter(torch.randn(3, 4, generator=generator, dtype=dtype)),
            "layers.0.transposed": nn.Parameter(torch.randn(4, 5, generator=generator, dtype=dtype).T),
            "scale": nn.Parameter(torch.randn((), generator=generator, dtype=dtype)),
            "unused": nn.Parameter(torch.randn(2, generator=generator, dtype=dtype)),
        }
        self.optimizer = AdamW(self.tensors.values(), lr=0.1)

    def step(self, number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        for tensor in list(self.tensors.values())[:3]:
            tensor.grad = torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
        self.optimizer.step()

    def save(self, folder: Path, step: int) -> Path:
        return save_checkpoint(folder, IDENTITY, training_state(self.tensors, self.optimizer), record(step))

    def newest(self, folder: Path, on_unreadable: Callable[[Path], None] = print) -> Checkpoint | None:
        return newest_checkpoint(folder, IDENTITY, self.tensors, on_unreadable)

    def equals(self, other: Trained) -> bool:
        return all(torch.equal(tensor, other.tensors[name]) for name, tensor in self.tensors.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_restored_goes_on_bit_for_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    first, second = Trained(0, dtype), Trained(1, dtype)
    for number in range(3):
        first.step(number)
    path = first.save(tmp_path, 3)
    found = second.newest(tmp_path)
    assert found is not None
    assert (found.path, found.record, found.identity) == (path, record(3), IDENTITY)
    found.restore(second.tensors, second.optimizer)
    assert first.equals(second)
    for number in range(3, 6):
        first.step(number)
        second.step(number)
    assert first.equals(second)


def test_files_hold_no_pickle(tmp_path: Path) -> None:
    trained = Trained(0)
    trained.step(0)
    path = trained.save(tmp_path, 1)
    assert {file.name for file in path.iterdir()} == {"state.json", "trainable.safetensors", "optimizer.safetensors"}
    state = json.loads((path / "state.json").read_text())
    assert (state["schema"], state["identity"], state["record"]["step"]) == (1, IDENTITY, 1)
    for name in ("trainable", "optimizer"):
        with (path / f"{name}.safetensors").open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        assert len(header) == (4 if name == "trainable" else 9)


def test_the_two_newest_are_kept(tmp_path: Path) -> None:
    trained = Trained(0)
    trained.step(0)
    for step in (2, 9, 10, 100):
        trained.save(tmp_path, step)
    assert [path.name for path in checkpoints_in(tmp_path)] == ["checkpoint-100", "checkpoint-10"]
    assert len(list(tmp_path.iterdir())) == 2


def test_other_names_are_no_checkpoints(tmp_path: Path) -> None:
    for name in ("checkpoint-", "checkpoint-2.unreadable", ".checkpoint-3.partial", "checkpoint-x", "old-checkpoint-4"):
        (tmp_path / name).mkdir()
    assert checkpoints_in(tmp_path) == []
    assert checkpoints_in(tmp_path / "absent") == []
    assert Trained(0).newest(tmp_path) is None


@pytest.mark.parametrize("failing_call", [1, 2, 3, 4])
def test_a_full_disk_leaves_the_checkpoint_before(
    failing_call: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system may say so only when the bytes are brought to the disk."""
    trained = Trained(0)
    trained.step(0)
    good = trained.save(tmp_path, 4)
    before = {file.name: file.read_bytes() for file in good.iterdir()}
    calls: list[int] = []

    def fsync(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == failing_call:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpoints.os, "fsync", fsync)
    with pytest.raises(RunError) as failure:
        trained.save(tmp_path, 8)
    assert str(failure.value) == (
        f"{tmp_path}/checkpoint-8 could not be written (No space left on device) and checkpoint-4 is kept; make room "
        "on its file system and run again with --resume."
    )
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-4"]
    assert before == {file.name: file.read_bytes() for file in good.iterdir()}


def test_a_first_checkpoint_that_cannot_be_written(tmp_path: Path) -> None:
    trained = Trained(0)
    trained.step(0)
    with pytest.raises(
        RunError, match="checkpoint-1 could not be written .No such file or directory. and there is none"
    ):
        trained.save(tmp_path / "absent", 1)


def test_a_file_is_on_the_disk_before_the_name_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The three files and their folder are synchronised under the hidden name, the folder above after the renaming."""
    trained = Trained(0)
    trained.step(0)
    seen: list[tuple[str, bool]] = []
    sync = os.fsync

    def fsync(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        seen.append((path.relative_to(tmp_path).as_posix(), (tmp_path / "checkpoint-1").exists()))
        sync(descriptor)

    monkeypatch.setattr(checkpoints.os, "fsync", fsync)
    trained.save(tmp_path, 1)
    hidden = ".checkpoint-1.partial"
    files = {f"{hidden}/{name}" for name in ("state.json", "trainable.safetensors", "optimizer.safetensors")}
    assert set(seen[:3]) == {(name, False) for name in files}
    assert seen[3:] == [(hidden, False), (".", True)]


def test_another_identity_is_refused_also_by_a_broken_newest(tmp_path: Path) -> None:
    trained = Trained(0)
    trained.step(0)
    trained.save(tmp_path, 1)
    trained.save(tmp_path, 2)
    (tmp_path / "checkpoint-2" / "state.json").write_text("{")
    told: list[Path] = []
    other = IDENTITY | {"run_key": "b", "extra": 1}
    message = "checkpoint-1 belongs to another run, which differs in extra None there and 1 here; resume with"
    with pytest.raises(RequestError, match=message):
        newest_checkpoint(tmp_path, other, trained.tensors, told.append)
    assert told == []
    assert trained.newest(tmp_path, told.append) is not None
    assert told == [tmp_path / "checkpoint-2"]


@pytest.mark.parametrize("name", ["trainable.safetensors", "optimizer.safetensors"])
def test_a_flipped_bit_is_not_read(name: str, tmp_path: Path) -> None:
    """In the last tensor, where safetensors itself sees nothing."""
    trained = Trained(0)
    trained.step(0)
    trained.save(tmp_path, 1)
    file = trained.save(tmp_path, 2) / name
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    told: list[Path] = []
    found = trained.newest(tmp_path, told.append)
    assert found is not None
    assert found.record.step == 1
    assert told == [tmp_path / "checkpoint-2"]


def test_a_checkpoint_without_hashes_is_read(tmp_path: Path) -> None:
    """As earlier versions wrote it; one that should have hashes and lacks one is not."""
    trained = Trained(0)
    trained.step(0)
    state_file = trained.save(tmp_path, 1) / "state.json"
    state = json.loads(state_file.read_text())
    hashes = state.pop("sha256")
    assert set(hashes) == {"trainable.safetensors", "optimizer.safetensors"}
    state_file.write_text(json.dumps(state))
    assert trained.newest(tmp_path) is not None
    state_file.write_text(json.dumps(state | {"sha256": {}}))
    with pytest.raises(RunError, match="checkpoint-1 cannot be read"):
        trained.newest(tmp_path)
