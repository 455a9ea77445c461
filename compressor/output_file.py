"""One file of results: checked before the work, and then there as a whole or not at all."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compressor.artifacts import write_json
from compressor.errors import RequestError, RunError

PARTIAL_PREFIX = ".compress-evaluate-"


@dataclass(frozen=True)
class OutputFile:
    """`given` is as the user wrote it, `path` what is written: a link stays, and what it points to is replaced.

    Without `overwrite` a file that came since is not replaced either.
    """

    given: Path
    path: Path
    overwrite: bool

    @classmethod
    def checked(cls, given: Path, overwrite: bool) -> OutputFile:
        """Everything that would stop the file from being written, known before there is anything to write.

        Raises:
            RequestError: there is something already that is no file, or a file and not `overwrite`, or the folder is
                missing or cannot be written to.
        """
        path = Path(os.path.realpath(given))
        try:
            _refuse_what_is_there(given, path, overwrite)
            # A file of this name shows that the folder, the file system and the user allow one.
            partial = _partial(path)
            partial.touch(exist_ok=False)
            partial.unlink()
        except OSError as error:
            raise RequestError(
                f"--output {given} cannot be written ({error.strerror}); name a file in a folder that you may write to."
            ) from None
        return cls(given, path, overwrite)

    def write(self, content: Mapping[str, Any]) -> None:
        """Write JSON to a file of another name, then rename it.

        Raises:
            RunError: it could not be written, or holds an infinite number, or another run wrote it in the meantime;
                what was there before is still there.
        """
        partial = _partial(self.path)
        try:
            write_json(partial, content)
            if not self.overwrite:
                self.path.touch(exist_ok=False)  # two runs that end together cannot both do that
            partial.replace(self.path)
        except FileExistsError:
            raise RunError(
                f"--output {self.given} was written by something else in the meantime and is left as it is; name "
                "another file, and measure again."
            ) from None
        except OSError as error:
            raise RunError(
                f"--output {self.given} could not be written ({error.strerror}); see to that, or name another "
                "file, and measure again."
            ) from error
        except ValueError as error:
            raise RunError(
                f"--output {self.given} was not written: a figure is infinite or NaN ({error}), and JSON has no such "
                "number; leave out what gave it."
            ) from error
        finally:
            partial.unlink(missing_ok=True)


def _partial(path: Path) -> Path:
    return path.with_name(f"{PARTIAL_PREFIX}{uuid.uuid4().hex}.partial")


def _refuse_what_is_there(given: Path, path: Path, overwrite: bool) -> None:
    # A device's real name need not be a path (`pipe:[1]`): the kind is that of the name that was given.
    if given.is_dir():
        raise RequestError(f"--output {given} is a folder; name a JSON file.")
    if not given.exists():
        if not path.parent.is_dir():
            raise RequestError(f"--output {given}: there is no folder {path.parent}; make it first.")
        return
    if not given.is_file():
        raise RequestError(f"--output {given} is a device or a pipe, not a file; name a JSON file.")
    if not overwrite:
        raise RequestError(f"--output {given} exists; give --overwrite to replace it, or name another file.")
