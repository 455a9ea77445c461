"""Checkpoints of a training run: what it takes to go on from a step to the very weights of an uninterrupted run.

`checkpoint-STEP/` holds the trained tensors, AdamW's state of each and the record of the last step. The place in the
data, the learning rate and the random generators follow from the number of the step, and so need no state of their
own. No file is a pickle. A checkpoint is written as a hidden sibling, brought to the disk and renamed: what bears the
name is whole, and its files are known by their hashes. The two newest are kept.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from compressor.errors import RequestError, RunError
from compressor.json_text import parse_json
from compressor.recovery.log import StepRecord
from compressor.recovery.settings import Identity
from compressor.recovery.sharding import part_like, whole

KEPT = 2

RUN_KEY = "run_key"
"""In an identity, what no reader can make anything of: a hash of the models and the text."""

_NAME = re.compile(r"checkpoint-([0-9]+)")
_PARTIAL_NAME = re.compile(r"\.checkpoint-[0-9]+\.partial")
_STATE, _TENSORS, _MOMENTS = "state.json", "trainable.safetensors", "optimizer.safetensors"
_SCHEMA = 1
# What reading a file of any content raises.
_UNREADABLE = (OSError, SafetensorError, ValueError, TypeError, KeyError)


class CheckpointError(RunError):
    """A checkpoint could not be written."""


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """A run after `record.step` finished steps; all tensors are on the CPU.

    Attributes:
        tensors: the trained tensors by name.
        moments: AdamW's state of each, by "name.key".
    """

    path: Path
    identity: Identity
    record: StepRecord
    tensors: Mapping[str, Tensor]
    moments: Mapping[str, Tensor]

    def restore(self, trainable: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        """Put the tensors and the optimiser's state back, bit for bit."""
        states: dict[str, dict[str, Tensor]] = {}
        for name, value in self.moments.items():
            owner, _, key = name.rpartition(".")
            # AdamW counts its steps on the CPU.
            states.setdefault(owner, {})[key] = value if key == "step" else part_like(value, trainable[owner])
        with torch.no_grad():
            for name, parameter in trainable.items():
                parameter.copy_(part_like(self.tensors[name], parameter))
                optimizer.state[parameter] = states.get(name, {})


@dataclass(frozen=True, slots=True, eq=False)
class TrainingState:
    """Tensors and moments as in `Checkpoint`."""

    tensors: dict[str, Tensor]
    moments: dict[str, Tensor]


