"""The output folder: written as a hidden sibling, renamed into place at the end.

Beside `NAME` stand, while a run writes, `.NAME.partial-PID` (the new folder) and, for the moment
between two renames, `.NAME.replaced-PID` (the old one, complete). A run that was killed leaves
them; the next one restores or removes them.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from compressor.errors import RequestError, RunError
from compressor.export.advice import WITH_RESUME, Advice
from compressor.export.disk import translate_write_errors
from compressor.export.files import finish_tree, made_folders, sync_folder
from compressor.export.interrupts import signals_ignored, termination_raises
from compressor.export.locks import lock_file_of, refuse_foreign, run_lock
from compressor.export.placement import check_placement, refuse_unusable


class OutputFolder:
    """One run's output. Ask `check` before any work, hold `lock` during it, write inside `staged`.

    A link is resolved once, here: the folder it leads to is what is written, and the link stays. `advice` is what
    messages may tell the user to do.
    """

    def __init__(self, path: Path, overwrite: bool, advice: Advice = WITH_RESUME) -> None:
        self._given = path
        self._overwrite = overwrite
        self._advice = advice
        self.path = Path(os.path.realpath(path))
        self._partial = self.path.parent / f".{self.path.name}.partial-{os.getpid()}"
        self._replaced = self.path.parent / f".{self.path.name}.replaced-{os.getpid()}"

    def check(self, source: Path | None) -> None:
        """Refuse what cannot end well; touches nothing. `source` is the checkpoint's folder, None when not yet known.

        Raises:
            RequestError: the path cannot take an output folder, or is, holds or is inside `source`, or the folder
                beside it that runs go on with is not theirs.
        """
        check_placement(self._given, self.path, self._overwrite, source, self._advice)
        refuse_foreign(lock_file_of(self.path))

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keep other runs off this output while inside.

        Then put right what a killed run left beside the output, and `check` what is there now.

        Raises:
            RequestError: another run holds the lock, or as `check`.
        """
        with run_lock(lock_file_of(self.path), self.path):
            self._settle_leftovers()
            self.check(None)
            yield

    @contextmanager
    def staged(self) -> Iterator[Path]:
        """A new empty folder to write into, which takes the output's place when the block ends well.

        At every moment the old or the new folder is complete. An exception, Ctrl-C and SIGTERM among
        them, removes the new one and leaves the old one as it was.

        Raises:
            RequestError: as `check`.
            RunError: no space left; the output's path was taken meanwhile or cannot be renamed.
        """
        self.check(None)
        translated = translate_write_errors(self._given, None, self._advice)
        with termination_raises(), translated, made_folders(self.path.parent):
            self._make_partial()
            try:
                yield self._partial
                self._publish()
            finally:
                with signals_ignored():
                    self._end()

    def _make_partial(self) -> None:
        try:
            self._partial.mkdir()
        except FileExistsError as error:
            raise RunError(
                f"{self._partial} exists: this process is writing {self.path} already; choose another output folder."
            ) from error

    def _publish(self) -> None:
        finish_tree(self._partial)
        try:
            refuse_unusable(self.path, self._overwrite, self._advice)
            if self.path.exists() and any(self.path.iterdir()):
                self.path.rename(self._replaced)
            self._partial.rename(self.path)
        except RequestError as error:
            raise RunError(f"the output's place changed during the run: {error}") from error
        except OSError as error:
            raise RunError(
                f"cannot rename {self._partial} to {self.path} ({error.strerror}); choose another output folder "
                f"and {self._advice.again}."
            ) from error
        sync_folder(self.path.parent)

    def _end(self) -> None:
        """After success or failure alike, what stands on the disk says what is left to do."""
        if self._replaced.exists():
            self._settle_replaced(self._replaced)
        _remove(self._partial)

    def _settle_leftovers(self) -> None:
        pattern = re.compile(rf"\.{re.escape(self.path.name)}\.(partial|replaced)-([0-9]+)")
        if not self.path.parent.is_dir():
            return
        found = [(path, match) for path in self.path.parent.iterdir() if (match := pattern.fullmatch(path.name))]
        for path, match in found:
            if match[1] == "partial" and not _is_another_process(int(match[2])):
                _remove(path)
        for path, match in found:
            if match[1] == "replaced":
                self._settle_replaced(path)

    def _settle_replaced(self, replaced: Path) -> None:
        """Restore the old folder, or remove it if the new one is in place."""
        with contextlib.suppress(OSError):
            if not self.path.exists():
                replaced.rename(self.path)
            else:
                # Half removed, it must not pass for a complete one that waits to be restored.
                _remove(replaced.rename(self._partial))


def _remove(folder: Path) -> None:
    """Remove what can be: an error here would hide the one that is on its way, and the next run tries again."""
    shutil.rmtree(folder, ignore_errors=True)


def _is_another_process(pid: int) -> bool:
    """Whether `pid` lives and is not this process, which writes nothing yet when it asks."""
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True
