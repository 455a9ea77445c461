"""`compress push` and `--push-to-hub` with the real client against a Hub on this machine."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import ModelCard, constants, snapshot_download

from compressor.cli import main
from tests.export.hub_upload_server import TOKEN, Repository, UploadHub
from tests.test_pipeline import compress, make_source, make_text
from tests.tiny_models import edit_config, read_weights, write_weights

REPO = "someone/half"
# huggingface_hub's own call of its HTTP library.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>' to upload raw bytes:DeprecationWarning")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A source, and its cut in several shards."""
    root = tmp_path_factory.mktemp("push")
    source, output = make_source("q35", root / "source", shards="20KB"), root / "out"
    assert compress(source, output, make_text(root), "--max-shard-size", "30KB", "--no-verify", "--no-evaluate") == 0
    assert len(list(output.glob("model-*.safetensors"))) >= 3
    return source, output


@pytest.fixture
def folder(folders: tuple[Path, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(folders[1], tmp_path / "copy"))


def hashes(folder: Path) -> dict[str, str]:
    files = (path for path in folder.iterdir() if path.is_file())
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def download(hub: UploadHub, place: Path, repo: str = REPO) -> Path:
    return Path(
        snapshot_download(repo, endpoint=hub.endpoint, token=TOKEN, cache_dir=place / "cache", local_dir=place / "new")
    )


def expect_same(hub: UploadHub, folder: Path, place: Path) -> None:
    """What is downloaded has the folder's bytes; the card alone names the repository."""
    new = download(hub, place)
    expected, found = hashes(folder), hashes(new)
    found.pop(".gitattributes")
    assert expected.pop("README.md") != found.pop("README.md")
    assert found == expected
    card = (new / "README.md").read_text()
    assert f'name = "{REPO}"  # the path of this folder' in card
    assert f"`transformers serve {REPO}`" in card
    assert f"`vllm serve {REPO} --gdn-prefill-backend triton`" in card
    assert "MODEL" not in card
    assert {"library_name", "pipeline_tag", "tags"} <= ModelCard(card).data.to_dict().keys()


def refused(capsys: pytest.CaptureFixture[str], *words: str, status: int = 2) -> str:
    capsys.readouterr()
    assert main(list(words)) == status
    told = capsys.readouterr()
    assert TOKEN not in told.out + told.err
    return told.err


@pytest.mark.parametrize("part_bytes", [1 << 62, 4096], ids=["whole", "in parts"])
def test_what_is_pushed_comes_back(
    part_bytes: int, hub: UploadHub, folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    hub.part_bytes = part_bytes
    before = hashes(folder)
    assert main(["push", str(folder), REPO, "--private"]) == 0
    told = capfd.readouterr()
    repository = hub.repositories[REPO]
    assert f"pushed: {hub.endpoint}/{REPO} (commit {repository.commits[-1]})" in told.out
    assert repository.private
    assert len(repository.commits) == 2
    shards = len(list(folder.glob("*.safetensors")))
    assert (len(hub.stored) > shards) == (part_bytes == 4096)
    expect_same(hub, folder, tmp_path)
    assert hashes(folder) == before
    assert TOKEN not in told.out + told.err
    texts = [*hub.texts, *repository.files.values(), *(path.read_bytes() for path in folder.iterdir())]
    assert not any(TOKEN.encode() in text for text in texts)


@pytest.mark.parametrize(
    ("kill", "status"), [(signal.SIGKILL, -signal.SIGKILL), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)]
)
def test_an_upload_that_died_goes_on(
    kill: signal.Signals, status: int, hub: UploadHub, folder: Path, tmp_path: Path
) -> None:
    hub.stall_after = 1
    environment = os.environ | {
        "HF_ENDPOINT": hub.endpoint, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1",
        "HF_HOME": str(tmp_path / "home"), "HF_DEBUG": "1",
    }  # fmt: skip
    command = [sys.executable, "-m", "compressor", "push", str(folder), REPO, "--debug"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert hub.stalled.wait(timeout=120)
        child.send_signal(kill)
        output, errors = child.communicate(timeout=60)
    assert child.returncode == status, errors
    assert (kill is signal.SIGINT) == (b"goes on where it stopped" in errors)
    # The client logs its requests.
    assert b"Request" in errors
    home = [path for path in (tmp_path / "home").rglob("*") if path.is_file()]
    assert not any(TOKEN.encode() in text for text in (output, errors, *(path.read_bytes() for path in home)))
    assert len(hub.storage) == 1
    assert hub.repositories[REPO].files.keys() == {".gitattributes"}
    hub.stall_after = None
    assert main(["push", str(folder), REPO]) == 0
    shards = {hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("*.safetensors")}
    assert sorted(hub.stored) == sorted(shards)
    expect_same(hub, folder, tmp_path)


def test_again_changes_nothing_and_new_weights_replace_old_ones(hub: UploadHub, folder: Path) -> None:
    assert main(["push", str(folder), REPO]) == 0
    repository = hub.repositories[REPO]
    commits, stored = list(repository.commits), list(hub.stored)
    assert main(["push", str(folder), REPO]) == 0
    assert (repository.commits, hub.stored) == (commits, stored)
    tensors = read_weights(folder)
    for path in folder.glob("model*"):
        path.unlink()
    write_weights(folder, tensors)
    # As in folders of earlier versions, whose reports name no files.
    report = json.loads((folder / "compression.json").read_text())
    (folder / "compression.json").write_text(json.dumps(report | {"files": {}}))
    assert main(["push", str(folder), REPO]) == 0
    assert [name for name in repository.files if name.startswith("model")] == ["model.safetensors"]
    assert repository.files["model.safetensors"] == (folder / "model.safetensors").read_bytes()


def test_a_dry_run_lists_what_would_go_up_and_asks_nobody(
    hub: UploadHub, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "optimizer.pt").write_bytes(b"state")
    (folder / "NOTICE").write_text("companion")
    assert main(["push", str(folder), REPO, "--dry-run", "--private"]) == 0
    told = capsys.readouterr().out
    listed = dict(reversed(line.split()) for line in told.splitlines() if line.startswith(" ") and "files" not in line)
    assert listed.keys() == hashes(folder).keys() - {"optimizer.pt"}
    for name in listed.keys() - {"README.md"}:
        assert listed[name] == f"{(folder / name).stat().st_size:,}"
    assert "not uploaded: optimizer.pt, which compress did not write" in told
    assert "was never verified" in told
    assert f"nothing was uploaded; it would go to {REPO} (private)" in told
    assert "would be refused" not in told
    monkeypatch.delenv("HF_TOKEN")
    assert main(["push", str(folder), REPO, "--dry-run"]) == 0
    assert "a push would be refused: there is no token of the Hub" in capsys.readouterr().out
    assert hub.texts == []


@pytest.mark.parametrize(
    "repo", ["", "half", "a/b/c", "some one/half", "someone/-half", "someone/" + "x" * 100, "../x"]
)
def test_a_bad_id(repo: str, hub: UploadHub, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "give it as owner/name" in refused(capsys, "push", str(folder), repo)
    assert hub.texts == []


def test_folders_that_are_not_whole(
    hub: UploadHub, folders: tuple[Path, Path], folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def error(place: Path) -> str:
        return refused(capsys, "push", str(place), REPO)

    assert "there is no folder" in error(tmp_path / "absent")
    assert "has no readable compression.json; give a folder that compress wrote" in error(folders[0])
    shard = sorted(folder.glob("*.safetensors"))[0]
    moved = shard.rename(tmp_path / "moved")
    assert f"names files that {folder} lacks: {shard.name}" in error(folder)
    shard.write_bytes(moved.read_bytes()[:-10])
    assert "ends early" in error(folder)
    moved.rename(shard)
    shutil.copy(shard, folder / "old.safetensors")
    assert "holds old.safetensors beside the weights" in error(folder)
    (folder / "old.safetensors").unlink()
    report = json.loads((folder / "compression.json").read_text())
    for key_dim, part in (
        ({"before": 16, "after": 4}, "a key width of 8, and compression.json 4"),
        (3, "does not name"),
    ):
        (folder / "compression.json").write_text(json.dumps(report | {"key_dim": key_dim}))
        assert part in error(folder)
    (folder / "compression.json").write_text(json.dumps(report | {"base_model": REPO.upper()}))
    assert "is the model that" in error(folder)
    (folder / "compression.json").write_text(json.dumps(report))
    edit_config(folder, {"intermediate_size": 40})
    assert "use the config.json that belongs to these weights" in error(folder)
    (folder / "selection.json").unlink()
    assert "lacks selection.json" in error(folder)
    assert hub.texts == []


def test_tokens_that_cannot_be_used(
    hub: UploadHub, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "NOTICE").write_text(f"my token is {TOKEN}.")
    assert "your token of the Hub stands in NOTICE" in refused(capsys, "push", str(folder), REPO)
    (folder / "NOTICE").unlink()
    monkeypatch.setenv("HF_TOKEN", TOKEN + "\x01")
    assert "outside ASCII" in refused(capsys, "push", str(folder), REPO, "--debug")
    monkeypatch.delenv("HF_TOKEN")
    assert "there is no token of the Hub" in refused(capsys, "push", str(folder), REPO)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE=1" in refused(capsys, "push", str(folder), REPO)
    assert hub.texts == []


def test_repositories_that_cannot_take_it(
    hub: UploadHub, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repositories[REPO] = Repository()
    assert "is there already and public" in refused(capsys, "push", str(folder), REPO, "--private")
    hub.repositories[REPO] = Repository(files={"model.safetensors": b"another"})
    told = refused(capsys, "push", str(folder), REPO)
    assert "holds a model that compress did not write (model.safetensors)" in told
    for name in ("pytorch_model.bin", "sub/model.Q4.gguf", "config.json"):
        hub.repositories["someone/theirs"] = Repository(files={"README.md": b"a card of theirs", name: b"another"})
        told = refused(capsys, "push", str(folder), "someone/theirs")
        assert f"holds a model that compress did not write ({name})" in told
    hub.repositories["someone/adapted"] = Repository(files={"compression.json": b"{}", "adapter_config.json": b"{}"})
    assert "transformers would apply that adapter" in refused(capsys, "push", str(folder), "someone/adapted")
    hub.refuse_create = True
    told = refused(capsys, "push", str(folder), "other/half")
    assert "the token may not do this (You don't have the rights to create a model under this namespace)" in told
    monkeypatch.setattr(hub, "token", "another")
    assert "the Hub does not accept the token" in refused(capsys, "push", str(folder), REPO, "--debug")
    assert hub.stored == []
    assert hub.repositories[REPO].files == {"model.safetensors": b"another"}


def test_a_storage_that_fails(hub: UploadHub, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hub.refuse_put = True
    told = refused(capsys, "push", str(folder), REPO, "--debug", status=1)
    assert f"the upload to {REPO} failed (the storage is closed); the repository has all of the new files" in told
    assert len(hub.repositories[REPO].commits) == 1


def test_a_run_pushes_its_result(
    hub: UploadHub, folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, options = tmp_path / "out", ["--no-verify", "--no-evaluate", "--push-to-hub", REPO, "--private"]
    assert compress(folders[0], output, make_text(tmp_path), *options) == 0
    assert f"pushed: {hub.endpoint}/{REPO}" in capsys.readouterr().out
    assert hub.repositories[REPO].private
    assert not any(TOKEN.encode() in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    expect_same(hub, output, tmp_path)
    hub.refuse_put = True
    hub.storage.clear()
    words = [*options[:2], "--push-to-hub", "someone/other", "--seed", "1", "--method", "random"]
    assert compress(folders[0], tmp_path / "second", make_text(tmp_path), *words) == 1
    told = capsys.readouterr().err
    assert f"the result stands in {tmp_path / 'second'}, and was not pushed" in told
    assert (tmp_path / "second" / "model.safetensors").exists() or list((tmp_path / "second").glob("*.safetensors"))


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (["--push-to-hub", "half"], "give it as owner/name"),
        (["--private"], "--private belongs to --push-to-hub"),
        (["--push-to-hub", "someone/half"], "the Hub does not accept the token"),
        (["--push-to-hub", "others/half"], "the token is of someone, who is not in others; push under someone or team"),
        (["--push-to-hub", "someone/theirs"], "someone/theirs holds a model that compress did not write (model.gguf)"),
        (["--push-to-hub", "someone/public", "--private"], "someone/public is there already and public"),
        (["--push-to-hub", "team/half"], "the token of the Hub may only read"),
    ],
)
def test_a_run_whose_push_cannot_succeed_does_not_start(
    options: list[str], part: str, hub: UploadHub, folders: tuple[Path, Path], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    hub.token = "another" if "accept" in part else hub.token
    hub.role = "read" if "only read" in part else "write"
    hub.repositories["someone/theirs"] = Repository(files={"model.gguf": b"another"})
    hub.repositories["someone/public"] = Repository()
    assert compress(folders[0], tmp_path / "out", make_text(tmp_path), *options) == 2
    assert part in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
