"""What benchmarks write is there as a whole or not at all, and what stands in its way is told before the work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import evaluation_speed
from benchmarks.environment import check_output, write_result
from benchmarks.output_files import check_figure, replaced, told_in_one_sentence
from benchmarks.resumable import Rows
from compressor.errors import RequestError, RunError
from tests.test_interruption import file_size_limit


def listing(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_result_is_replaced_and_its_folder_made(tmp_path: Path) -> None:
    path = tmp_path / "new" / "result.json"
    for value in (1, 2):
        write_result(path, {"value": value})
        assert json.loads(path.read_text(encoding="utf-8"))["value"] == value
    assert listing(path.parent) == ["result.json"]
    link = tmp_path / "link.json"
    link.symlink_to(path)
    write_result(link, {"value": 3})
    assert link.is_symlink()
    assert json.loads(path.read_text(encoding="utf-8"))["value"] == 3


@pytest.mark.parametrize("exists", [True, False])
def test_a_full_disk_leaves_what_was_there(exists: bool, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    if exists:
        path.write_text("old")
    for write in (lambda: write_result(path, {}), lambda: check_output(path)):
        with (
            file_size_limit(50),
            pytest.raises(RequestError, match=r"result\.json cannot be written \(File too large\)"),
        ):
            write()
        assert listing(tmp_path) == ["result.json"] * exists
        assert not exists or path.read_text() == "old"


def test_an_interruption_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "figure.png"
    path.write_text("old")

    def interrupted() -> None:
        with replaced(path) as partial:
            partial.write_text("half")
            assert partial.suffix == ".png"
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert listing(tmp_path) == ["figure.png"]
    assert path.read_text() == "old"


def test_what_cannot_be_written_is_known_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place, message in (
        (tmp_path, "is a folder or a device"),
        (Path("/dev/null"), "is a folder or a device"),
        (tmp_path / "file" / "result.png", "result.png cannot be written"),
        (tmp_path / f"{'n' * 300}.png", r"cannot be written \(File name too long\)"),
    ):
        with pytest.raises(RequestError, match=message):
            check_output(place)
    with pytest.raises(RequestError, match=r"result\.png cannot be written"):
        check_figure(tmp_path / "file" / "result.png")
    with pytest.raises(RequestError, match='"" is not drawn; use .png, .svg, .pdf'):
        check_figure(tmp_path / "figure")
    for path in (tmp_path / "figure.PNG", None):
        check_figure(path)
    check_output(tmp_path / "result.json")
    assert listing(tmp_path) == ["file"]


def test_an_error_of_the_package_ends_in_its_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    for error, code in ((RequestError("a; b."), 2), (RunError("c; d."), 1)):
        with pytest.raises(SystemExit) as exit_, told_in_one_sentence():
            raise error
        assert exit_.value.code == code
        assert capsys.readouterr().err == f"error: {error}\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--repeats", "-1"], "--repeats -1 is outside its limits; give at least 1."),
        (["--repeats", "0"], "--repeats 0 is outside"),
        (["--output", "/dev/full"], "/dev/full is a folder or a device"),
        ([], "absent"),
    ],
)
def test_evaluation_speed_refuses(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = [] if "--output" in words else ["--output", str(tmp_path / "speed.json")]
    with pytest.raises(SystemExit) as exit_:
        evaluation_speed.main([str(tmp_path / "absent"), "--device", "cpu", *output, *words])
    told = capsys.readouterr().err
    assert exit_.value.code == 2
    assert message in told
    assert len(told.splitlines()) == 1
    assert listing(tmp_path) == []


@pytest.mark.parametrize("content", ["", "[]", '{"settings": {}, "rows": [{"other": 1}]}', '{"rows": null}'])
def test_rows_are_not_taken_up_from_a_wrong_file(content: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(content)
    with pytest.raises(RequestError, match=r"rows\.json (cannot be read|holds no rows|is no result)"):
        Rows(path, {}, ("name",)).load()
    assert path.read_text() == content
