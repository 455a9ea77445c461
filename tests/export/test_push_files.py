"""Which files of a folder `compress push` uploads, and what it refuses of them before it asks anybody."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from compressor.cli import main
from compressor.export import tokens_inside
from tests.export.hub_upload_server import TOKEN, UploadHub
from tests.export.test_push import REPO, hashes, refused
from tests.test_pipeline import compress, make_source, make_text
from tests.tiny_models import edit_config

OTHER = "hf_" + "aB3dE" * 6 + "fG7h"
SECRETS = ("id_rsa", "key.pem", "secrets.json", "credentials.yaml", "token", ".env")
# huggingface_hub's own call of its HTTP library.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>' to upload raw bytes:DeprecationWarning")


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cut in several shards; its source has files of its own, and secrets beside them."""
    root = tmp_path_factory.mktemp("push")
    source = make_source("q35", root / "source", shards="20KB")
    for name in ("guide.md", "LICENSE", *SECRETS):
        (source / name).write_text(f"{name} of the source")
    assert (
        compress(source, root / "out", make_text(root), "--max-shard-size", "30KB", "--no-verify", "--no-evaluate") == 0
    )
    return root / "out"


@pytest.fixture
def folder(cut: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(cut, tmp_path / "copy"))


def told(capsys: pytest.CaptureFixture[str], folder: Path, *options: str) -> str:
    capsys.readouterr()
    assert main(["push", str(folder), REPO, *options]) == 0
    return capsys.readouterr().out


def without_record(folder: Path) -> None:
    """As an earlier version wrote it."""
    report = json.loads((folder / "compression.json").read_text())
    del report["files"]
    (folder / "compression.json").write_text(json.dumps(report))


def first_shard(folder: Path) -> Path:
    return sorted(folder.glob("*.safetensors"))[0]


def test_the_report_has_every_file_as_it_was_written(cut: Path) -> None:
    files = json.loads((cut / "compression.json").read_text())["files"]
    expected = hashes(cut)
    del expected["README.md"], expected["compression.json"]
    assert {name: entry["sha256"] for name, entry in files.items()} == expected
    assert all(entry["bytes"] == (cut / name).stat().st_size for name, entry in files.items())
    assert {"guide.md", "LICENSE", "recipe.yaml", "selection.json", "config.json", "tokenizer.json"} <= files.keys()
    assert not files.keys() & set(SECRETS)