def training_state(trainable: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> TrainingState:
    """What a checkpoint holds; every process calls it, since what is split over them is brought together."""
    tensors = {name: _saved(parameter) for name, parameter in trainable.items()}
    moments = {
        f"{name}.{key}": _saved(value)
        for name, parameter in trainable.items()
        for key, value in optimizer.state[parameter].items()
    }
    return TrainingState(tensors, moments)


def _saved(tensor: Tensor) -> Tensor:
    return whole(tensor.detach()).cpu().contiguous()


def save_checkpoint(folder: Path, identity: Identity, training: TrainingState, record: StepRecord) -> Path:
    """Write `checkpoint-STEP` into `folder` and remove all but the newest two; its path.

    Raises:
        CheckpointError: it cannot be, a full disk among the reasons. The checkpoints before it are left as they were.
    """
    path = folder / f"checkpoint-{record.step}"
    partial = _partial(path)
    try:
        _remove(partial)
        partial.mkdir()
        save_file(training.tensors, partial / _TENSORS)
        save_file(training.moments, partial / _MOMENTS)
        hashes = {name: _sha256(partial / name) for name in (_TENSORS, _MOMENTS)}
        state = {"schema": _SCHEMA, "identity": identity, "record": asdict(record), "sha256": hashes}
        (partial / _STATE).write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")
        _bring_to_disk(partial)
        partial.rename(path)
        _sync(folder)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(_failure(folder, path, error)) from error
    finally:
        _remove(partial)
    for old in checkpoints_in(folder)[KEPT:]:
        _remove(old)
    return path


def newest_checkpoint(
    folder: Path, identity: Identity, trainable: Mapping[str, nn.Parameter], on_unreadable: Callable[[Path], None]
) -> Checkpoint | None:
    """The newest checkpoint in `folder` that can be read; None where there are no checkpoints at all.

    `on_unreadable` is told of each newer one, after the one that is returned was found.

    Raises:
        RequestError: it belongs to a run with another identity or other trained tensors.
        RunError: there are checkpoints, and none can be read.
    """
    unreadable: list[Path] = []
    for path in checkpoints_in(folder):
        try:
            checkpoint = _read(path)
        except _UNREADABLE:
            unreadable.append(path)
            continue
        _refuse_another_run(checkpoint, identity, trainable)
        for broken in unreadable:
            on_unreadable(broken)
        return checkpoint
    if unreadable:
        raise RunError(
            f"{unreadable[0]} cannot be read, nor can any of the {len(unreadable) - 1} checkpoints before it; restore "
            "one, or remove the folder and run again without --resume."
        )
    return None


def refuse_without_resume(folder: Path, resume: bool) -> None:
    """Refuse to begin where an earlier run left checkpoints.

    Raises:
        RequestError: there are some in `folder`, and `resume` is false.
    """
    present = checkpoints_in(folder)
    if present and not resume:
        raise RequestError(
            f"{present[0]} is left of an earlier run; give --resume to go on with it, or remove {folder} to begin anew."
        )


def refuse_other_settings(folder: Path, settings: Identity) -> None:
    """Refuse by the settings alone, which need no model, what `newest_checkpoint` would refuse.

    Raises:
        RequestError: the newest checkpoint that tells its settings has others.
    """
    for path in checkpoints_in(folder):
        try:
            there: Identity = dict(_read_state(path)["identity"])
        except _UNREADABLE:
            continue
        differing = _differing(sorted(settings), there, settings)
        if differing:
            raise _another_run(path, differing)
        return


def checkpoints_in(folder: Path) -> list[Path]:
    """Newest first."""
    if not folder.is_dir():
        return []
    found = [(int(match[1]), path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found, reverse=True)]


def settle_leftovers(folder: Path, unreadable: list[Path]) -> None:
    """Remove what a killed run was writing, and put checkpoints that cannot be read aside under another name.

    Raises:
        RunError: one of them cannot be renamed.
    """
    for path in folder.iterdir():
        if _PARTIAL_NAME.fullmatch(path.name):
            _remove(path)
    for path in unreadable:
        aside = path.with_name(f"{path.name}.unreadable")
        _remove(aside)
        try:
            path.rename(aside)
        except OSError as error:
            raise RunError(
                f"{path} cannot be read nor renamed ({error.strerror}); remove it and run again with --resume."
            ) from error


def _read_state(path: Path) -> dict[str, Any]:
    state: dict[str, Any] = parse_json((path / _STATE).read_text(encoding="utf-8"))
    if state["schema"] != _SCHEMA:
        raise ValueError(f"schema {state['schema']}")
    return state


def _read(path: Path) -> Checkpoint:
    state = _read_state(path)
    # Earlier versions wrote no hashes.
    for name in (_TENSORS, _MOMENTS) if "sha256" in state else ():
        if _sha256(path / name) != state["sha256"][name]:
            raise ValueError(f"{name} is not what was written")
    record = StepRecord(**state["record"])
    return Checkpoint(path, dict(state["identity"]), record, load_file(path / _TENSORS), load_file(path / _MOMENTS))


def _refuse_another_run(checkpoint: Checkpoint, identity: Identity, trainable: Mapping[str, nn.Parameter]) -> None:
    names = {*identity, *checkpoint.identity} - {RUN_KEY}
    differing = _differing(sorted(names), checkpoint.identity, identity)
    # Settings that differ are the reason for what follows.
    if not differing and checkpoint.identity.get(RUN_KEY) != identity.get(RUN_KEY):
        differing.append("the models, the text or what was done before the training")
    shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in checkpoint.tensors.items()}
    if not differing and shapes != {name: (parameter.shape, parameter.dtype) for name, parameter in trainable.items()}:
        differing.append("the trained tensors")
    if differing:
        raise _another_run(checkpoint.path, differing)


def _differing(names: Sequence[str], there: Identity, here: Identity) -> list[str]:
    """What differs, in words; a setting that one of the two runs does not have is told only where no other differs."""
    differing = [name for name in names if there.get(name) != here.get(name)]
    of_both = [name for name in differing if name in there and name in here]
    return [f"{name} {there.get(name)} there and {here.get(name)} here" for name in of_both or differing]


def _another_run(path: Path, differing: Sequence[str]) -> RequestError:
    return RequestError(
        f"{path} belongs to another run, which differs in {', '.join(differing)}; resume with what that run was given, "
        "or remove its folder and run again without --resume."
    )


def _failure(folder: Path, path: Path, error: OSError | SafetensorError) -> str:
    reason = error.strerror if isinstance(error, OSError) else error
    kept = checkpoints_in(folder)
    last = f"{kept[0].name} is kept" if kept else "there is none before it"
    return (
        f"{path} could not be written ({reason}) and {last}; make room on its file system and run again with --resume."
    )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _bring_to_disk(folder: Path) -> None:
    for path in folder.iterdir():
        _sync(path)
    _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _partial(path: Path) -> Path:
    return path.with_name(f".{path.name}.partial")


def _remove(path: Path) -> None:
    """Under the name of what is not whole first, so that half of it never passes for a checkpoint."""
    if _NAME.fullmatch(path.name) and path.exists():
        with contextlib.suppress(OSError):
            path = path.rename(_partial(path))
    shutil.rmtree(path, ignore_errors=True)
