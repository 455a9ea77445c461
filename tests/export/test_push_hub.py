"""What a card and a repository of the Hub must be, and what stays there."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from compressor.cli import main
from compressor.pushing import plan_push
from tests.export.hub_upload_server import Repository, UploadHub
from tests.export.test_push import REPO, refused
from tests.test_pipeline import compress, make_source, make_text

# huggingface_hub's own call of its HTTP library.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>' to upload raw bytes:DeprecationWarning")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("push")
    source, output = make_source("q35", root / "source"), root / "out"
    assert compress(source, output, make_text(root), "--no-refit", "--no-verify", "--no-evaluate") == 0
    return output


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "copy"))


def test_cards_that_the_hub_would_not_take(hub: UploadHub, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    card = (folder / "README.md").read_text()
    for metadata, reason in (
        ("license: [apache", "expected ',' or ']'"),
        ("- a list", "it is a list, no mapping"),
        ("a: " + "[" * 5000, "recursion"),
    ):
        (folder / "README.md").write_text(f"---\n{metadata}\n---\n# Half\n")
        told = refused(capsys, "push", str(folder), REPO, "--dry-run")
        assert f"the metadata at the top of {folder / 'README.md'} cannot be read (" in told
        assert reason in told
    (folder / "README.md").write_text("x" * 5_000_001)
    assert "has 5,000,001 bytes, and a card at most 5,000,000" in refused(capsys, "push", str(folder), REPO)
    assert hub.texts == []
    (folder / "README.md").write_text(card)
    hub.card_errors = ['"license" must be one of those known']
    told = refused(capsys, "push", str(folder), REPO, status=1)
    assert '"license" must be one of those known' in told
    assert told.endswith("the repository has all of the new files or none; mend what is named, and push again.\n")


def test_the_card_of_a_folder_that_was_pushed_before_names_the_new_repository(folder: Path) -> None:
    first = next(file for file in plan_push(folder, "someone/first").files if file.name == "README.md")
    assert isinstance(first.content, bytes)
    assert b"someone/first" in first.content
    (folder / "README.md").write_bytes(first.content)
    second = next(file for file in plan_push(folder, "other/second").files if file.name == "README.md")
    assert isinstance(second.content, bytes)
    assert b"someone/first" not in second.content
    assert second.content.count(b"other/second") == first.content.count(b"someone/first")


def test_files_below_a_folder_of_the_repository_stay(hub: UploadHub, folder: Path) -> None:
    kept = {"compression.json": b"{}", "adapter/adapter_model.safetensors": b"an adapter", "old.safetensors": b"old"}
    hub.repositories[REPO] = Repository(files=kept)
    assert main(["push", str(folder), REPO]) == 0
    assert "adapter/adapter_model.safetensors" in hub.repositories[REPO].files
    assert "old.safetensors" not in hub.repositories[REPO].files
