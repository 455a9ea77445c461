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
from compressor.interruption import explained_interrupts

_PARTS = {
    "calibration": r"activations|weights|calibration(-\d+-of-\d+)?\.(safetensors|partial)",
    "training": "training",
    "cuts": "cuts",
}
"""What stands in a resume folder, by who goes on with it."""


def resume_folder_of(output: OutputFolder) -> Path:
    """Beside the output: its lock, and what --resume goes on with."""
    return output.path.with_name(f"{output.path.name}.resume")


def remove_resume_folder(output: OutputFolder, parts: Iterable[str]) -> None:
    """Remove `parts` of what runs leave there, and the folder where nothing else stands in it.

    A user's own file is not ours, nor is what another command that was interrupted may go on with.
    """
    folder = resume_folder_of(output)
    ours = re.compile("|".join(["lock", *(_PARTS[part] for part in parts)]))
    with suppress(OSError):
        for entry in list(folder.iterdir()):
            if not ours.fullmatch(entry.name):
                continue
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink(missing_ok=True)
        folder.rmdir()


@contextmanager
def held(outputs: Sequence[OutputFolder], saved: Sequence[Path], processes: Processes) -> Iterator[None]:
    """Lock `outputs`, the first of which is the run's, for all processes; what was left there is put right before any
    of them goes on.

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
                stack.enter_context(output.lock(resume_folder_of(output) / "lock"))
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
