"""Files that benchmarks write: there as a whole or not at all, and what goes wrong told in a sentence."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from compressor.errors import CompressorError, RequestError

FIGURES = (".png", ".svg", ".pdf")


@contextmanager
def told_in_one_sentence() -> Iterator[None]:
    """An error of this package ends the process with its sentence and its exit code. Decorates a module's `main`."""
    try:
        yield
    except CompressorError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from error


@contextmanager
def beside(path: Path) -> Iterator[Path]:
    """Inside, a file to write in the folder of `path`, with the same ending; it is gone afterwards.

    A missing folder is made. Of a link the folder is that of what it points to.

    Raises:
        RequestError: `path` is no file, or nothing can be written there.
    """
    partial = None
    try:
        if path.exists() and not path.is_file():
            raise RequestError(f"{path} is a folder or a device; name a file to write.")
        target = path.resolve()
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f".partial-{target.name}")
        yield partial
    except OSError as error:
        raise RequestError(
            f"{path} cannot be written ({error.strerror or error}); name a file where you may write and there is room."
        ) from error
    finally:
        if partial is not None:
            with suppress(OSError):
                partial.unlink()


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """As `beside`, and what was written takes the place of `path` in one step; after an error that is as it was."""
    with beside(path) as partial:
        yield partial
        partial.replace(path.resolve())


def check_figure(path: Path | None) -> None:
    """Have it known before the work that a figure can be drawn there; nothing when `path` is None.

    Raises:
        RequestError: another ending than those of `FIGURES`, or nothing can be written there.
    """
    if path is None:
        return
    if path.suffix.lower() not in FIGURES:
        raise RequestError(f'--figure {path}: "{path.suffix}" is not drawn; use {", ".join(FIGURES)}.')
    with beside(path) as partial:
        partial.touch()


def check_folder_to_write(option: str, folder: Path | None) -> None:
    """Make the folder, and have it known before the work that files can be written there; nothing when it is None.

    Raises:
        RequestError: they cannot.
    """
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise RequestError(
            f"{option} {folder} is no folder to write into ({error.strerror or error}); name one where you may write."
        ) from error


def draw_figure(
    path: Path | None, shown: Sequence[object], draw: Callable[[Path], None], option: str = "--figure"
) -> None:
    """Have `draw` write the figure of what is `shown`; nothing when `path` is None.

    Raises:
        RequestError: nothing is shown, or the figure cannot be written.
    """
    if path is None:
        return
    if not shown:
        raise RequestError(f"{option} {path}: no cut that it shows was measured; leave out {option}.")
    with replaced(path) as partial:
        draw(partial)
