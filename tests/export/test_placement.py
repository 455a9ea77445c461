from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from compressor.errors import RequestError
from compressor.export.folder import OutputFolder


def refusal(path: Path, overwrite: bool = False, source: Path | None = None) -> str:
    with pytest.raises(RequestError) as error:
        OutputFolder(path, overwrite).check(source)
    assert error.value.exit_code == 2
    return str(error.value)


def tree(folder: Path) -> dict[str, bytes | None]:
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "qwen3_5_text", "limit": Infinity}')
    return folder


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    """A Hub cache: a snapshot whose files are links to blobs."""
    cache = tmp_path / "cache"
    folder = cache / "snapshots" / "abc"
    folder.mkdir(parents=True)
    (cache / "blobs").mkdir()
    for name in ("config.json", "model.safetensors"):
        (cache / "blobs" / f"hash-of-{name}").write_text('{"model_type": "x"}')
        (folder / name).symlink_to(Path("../../blobs") / f"hash-of-{name}")
    return folder


def test_a_new_or_an_empty_folder_passes_and_nothing_is_made(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "new", tmp_path / "a" / "b" / "new", tmp_path / "empty"):
        OutputFolder(path, False).check(None)
    assert tree(tmp_path) == {"empty": None}


def test_an_existing_folder(model: Path) -> None:
    assert refusal(model) == f"the output folder {model} exists and is not empty; pass --overwrite or choose another."
    OutputFolder(model, True).check(None)


