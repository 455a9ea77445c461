"""The finished cuts of a sweep, beside what `--resume` goes on with, so that an interrupted one need not repeat them.

A cut is finished when its record stands there: it is written last, in one step, and carries the key of what the cut was
made of. A checkpoint without a record counts for nothing.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from compressor.artifacts import write_json
from compressor.calibration.tokens import token_sha256
from compressor.copying import copy_tree
from compressor.errors import RequestError
from compressor.export.disk import translate_write_errors
from compressor.export.files import finish_tree, sync_file, sync_folder
from compressor.planning import RunPlan
from compressor.progress import StageReporter
from compressor.session import Session
from compressor.statistics_file import model_sha256
from compressor.sweep_results import SWEEP_SCHEMA, SweepRecord

# What file systems without hard links answer.
_NO_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK})


@dataclass(frozen=True, slots=True)
class _Entry:
    """`settings` and `key` are hashes: of what is known before the model is loaded, and of everything."""

    settings: str
    key: str
    record: SweepRecord


_ENTRY = TypeAdapter(_Entry)


@dataclass(frozen=True, slots=True)
class KeptCuts:
    """The finished cuts in `folder`. `settings` maps the name of every cut of the sweep to a hash of its settings."""

    folder: Path
    settings: Mapping[str, str]

    def record_files(self) -> list[Path]:
        """Of every cut, finished or not."""
        return [self._record_file(name) for name in self.settings]

    def finished_bytes(self) -> int:
        """What the checkpoints of finished cuts take on the disk."""
        total = 0
        # Asked before the lock is held, so that another sweep may take them away meanwhile.
        with contextlib.suppress(FileNotFoundError):
            for file in self._present():
                total += sum(path.lstat().st_size for path in file.with_suffix("").rglob("*"))
        return total

    def refuse_others(self, resume: bool) -> None:
        """Refuse to begin where an earlier sweep left finished cuts, before anything is loaded.

        Raises:
            RequestError: there are some, and `resume` is false, they were made with other settings, or this sweep does
                not make them and would leave them to be removed with what it went on with.
        """
        left = sorted(self.folder.glob("*.json"))
        if left and not resume:
            raise RequestError(
                f"{left[0]} is a finished cut of an earlier sweep; give --resume to go on with it, or remove "
                f"{self.folder} to begin anew."
            )
        for file in left:
            if file.stem not in self.settings and _read(file) is not None:
                raise RequestError(
                    f"{file} is a finished cut which this sweep does not make; give its ratio and method too, or "
                    f"remove {self.folder} to begin anew."
                )
        for file in self._present():
            entry = _read(file)
            if entry is not None and entry.settings != self.settings[file.stem]:
                raise self._of_another_sweep(file)

    def load(self, name: str, key: str, with_checkpoint: bool) -> SweepRecord | None:
        """The record of a finished cut; None where it is still to be made, as where its record cannot be read.

        Raises:
            RequestError: it was made of something else than what `key` stands for.
        """
        file = self._record_file(name)
        entry = _read(file)
        if entry is None:
            return None
        if entry.key != key:
            raise self._of_another_sweep(file)
        return entry.record if not with_checkpoint or file.with_suffix("").is_dir() else None

    def keep(self, name: str, key: str, record: SweepRecord, checkpoint: Path | None) -> None:
        """Move the finished `checkpoint`, which must be on the same file system, and then write its record.

        Raises:
            RunError: no space left.
        """
        with translate_write_errors(self.folder, None):
            self.folder.mkdir(parents=True, exist_ok=True)
            file = self._record_file(name)
            # An old one, which could not be read, must not speak for the new checkpoint.
            file.unlink(missing_ok=True)
            partial = file.with_suffix(".partial")
            write_json(partial, _ENTRY.dump_python(_Entry(self.settings[name], key, record), mode="json"))
            sync_file(partial)
            if checkpoint is not None:
                finish_tree(checkpoint)
                target = file.with_suffix("")
                if target.exists():
                    shutil.rmtree(target)
                checkpoint.rename(target)
                sync_folder(self.folder)
            partial.replace(file)
            sync_folder(self.folder)

    def put_into(self, folder: Path, called: Path) -> None:
        """Give every checkpoint a second name in `folder`: what is kept stays whole until the sweep is in place.

        Where the file system has no hard links, the files are copied. Messages know `folder` as `called`.

        Raises:
            RunError: a file cannot be read or written.
        """
        for name in self.settings:
            copy_tree(self.folder / name, folder / name, called / name, _link_or_copy)

    @contextmanager
    def told(self, reporter: StageReporter) -> Iterator[None]:
        """Where the block does not end well, say how many finished cuts there are to go on with."""
        ended = False
        try:
            yield
            ended = True
        finally:
            present = self._present()
            if not ended and present:
                reporter.say(
                    f"note: {len(present)} of {len(self.settings)} cuts are finished and kept in {self.folder}; "
                    "with --resume only the others are made"
                )

    def _present(self) -> list[Path]:
        return [file for file in self.record_files() if file.exists()]

    def _of_another_sweep(self, file: Path) -> RequestError:
        return RequestError(
            f"{file} is of another sweep (its model, data or settings differ); give the options of that one to go on "
            f"with it, or remove {self.folder} to begin anew."
        )

    def _record_file(self, name: str) -> Path:
        return self.folder / f"{name}.json"


def cut_key(plan: RunPlan, session: Session, settings: str, processes: int) -> str:
    """Of everything that a cut and its figures depend on: as the key of the calibration, and settings and material."""
    parts = [settings, model_sha256(session.base_sha256, plan.source.checkpoint.raw_config)]
    parts += [session.tokens.sha256, f"{processes} processes"]
    if session.material is not None:
        parts += [each.sha256 for each in session.material.prompt_sets]
        for text in session.material.texts:
            parts += [text.name, token_sha256([window.tokens for window in text.windows])]
            parts.append(json.dumps([[each.predicted, each.cluster, each.words, each.bytes] for each in text.windows]))
    return _sha256(parts)


def kept_cuts(base: RunPlan, cuts: Sequence[RunPlan], table_only: bool) -> KeptCuts:
    """Those of a sweep of `cuts`, in the resume folder of `base`."""
    kind = [str(SWEEP_SCHEMA), "figures" if table_only else "checkpoints"]
    settings = {cut.output.path.name: _sha256([*kind, cut.recipe.model_dump_json(), str(cut.cut.keep)]) for cut in cuts}
    return KeptCuts(base.resume_folder / "cuts", settings)


def _read(file: Path) -> _Entry | None:
    """None where it is not there or broken."""
    try:
        return _ENTRY.validate_json(file.read_bytes())
    except (OSError, ValidationError):
        return None


def _sha256(parts: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        shutil.copy2(source, target)
