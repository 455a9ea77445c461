"""Which weight files --link will share with the source, known before the work starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from compressor.export.disk import format_bytes
from compressor.export.linking import refuse_unlinkable, unchanged_files
from compressor.preparation import Source, cuts_to_width


@dataclass(frozen=True, slots=True)
class LinkPlan:
    """`shared_bytes` of weights that need no room of their own, and what to say about them."""

    shared_bytes: int
    notes: tuple[str, ...]


def plan_links(source: Source, keep: int, output: Path) -> LinkPlan:
    """For a cut to `keep` channels a head, written to `output`; which channels they are changes no file's part in it.

    Raises:
        RequestError: the file system of `output` allows no link to the source's files.
    """
    index = source.checkpoint.index
    files = unchanged_files(index, cuts_to_width(source, keep))
    if not files:
        return LinkPlan(0, ("--link: every weight file holds a tensor that changes, so all are written",))
    refuse_unlinkable(files, output)
    shared = sum(entry.nbytes for entry in index.entries.values() if entry.file in files)
    note = (
        f"--link: {len(files)} of {len(index.files)} weight files ({format_bytes(shared)}) are hard links to those of "
        f"{source.folder}: what changes one in place changes the other"
    )
    return LinkPlan(shared, (note,))
