"""What is no file where a file is wanted: its kind is said, and it is not opened."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from compressor.calibration.text import TextSource, open_documents
from compressor.errors import RequestError
from compressor.evaluation.result_files import read_models
from compressor.file_kinds import absence, kind_of, refuse_no_file
from compressor.prompts.completion import load_completion_file
from compressor.recipe import CalibrationSection, RecoverySection
from compressor.recipe_file import load_settings
from compressor.training_tokens import open_training_text


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    """That nothing writes to: whoever opens it waits."""
    os.mkfifo(tmp_path / "pipe.txt")
    return tmp_path / "pipe.txt"


def test_kinds(pipe: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to("nowhere")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
        assert kind_of(tmp_path / "socket") == "a socket"
    found = [kind_of(path) for path in (tmp_path, pipe, "/dev/zero", tmp_path / "file", tmp_path / "link", "a\0b")]
    assert found == ["a folder", "a pipe", "a device", None, None, None]
    assert absence(tmp_path / "link") == "is a link to nowhere, which does not exist"
    assert absence(tmp_path / "absent") == absence("a\0b") == "does not exist"


def test_a_pipe_of_the_shell_is_read() -> None:
    reading, writing = os.pipe()
    with os.fdopen(reading), os.fdopen(writing, "w") as file:
        file.write("selection: {ratio: 0.5}")
        file.close()
        path = Path(f"/dev/fd/{reading}")
        assert kind_of(path) == "a pipe"
        refuse_no_file(path, "it", "give another")
        assert load_settings(path) == {"selection": {"ratio": 0.5}}


def text_of_calibration(path: Path) -> object:
    return open_documents(TextSource(str(path)))


def text_of_evaluation(path: Path) -> object:
    return open_documents(TextSource(str(path), held_out=True))


def text_of_recovery(path: Path) -> object:
    return open_training_text(RecoverySection(source=str(path)), CalibrationSection())


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (load_settings, "recipe {} is {}, not a file; give the path of a YAML file."),
        (load_completion_file, "{} is {}, not a file; give a UTF-8 file of JSON lines with the fields text and value."),
        (read_models, "{} is {}, not a file; give a file that compress evaluate --output wrote."),
        (text_of_calibration, 'the calibration source "{}" is {}, neither a file nor a folder; give a .txt, .jsonl'),
        (text_of_evaluation, 'the text "{}" is {}, neither a file nor a folder; give a .txt, .jsonl or .parquet'),
        (text_of_recovery, 'the training source "{}" is {}, neither a file nor a folder; give a .txt, .jsonl'),
    ],
)
def test_what_is_no_file_is_not_opened(read: Callable[[Path], object], message: str, pipe: Path) -> None:
    for path, kind in ((pipe, "a pipe"), (Path("/dev/zero"), "a device")):
        with pytest.raises(RequestError) as caught:
            read(path)
        assert str(caught.value).startswith(message.format(path, kind))


def test_a_folder_in_place_of_a_file(tmp_path: Path) -> None:
    for read in (load_settings, load_completion_file):
        with pytest.raises(RequestError, match=f"{tmp_path} is a folder, not a file; give "):
            read(tmp_path)


def test_a_text_whose_link_leads_nowhere(tmp_path: Path) -> None:
    (tmp_path / "a.txt").symlink_to("nowhere.txt")
    with pytest.raises(RequestError, match=r'a\.txt" is a link to nowhere\.txt, which does not exist; give a \.txt'):
        text_of_calibration(tmp_path / "a.txt")
