"""The output folder of a run of one or several processes: the main one locks, stages and publishes it for all."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from compressor.data_parallel import Processes
from compressor.export.folder import OutputFolder
from compressor.export.interrupts import termination_raises
from compressor.export.locks import lock_file_of
from compressor.interruption import explained_interrupts
from compressor.recovery.tracking import written_figures

_ACTIVATIONS = "activations"
_SCRATCH = r"weights|calibration\.partial"
_PARTS = {
    "calibration": rf"{_SCRATCH}|{_ACTIVATIONS}|calibration(-\d+-of-\d+)?\.(safetensors|partial)",
    "training": "training",
    "cuts": "cuts",
}
"""What stands in a resume folder, by who goes on with it."""


def resume_folder_of(output: OutputFolder) -> Path:
    """Beside the output: its lock, and what --resume goes on with."""
    return lock_file_of(output.path).parent


def remove_resume_folder(output: OutputFolder, parts: Iterable[str]) -> None:
    """Remove `parts` of what runs leave there; the folder goes with its lock, where nothing else stands in it.

    A user's own file is not ours, nor is what another command that was interrupted may go on with.
    """
    _remove(resume_folder_of(output), "|".join(_PARTS[part] for part in parts))


def _remove_unusable(output: OutputFolder) -> None:
    """Remove what no run goes on with: weights in another form, a half-written file, activations of no finished layer,
    a training without a checkpoint.

    A file of other sums that a process of several is writing is its own to finish. What a tracker drew of a training
    is the user's, who asked for it.
    """
    folder = resume_folder_of(output)
    training = folder / _PARTS["training"]
    if not any(training.glob("checkpoint-*")) and written_figures(training) is None:
        _remove(folder, _PARTS["training"])
    finished = any(folder.glob("calibration*.safetensors"))
    _remove(folder, _SCRATCH if finished else f"{_SCRATCH}|{_ACTIVATIONS}")


def _remove(folder: Path, pattern: str) -> None:
    with suppress(OSError):
        for entry in list(folder.iterdir()):
            if not re.fullmatch(pattern, entry.name):
                continue
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink(missing_ok=True)


@contextmanager
def held(outputs: Sequence[OutputFolder], saved: Sequence[Path], processes: Processes) -> Iterator[None]:
    """Lock `outputs`, the first of which is the run's, for all processes; what was left there is put right before any
    of them goes on. However the run ends, nothing stays beside them that no other could go on with.

    Raises:
        RequestError: another run holds one of them; as `OutputFolder.check`.
        InterruptedRunError: a signal came to the main process; what is there of `saved`, files of all
            processes, holds what is done so far.
        RunError: another process failed.
    """
    with ExitStack() as stack:
        if processes.is_main:
            stack.enter_context(explained_interrupts(outputs[0].path, saved))
            for output in outputs:
                stack.enter_context(output.lock())
            stack.callback(_remove_unusable, outputs[0])
        else:
            stack.enter_context(termination_raises())
        processes.wait_for_all()
        yield


@contextmanager
def staged_by_main(output: OutputFolder, processes: Processes) -> Iterator[Path]:
    """`OutputFolder.staged` of the main process; the others see the same folder, and may read it alone.

    Raises:
        RunError: another process failed; as `OutputFolder.staged`.
    """
    with ExitStack() as stack:
        yield processes.from_main(lambda: stack.enter_context(output.staged()))