def test_a_file_in_its_place_or_above_it(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert refusal(tmp_path / "file", True) == f"the output folder {tmp_path}/file is a file; choose another."
    assert refusal(tmp_path / "file" / "out") == (
        f"{tmp_path}/file is a file, so {tmp_path}/file/out cannot be made in it; choose another output folder."
    )


def test_a_name_that_leaves_no_room(tmp_path: Path) -> None:
    OutputFolder(tmp_path / ("é" * 100), False).check(None)
    assert refusal(tmp_path / ("é" * 101)) == (
        f"the name of {tmp_path}/{'é' * 101} has 202 bytes of at most 200; choose a shorter one."
    )


def test_a_name_above_it_that_is_too_long(tmp_path: Path) -> None:
    assert refusal(tmp_path / ("a" * 300) / "out") == (
        f"a name in {tmp_path}/{'a' * 300}/out is too long for its file system; choose a shorter one."
    )


def test_overwrite_spares_folders_that_are_no_models(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "thesis.tex").touch()
    sentence = (
        f"--overwrite replaces model folders only, and {home} has neither compression.json nor a model's config.json; "
        "choose another output folder."
    )
    assert refusal(home, True) == sentence
    for content in ('{"name": "a web server"}', "[1]", "{broken", ""):
        (home / "config.json").write_text(content)
        assert refusal(home, True) == sentence
    (home / "compression.json").touch()
    OutputFolder(home, True).check(None)


@pytest.mark.parametrize("name", [".git", "checkpoint-500", "eval"])
def test_overwrite_spares_folders_inside(model: Path, name: str) -> None:
    for known in ("additional_chat_templates", ".cache"):
        (model / known).mkdir()
    OutputFolder(model, True).check(None)
    (model / name).mkdir()
    assert refusal(model, True) == (
        f"--overwrite would delete {model}/{name}, which no output folder has; move it away or choose another output "
        "folder."
    )


def test_the_current_folder_and_those_above_it(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (model / "inside").mkdir()
    monkeypatch.chdir(model / "inside")
    sentence = "holds the current folder and cannot be replaced; name a new folder inside it."
    for path in (Path(), Path(".."), model, Path("/")):
        assert refusal(path, True) == f"the output folder {path.resolve()} {sentence}"
    OutputFolder(Path("new"), False).check(None)


def test_a_link_to_a_folder_stands_for_the_folder(tmp_path: Path, model: Path) -> None:
    (tmp_path / "link").symlink_to("model")
    assert OutputFolder(tmp_path / "link", True).path == model
    assert refusal(tmp_path / "link").startswith(f"the output folder {model} exists and is not empty")


def test_a_link_to_nothing(tmp_path: Path) -> None:
    (tmp_path / "disk").symlink_to("not-mounted")
    sentence = f"{tmp_path}/disk is a link to not-mounted, which does not exist; make that folder or remove the link."
    assert refusal(tmp_path / "disk") == sentence
    assert refusal(tmp_path / "disk" / "a" / "out") == sentence
    (tmp_path / "loop").symlink_to("loop")
    assert "loop is a link to loop" in refusal(tmp_path / "loop")


@pytest.mark.parametrize("spelling", ["{}", "{}/../abc/", "link", "{}/."])
def test_the_source_itself(snapshot: Path, tmp_path: Path, spelling: str) -> None:
    (tmp_path / "link").symlink_to(snapshot)
    before = tree(tmp_path / "cache")
    path = tmp_path / "link" if spelling == "link" else Path(spelling.format(snapshot))
    assert refusal(path, True, snapshot) == (
        f"the output folder is the source folder {snapshot} (after resolving links); choose another."
    )
    assert refusal(snapshot, True, path).startswith("the output folder is the source folder")
    assert tree(tmp_path / "cache") == before


def test_inside_the_source(snapshot: Path) -> None:
    path = snapshot / "pruned" / "half"
    assert refusal(path, False, snapshot) == (
        f"the output folder {path} is inside the source folder {snapshot}; choose another."
    )


def test_a_link_inside_the_source(snapshot: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (snapshot / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "other").symlink_to(snapshot)
    for path in (snapshot / "link", tmp_path / "other" / "link"):
        assert refusal(path, False, snapshot) == (
            f"the output folder {snapshot}/link is inside the source folder {snapshot}; choose another."
        )
    OutputFolder(tmp_path / "elsewhere", False).check(snapshot)


def test_above_the_source_or_its_files(snapshot: Path, tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "cache", tmp_path / "cache" / "snapshots", tmp_path / "cache" / "blobs"):
        assert refusal(path, True, snapshot) == (
            f"the output folder {path} holds files of the source {snapshot}; choose another."
        )


def test_beside_the_source(snapshot: Path, tmp_path: Path) -> None:
    OutputFolder(snapshot.parent / "abcd", False).check(snapshot)
    OutputFolder(tmp_path / "new", False).check(snapshot)


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[[list[str]], Path]]:
    """Mounts as told on a folder whose name needs escapes in the kernel's list."""
    folder = tmp_path / "a disk"
    folder.mkdir()

    def mount(arguments: list[str]) -> Path:
        command = ["mount", *arguments, str(folder)]
        if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode != 0:
            pytest.skip("not measured: mounting is not permitted")
        return folder

    yield mount
    if shutil.which("umount") is not None:
        subprocess.run(["umount", str(folder)], capture_output=True)


@pytest.mark.parametrize("kind", ["file system", "bind"])
def test_a_mount_point(mounted: Callable[[list[str]], Path], tmp_path: Path, kind: str) -> None:
    (tmp_path / "bound").mkdir()
    folder = mounted(["--bind", str(tmp_path / "bound")] if kind == "bind" else ["-t", "tmpfs", "tmpfs"])
    assert refusal(folder) == (
        f"the output folder {folder} is a mount point and cannot be replaced; name a new folder inside it."
    )
    OutputFolder(folder / "new", False).check(None)


@pytest.fixture
def locked_folder() -> Iterator[Path]:
    """A folder that this process may read and not write, root or not."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "model").mkdir()
        (folder / "model" / "compression.json").touch()
        (folder / "secret").mkdir(mode=0o700)
        folder.chmod(0o555)
        (folder / "model").chmod(0o555)
        is_root = os.geteuid() == 0
        if is_root:
            os.seteuid(65534)
        else:
            (folder / "secret").chmod(0)
        yield folder
        if is_root:
            os.seteuid(0)
        for path in (folder, *folder.iterdir()):
            path.chmod(0o700)


def test_folders_without_permission(locked_folder: Path) -> None:
    sentence = "is not writable by this user; change its mode or choose another output folder."
    assert refusal(locked_folder / "new") == f"{locked_folder} {sentence}"
    assert refusal(locked_folder / "model", True) == f"{locked_folder}/model {sentence}"
    # Newer versions of pathlib take what cannot be looked at for absent, and the folder above it is named.
    hidden = refusal(locked_folder / "secret" / "out")
    assert hidden.startswith(f"{locked_folder}/secret")
    assert hidden.endswith("by this user; change its mode or choose another output folder.")