@pytest.mark.parametrize("recorded", [True, False], ids=["recorded", "of an earlier version"])
def test_what_lies_beside_the_model_stays(
    recorded: bool, hub: UploadHub, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = hashes(folder).keys() - (set() if recorded else {"guide.md"})
    for name in (*SECRETS, "notes.txt", "optimizer.pt"):
        (folder / name).write_text("private")
    (folder / "additional_chat_templates").mkdir()
    for name in ("tools.jinja", "passwd"):
        (folder / "additional_chat_templates" / name).write_text("x")
    (folder / "NOTICE").write_text("terms")
    (folder / "runs").mkdir()
    if not recorded:
        without_record(folder)
    text = told(capsys, folder)
    added = {"NOTICE", "additional_chat_templates/tools.jinja", ".gitattributes"}
    assert hub.repositories[REPO].files.keys() == own | added
    left = sorted(
        [
            *SECRETS,
            "notes.txt",
            "optimizer.pt",
            "runs",
            "additional_chat_templates/passwd",
            *([] if recorded else ["guide.md"]),
        ]
    )
    why = "compress did not write" if recorded else "has no usual name, and compression.json of this older folder"
    assert f"note: not uploaded: {', '.join(left)}, which {why}" in text


@pytest.mark.parametrize("recorded", [True, False], ids=["recorded", "of an earlier version"])
def test_links_and_pipes_are_refused(
    recorded: bool, hub: UploadHub, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if not recorded:
        without_record(folder)
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / "passwd").write_text("root")
    names = ["merges.txt", "LICENSE", "README.md", "recipe.yaml", first_shard(folder).name, "additional_chat_templates"]
    for name in names:
        place, kept = folder / name, tmp_path / "kept"
        if place.exists():
            place.rename(kept)
        target = tmp_path / "etc" if name == "additional_chat_templates" else kept
        place.symlink_to(target if target.exists() else tmp_path / "etc" / "passwd")
        error = refused(capsys, "push", str(folder), REPO)
        assert f"{place} is a link to {place.readlink()}, and only files of the folder itself are pushed; put" in error
        place.unlink()
        if kept.exists():
            kept.rename(place)
    os.mkfifo(folder / "vocab.json")
    assert f"{folder / 'vocab.json'} is a pipe, not a file; remove it, or restore" in refused(
        capsys, "push", str(folder), REPO
    )
    (folder / "vocab.json").unlink()
    (folder / "linked").symlink_to("/etc/passwd")
    assert "not uploaded: " in told(capsys, folder, "--dry-run")
    assert hub.texts == []


def flip_last_byte(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def reformat_index(folder: Path) -> None:
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps(json.loads(path.read_text())))


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda folder: flip_last_byte(first_shard(folder)), "has the SHA-256 "),
        (lambda folder: edit_config(folder, {"bos_token_id": 7}), "and compress wrote "),
        (reformat_index, "bytes, and compress wrote "),
    ],
    ids=["weights", "config", "index"],
)
def test_another_model_than_compress_wrote(
    change: Callable[[Path], None], part: str, hub: UploadHub, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change(folder)
    error = refused(capsys, "push", str(folder), REPO)
    assert part in error
    assert "; restore the file, or compress again: another model goes up with `hf upload`." in error
    assert error == refused(capsys, "push", str(folder), REPO, "--dry-run")
    assert hub.texts == []


def test_weights_that_compress_did_not_write(hub: UploadHub, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = {name: tensor for shard in folder.glob("*.safetensors") for name, tensor in load_file(shard).items()}
    for path in folder.glob("model*"):
        path.unlink()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    error = refused(capsys, "push", str(folder), REPO)
    assert (
        f"compress did not write {folder / 'model.safetensors'}, by compression.json; put back what it wrote" in error
    )
    (folder / "compression.json").write_text(json.dumps({**report_of(folder), "files": {"../x": 1}}))
    assert "has a broken record of the files that compress wrote" in refused(capsys, "push", str(folder), REPO)
    assert hub.texts == []


def report_of(folder: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((folder / "compression.json").read_text())
    return report


def test_what_else_was_changed_is_told(hub: UploadHub, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "tokenizer_config.json").write_text(
        json.dumps(json.loads((folder / "tokenizer_config.json").read_text()))
    )
    (folder / "guide.md").write_text("another")
    (folder / "LICENSE").unlink()
    (folder / "README.md").write_text("---\ntags: [mine]\n---\nmy own card")
    text = told(capsys, folder)
    assert "note: tokenizer_config.json was changed since compress wrote it" in text
    assert "note: guide.md was changed since compress wrote it" in text
    assert "note: LICENSE is missing, and compress wrote it" in text
    assert "README.md" not in text
    assert hub.repositories[REPO].files["guide.md"] == b"another"


@pytest.mark.parametrize("content", ["{", "[" * 100_000], ids=["cut short", "nested"])
def test_json_that_cannot_be_read(
    content: str, hub: UploadHub, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "generation_config.json").write_text(content)
    error = refused(capsys, "push", str(folder), REPO)
    assert f"{folder / 'generation_config.json'} is not valid JSON (" in error
    assert error.strip().endswith("; restore the file, or compress again.")
    assert hub.texts == []


@pytest.mark.parametrize("token", [TOKEN, OTHER], ids=["own", "of somebody"])
@pytest.mark.parametrize("place", ["text", "large text", "name", "header"])
def test_a_token_that_would_be_published(
    place: str,
    token: str,
    hub: UploadHub,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = {"text": "guide.md", "large text": "guide.md", "name": f"LICENSE-{token}"}.get(
        place, first_shard(folder).name
    )
    if place == "header":
        without_record(folder)
        save_file(load_file(folder / name), folder / name, metadata={"format": "pt", "note": token})
    elif place == "large text":
        monkeypatch.setattr(tokens_inside, "_BLOCK_BYTES", 1 << 16)
        (folder / name).write_text("words " * 4_000_000 + f'"{token}" ')
    else:
        (folder / name).write_text(f"token={token}\n" if place == "text" else "terms")
    whose = "your token of the Hub" if token == TOKEN else "a token of the Hub (hf_ and 34 letters and digits)"
    masked = name.replace(token, "***")
    reason = f"{whose} stands in {masked}; remove it before anyone can read it."
    told_then = refused(capsys, "push", str(folder), REPO)
    assert reason in told_then
    text = told(capsys, folder, "--dry-run")
    assert f"note: a push would be refused: {reason}" in text
    assert token not in text + told_then
    assert hub.texts == []
