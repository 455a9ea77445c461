"""A copied folder is whole, or one sentence says why it is not."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from compressor.copying import copy_tree
from compressor.errors import RunError


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    (folder / "inner").mkdir(parents=True)
    (folder / "a").write_bytes(b"first")
    (folder / "inner" / "b").write_bytes(b"second")
    (folder / "link").symlink_to(folder / "a")
    return folder


def test_everything_is_copied_and_links_are_followed(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    copy_tree(source, target, Path("called"))
    found = {path.relative_to(target).as_posix(): path.read_bytes() for path in target.rglob("*") if path.is_file()}
    assert found == {"a": b"first", "inner/b": b"second", "link": b"first"}
    assert not (target / "link").is_symlink()


@pytest.mark.parametrize(
    ("code", "remedy"),
    [
        (errno.ENOSPC, "free more space there"),
        (errno.EDQUOT, "free more space there"),
        (errno.EFBIG, "raise the limit of its file system or of `ulimit -f`"),
        (errno.EIO, "check it and the disk of the copy"),
    ],
)
def test_the_first_failure_names_file_cause_and_remedy(code: int, remedy: str, source: Path, tmp_path: Path) -> None:
    def fail(file: Path, target: Path) -> None:
        raise OSError(code, os.strerror(code))

    for inner in ("a", "link"):
        (source / inner).unlink()
    with pytest.raises(RunError) as failed:
        copy_tree(source, tmp_path / "target", Path("called"), fail)
    assert str(failed.value) == (
        f"{source}/inner/b could not be copied to called/inner ({os.strerror(code)}); {remedy}, and run again with "
        "--resume."
    )


def test_links_that_lead_nowhere_and_pipes_are_told_of(source: Path, tmp_path: Path) -> None:
    (source / "a").unlink()
    with pytest.raises(RunError, match=r"^.*/link could not be copied to called \(No such file or directory\); check"):
        copy_tree(source, tmp_path / "target", Path("called"))
    (source / "link").unlink()
    os.mkfifo(source / "pipe")
    with pytest.raises(RunError, match=r"^.*/pipe could not be copied to called \(.*named pipe\); check it and the"):
        copy_tree(source, tmp_path / "second", Path("called"))
