from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from compressor.errors import RequestError, RunError
from compressor.export.companions import copy_companions
from compressor.export.disk import format_bytes, refuse_too_little_space, translate_write_errors
from compressor.export.folder import OutputFolder
from compressor.export.weights import OutputTensor, write_weights

ROOT = Path(__file__).resolve().parents[2]
TWO_MEGABYTES = OutputTensor("w", torch.uint8, (2_000_000,), lambda: torch.zeros(2_000_000, dtype=torch.uint8))


def listing(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (1000, "1.00 kB"),
        (37_700_000, "37.70 MB"),
        (999_996_000, "1.00 GB"),
        (5_000_000_000, "5.00 GB"),
        (2_500_000_000_000_000, "2500.00 TB"),
    ],
)
def test_format_bytes(count: int, text: str) -> None:
    assert format_bytes(count) == text


def test_too_little_space_before_the_work(small_disk: Path) -> None:
    (small_disk / "other").write_bytes(bytes(524_288))
    output = small_disk / "not" / "yet" / "there"
    refuse_too_little_space(output, 524_288)
    with pytest.raises(RequestError) as error:
        refuse_too_little_space(output, 1_000_000)
    assert str(error.value) == (
        f"writing {output} needs 1.00 MB and its file system has 524.29 kB free; free 475.71 kB more or choose an "
        "output folder on another disk."
    )
    assert listing(small_disk) == ["other"]


def test_more_than_any_disk_has(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"needs 1000000\.00 TB and its file system has .* free"):
        refuse_too_little_space(tmp_path / "out", 10**18)


def test_a_full_disk_while_weights_are_written(small_disk: Path) -> None:
    with pytest.raises(RunError) as error:
        write_weights([TWO_MEGABYTES], small_disk, 10**9, None)
    assert str(error.value) == (
        f"no space left on device while writing {small_disk}; free 2.00 MB and run again with --resume."
    )
    assert error.value.exit_code == 1
    assert listing(small_disk) == []


def test_a_full_disk_while_other_files_are_written(small_disk: Path, tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "tokenizer.json").write_bytes(bytes(2_000_000))
    message = re.escape(f"no space left on device while writing {small_disk}; free more space and run")
    with pytest.raises(RunError, match=message):
        copy_companions(tmp_path / "source", small_disk)


def test_a_full_disk_leaves_no_output(small_disk: Path) -> None:
    with (
        pytest.raises(RunError, match="no space left"),
        OutputFolder(small_disk / "a" / "out", False).staged() as folder,
    ):
        (folder / "notes").write_bytes(bytes(2_000_000))
    assert listing(small_disk) == []


def test_a_disk_that_became_read_only(small_disk: Path) -> None:
    (small_disk / "out").mkdir()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(RunError) as error:
        write_weights([TWO_MEGABYTES], small_disk / "out", 10**9, None)
    assert str(error.value) == (
        f"{small_disk}/out is on a read-only file system; make it writable and run again with --resume."
    )
    with pytest.raises(RequestError, match="disk is not writable by this user"):
        OutputFolder(small_disk / "new", False).check(None)


def test_a_file_beyond_the_allowed_size(tmp_path: Path) -> None:
    code = """
import resource, sys
from pathlib import Path
import torch
from compressor.errors import RunError
from compressor.export.disk import translate_write_errors
from compressor.export.weights import OutputTensor, write_weights
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
folder = Path(sys.argv[1])
def by_safetensors():
    tensor = torch.zeros(200_000, dtype=torch.uint8)
    write_weights([OutputTensor("w", tensor.dtype, tuple(tensor.shape), lambda: tensor)], folder, 10**9, None)
def by_python():
    with translate_write_errors(folder, None):
        (folder / "notes").write_bytes(bytes(200_000))
for write in (by_safetensors, by_python):
    try:
        write()
    except RunError as error:
        print(error)
"""
    child = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    sentence = (
        f"a file in {tmp_path} grew beyond the size limit of the file system or of `ulimit -f`; raise it or set a "
        "smaller --max-shard-size, and run again with --resume."
    )
    assert child.stdout.splitlines() == [sentence, sentence]


def test_a_device_that_is_always_full() -> None:
    with pytest.raises(RunError) as error, translate_write_errors(Path("out"), 5), Path("/dev/full").open("wb") as full:
        full.write(b"x")
    assert str(error.value) == "no space left on device while writing out; free 5 bytes and run again with --resume."
    assert isinstance(error.value.__cause__, OSError)


def test_a_quota() -> None:
    message = "disk quota exceeded while writing out; free 5 bytes of it and run again with --resume"
    with pytest.raises(RunError, match=message), translate_write_errors(Path("out"), 5):
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))


@pytest.mark.parametrize(
    "other",
    [
        FileNotFoundError(errno.ENOENT, "none"),
        SafetensorError("I/O error: No such file or directory (os error 2)"),
        SafetensorError("Error while deserializing header: header too large"),
        RunError("no space in this sentence"),
    ],
)
def test_other_errors_pass_unchanged(other: Exception) -> None:
    with pytest.raises(type(other)) as error, translate_write_errors(Path("out"), 5):
        raise other
    assert error.value is other
