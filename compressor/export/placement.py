"""Whether a path can take an output folder: what is asked, and refused, before the work starts."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable
from pathlib import Path

from compressor.errors import RequestError
from compressor.export.advice import WITH_RESUME, Advice
from compressor.export.companions import CHAT_TEMPLATE_FOLDER
from compressor.export.disk import nearest_existing
from compressor.export.trial import folder_problem
from compressor.json_text import parse_json

# Room for what is added to the name of a temporary sibling: most file systems take 255 bytes.
MAX_NAME_BYTES = 200
# Folders that an output folder, or a model folder fetched from the Hub, has.
_KNOWN_FOLDERS = frozenset({CHAT_TEMPLATE_FOLDER, ".cache"})
_MOUNTS = Path("/proc/self/mountinfo")


def check_placement(
    given: Path, output: Path, overwrite: bool, source: Path | None, advice: Advice = WITH_RESUME
) -> None:
    """Refuse what cannot end well: `given` as the user wrote it, `output` the same with links resolved.

    Raises:
        RequestError: as the functions below, or a folder on the way cannot be read or named.
    """
    try:
        refuse_dangling_link(given)
        if source is not None:
            refuse_source(output, source, _place_of_name(given))
        refuse_unusable(output, overwrite, advice)
    except PermissionError as error:
        raise RequestError(
            f"{error.filename} cannot be read by this user; change its mode or choose another output folder."
        ) from error
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        raise RequestError(f"a name in {output} is too long for its file system; choose a shorter one.") from error


def refuse_unusable(output: Path, overwrite: bool, advice: Advice = WITH_RESUME) -> None:
    """Refuse `output`, links resolved, where a new folder could not be renamed to it.

    Raises:
        RequestError: see the messages; among them an existing folder that is not empty without
            `overwrite`, and with it one that is not a model's.
    """
    _refuse_long_name(output)
    if output.exists():
        _refuse_existing(output, overwrite, advice)
    parent = nearest_existing(output.parent)
    if not parent.is_dir():
        raise RequestError(f"{parent} is a file, so {output} cannot be made in it; choose another output folder.")
    _refuse_unwritable(parent)
    problem = folder_problem(parent)
    if problem is not None:
        raise RequestError(f"the folder {output} cannot be made in {parent} ({problem}); choose another output folder.")


def _refuse_long_name(output: Path) -> None:
    size = len(os.fsencode(output.name))
    if size > MAX_NAME_BYTES:
        raise RequestError(f"the name of {output} has {size} bytes of at most {MAX_NAME_BYTES}; choose a shorter one.")


def refuse_dangling_link(path: Path) -> None:
    """Refuse a link to nothing, at `path` or above it: what it stands for may be a disk that is not mounted.

    Raises:
        RequestError: there is such a link.
    """
    _refuse_long_name(path)
    for part in (path.absolute(), *path.absolute().parents):
        if part.is_symlink() and not part.exists():
            raise RequestError(
                f"{part} is a link to {part.readlink()}, which does not exist; make that folder or remove the link."
            )


def refuse_source(output: Path, source: Path, named: Path) -> None:
    """Refuse an output that is, holds or is inside the source, links resolved: the source must stay as it is.

    A folder that holds the files which the source's links lead to counts as holding the source, and a link inside the
    source, which is `named`, as inside it, wherever it leads.

    Raises:
        RequestError: it is one of these.
    """
    source = Path(os.path.realpath(source))
    if _is_same(output, source):
        raise RequestError(f"the output folder is the source folder {source} (after resolving links); choose another.")
    for place in (output, named):
        if any(_is_same(folder, source) for folder in place.parents):
            raise RequestError(f"the output folder {place} is inside the source folder {source}; choose another.")
    files = [Path(os.path.realpath(path)) for path in source.iterdir()]
    if any(_is_same(folder, output) for path in (source, *files) for folder in path.parents):
        raise RequestError(f"the output folder {output} holds files of the source {source}; choose another.")


def _place_of_name(given: Path) -> Path:
    """Where the name stands that may be a link; the way there has its links resolved."""
    return Path(os.path.realpath(given.parent)) / given.name


def lies_in(given: Path, folder: Path) -> bool:
    """Whether `given`, by its name or by what that leads to, stands in `folder` or below it; nothing needs to exist."""
    folder = Path(os.path.realpath(folder))
    return any(folder in place.parents for place in (Path(os.path.realpath(given)), _place_of_name(given)))


def refuse_texts(output: Path, texts: Iterable[Path]) -> None:
    """Refuse an output, links resolved, that would come among the texts that a run reads, or take their place.

    Raises:
        RequestError: it holds one of `texts`, or is in one that is a folder, of which all files are read.
    """
    for text in texts:
        real = Path(os.path.realpath(text))
        if real.is_dir() and any(_is_same(folder, real) for folder in (output, *output.parents)):
            raise RequestError(
                f"the output folder {output} is in {text}, a folder of texts that this run reads; choose another."
            )
        if any(_is_same(folder, output) for folder in real.parents):
            raise RequestError(f"the output folder {output} holds {text}, which this run reads; choose another.")


def _refuse_existing(output: Path, overwrite: bool, advice: Advice) -> None:
    if not output.is_dir():
        raise RequestError(f"the output folder {output} is a file; choose another.")
    working = Path.cwd()
    if any(_is_same(folder, output) for folder in (working, *working.parents)):
        raise RequestError(
            f"the output folder {output} holds the current folder and cannot be replaced; name a new folder inside it."
        )
    if _is_mount_point(output):
        raise RequestError(
            f"the output folder {output} is a mount point and cannot be replaced; name a new folder inside it."
        )
    entries = sorted(output.iterdir())
    if entries and not overwrite:
        raise RequestError(f"the output folder {output} exists and is not empty; {advice.taken}.")
    if entries:
        _refuse_foreign(output, entries)
        _refuse_unwritable(output)


def _refuse_foreign(output: Path, entries: list[Path]) -> None:
    """`--overwrite` deletes the folder: only one that is a model's and holds nothing that no model folder has."""
    if not (output / "compression.json").is_file() and not _is_model_config(output / "config.json"):
        raise RequestError(
            f"--overwrite replaces model folders only, and {output} has neither compression.json nor a model's "
            "config.json; choose another output folder."
        )
    for path in entries:
        if path.name not in _KNOWN_FOLDERS and path.is_dir():
            raise RequestError(
                f"--overwrite would delete {path}, which no output folder has; move it away or choose another "
                "output folder."
            )


def _is_model_config(path: Path) -> bool:
    try:
        config = parse_json(path.read_bytes())
    except (FileNotFoundError, IsADirectoryError, ValueError):
        return False
    return isinstance(config, dict) and ("model_type" in config or "architectures" in config)


def _refuse_unwritable(folder: Path) -> None:
    if not os.access(folder, os.W_OK | os.X_OK, effective_ids=True):
        raise RequestError(f"{folder} is not writable by this user; change its mode or choose another output folder.")


def _is_same(first: Path, second: Path) -> bool:
    return first.exists() and second.exists() and first.samefile(second)


def _is_mount_point(path: Path) -> bool:
    if path.is_mount():
        return True
    # A bind mount from the same file system shows here alone. Spaces and the like are octal escapes.
    if not _MOUNTS.exists():
        return False
    mounts = _MOUNTS.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    points = (re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), line.split(" ")[4]) for line in mounts)
    return str(path) in points
