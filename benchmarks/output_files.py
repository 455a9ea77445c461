"""Files that benchmarks write: there as a whole or not at all, and what goes wrong told in a sentence."""

from __future__ import annotations

import sys
from collections.abc import Iterator
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
