"""Whether writing to an output folder could touch the source."""

from __future__ import annotations

import os
from pathlib import Path

from compressor.errors import RequestError


def refuse_output_inside_source(source: Path, output: Path) -> None:
    """Compare the folders after resolving links; `output` need not exist.

    Raises:
        RequestError: the output is the source, lies inside it, or holds it or a file that it links to.
    """
    source_folder, output_folder = _resolved(source), _resolved(output)
    remedy = f"give a folder outside {source}"
    if _same_folder(source_folder, output_folder):
        raise RequestError(f"the output folder is the source folder (after resolving links): {output}; {remedy}.")
    if any(_same_folder(source_folder, parent) for parent in output_folder.parents):
        raise RequestError(
            f"the output folder is inside the source folder (after resolving links): {output}; {remedy}."
        )
    held = next((path for path in _files_of(source_folder) if _holds(output_folder, path)), None)
    if held is not None:
        raise RequestError(
            f"the source folder, or a file that it links to, is inside the output folder (after resolving links): "
            f"{held} is in {output}; {remedy} that does not hold it."
        )


def _files_of(source: Path) -> list[Path]:
    """The folder itself and its files, links resolved: those of a Hub snapshot stand in another folder."""
    return [source, *(_resolved(path) for path in source.iterdir())]


def _holds(folder: Path, path: Path) -> bool:
    return any(_same_folder(folder, parent) for parent in path.parents)


def _same_folder(first: Path, second: Path) -> bool:
    """Also true for one folder under two names, as a bind mount or a case-insensitive disk gives."""
    if first == second:
        return True
    return first.exists() and second.exists() and first.samefile(second)


def _resolved(path: Path) -> Path:
    resolved = Path(os.path.realpath(path))  # unlike Path.resolve, the same for a loop in every version of Python
    if resolved.is_symlink():
        raise RequestError(f"{path} is a link that leads back to itself; give a folder.")
    return resolved
