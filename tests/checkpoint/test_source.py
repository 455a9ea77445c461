from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from compressor.checkpoint.source import ModelFolder, fetch_weights, resolve_model
from compressor.errors import CompressorError, RequestError, RunError
from tests.checkpoint.hub_server import REPO, Hub, serving

COMMIT_A, COMMIT_B = "a" * 40, "b" * 40
CONFIG = b'{"model_type": "gated_deltanet"}'
SHARDS = {f"model-0000{n}-of-00002.safetensors": bytes([n]) * 100 for n in (1, 2)}
INDEX = json.dumps({"metadata": {}, "weight_map": {name[:11]: name for name in SHARDS}}).encode()
WHOLE = {"config.json": CONFIG, "tokenizer.json": b"{}", "LICENSE": b"Apache", "model.safetensors.index.json": INDEX}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return folder


@pytest.fixture
def start(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Hub], Hub]]:
    """Serve a `Hub` to the real client for the rest of the test."""
    running = []

    def start_hub(hub: Hub) -> Hub:
        context = serving(hub)
        running.append(context)
        context.__enter__()
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        )
        return hub

    yield start_hub
    for context in running:
        context.__exit__(None, None, None)


def write_snapshot(cache: Path, revision: str, commit: str, files: dict[str, bytes]) -> Path:
    """A snapshot as the Hub's client leaves it: relative links to blobs, and a reference."""
    repository = cache / "models--org--name"
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    for folder in ("blobs", "refs"):
        (repository / folder).mkdir(exist_ok=True)
    (repository / "refs" / revision).write_text(commit)
    for name, data in files.items():
        blob = repository / "blobs" / f"{name}-{commit}"
        blob.write_bytes(data)
        (snapshot / name).symlink_to(os.path.relpath(blob, snapshot))
    return snapshot


def refusal(model: str, revision: str | None = None) -> str:
    with pytest.raises(RequestError) as caught:
        resolve_model(model, revision)
    message = str(caught.value)
    assert "\n" not in message
    return message


class TestLocalFolder:
    def test_wins_over_the_hub_and_connects_nowhere(
        self, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write_snapshot(cache, "main", COMMIT_A, {"config.json": CONFIG})
        folder = tmp_path / "org" / "name"
        folder.mkdir(parents=True)
        (folder / "config.json").write_bytes(CONFIG)

        def no_connection(*_: object) -> None:
            raise AssertionError("a connection was tried")

        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(socket.socket, "connect", no_connection)
        monkeypatch.chdir(tmp_path)
        found = resolve_model("org/name", None)
        assert found == ModelFolder(folder, "name", None)
        fetch_weights(found)

    def test_keeps_links_and_is_named_after_itself(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        folder = tmp_path / "real"
        folder.mkdir()
        (folder / "config.json").write_bytes(CONFIG)
        link = tmp_path / "latest"
        link.symlink_to(folder)
        assert resolve_model(str(link), None) == ModelFolder(link, "latest", None)
        monkeypatch.chdir(folder)
        assert resolve_model(".", None) == ModelFolder(folder, "real", None)
        monkeypatch.setenv("HOME", str(tmp_path))
        assert resolve_model("~/real", None).path == folder

    def test_a_lost_link_is_not_looked_up_on_the_hub(
        self, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "name").symlink_to("name")
        monkeypatch.chdir(tmp_path)
        assert "name links to name, and so on in a circle; give the folder" in refusal("name")

    @pytest.mark.parametrize("target", ["config.json", "nowhere", "folder", "pipe"])
    def test_what_is_no_config(self, target: str, tmp_path: Path) -> None:
        config, folder, pipe = (tmp_path / name for name in ("config.json", "folder", "pipe"))
        folder.mkdir()
        os.mkfifo(pipe)
        config.symlink_to(target)
        assert (
            refusal(str(tmp_path))
            == {
                "config.json": f"{config} links to config.json, and so on in a circle; download the file again.",
                "nowhere": f"{config} links to nowhere, which does not exist; download the file again.",
                "folder": f"{config} is a folder, and should be a file; put the file there, or download it again.",
                "pipe": f"{config} is a pipe, and should be a file; put the file there, or download it again.",
            }[target]
        )

    def test_has_no_revision(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_bytes(CONFIG)
        assert "revision 'v1' is for Hub models" in refusal(str(tmp_path), "v1")

    def test_refusals(self, tmp_path: Path) -> None:
        file = tmp_path / "model.gguf"
        file.write_bytes(b"GGUF")
        empty = tmp_path / "empty"
        empty.mkdir()
        assert "model.gguf is a file; give the folder" in refusal(str(file))
        assert f"{empty} is empty; give a folder that holds config.json" in refusal(str(empty))
        assert f"{tmp_path} has no config.json; give a folder" in refusal(str(tmp_path))
        pipe, lost, circle = (tmp_path / name for name in ("pipe", "lost", "circle"))
        os.mkfifo(pipe)
        lost.symlink_to("nowhere")
        circle.symlink_to("circle")
        give = "give the folder that holds config.json and safetensors weights."
        assert refusal(str(pipe)) == f"{pipe} is a pipe; {give}"
        assert refusal(str(lost)) == f"{lost} links to nowhere, which does not exist; {give}"
        assert refusal(str(circle)) == f"{circle} links to circle, and so on in a circle; {give}"
        (empty / "config.json").write_bytes(CONFIG)
        assert f"{tmp_path} has no config.json; did you mean {empty}?" in refusal(str(tmp_path))

    @pytest.mark.parametrize(
        "path", ["/nowhere/model", "./model", "../model", "~nobody/model", "a/b/c", "model/", "a\\b"]
    )
    def test_a_path_is_not_looked_up_on_the_hub(self, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("huggingface_hub.snapshot_download", None)
        assert refusal(path) == f"there is no folder {path}; check the path, or give a Hub id such as org/name."

    @pytest.mark.usefixtures("cache")
    @pytest.mark.parametrize("model", ["", "x" * 5000, "a\0b", "org/na me"])
    def test_any_string_gets_a_sentence(self, model: str) -> None:
        assert "give a" in refusal(model) or "there is no folder and no Hub model called" in refusal(model)


class TestCachedModel:
    def test_the_pinned_revision_is_used_for_everything(self, cache: Path) -> None:
        files = {"config.json": CONFIG, "model.safetensors": b"weights"}
        write_snapshot(cache, "main", COMMIT_A, files | {"chat_template.jinja": b"A"})
        snapshot = write_snapshot(cache, "v1", COMMIT_B, files | {"chat_template.jinja": b"B"})
        found = resolve_model(REPO, "v1")
        assert found == ModelFolder(snapshot, REPO, COMMIT_B)
        assert (found.path / "chat_template.jinja").read_bytes() == b"B"
        assert found.path.parts[-2:] == ("snapshots", COMMIT_B)
        fetch_weights(found)
        assert resolve_model(REPO, None).revision == COMMIT_A
        assert resolve_model(REPO, COMMIT_B).path == snapshot

    def test_what_is_not_cached_is_refused_offline(self, cache: Path) -> None:
        assert f"{REPO} is not complete in the Hub cache {cache}" in refusal(REPO)
        write_snapshot(cache, "main", COMMIT_A, {"config.json": CONFIG})
        message = refusal(REPO, "v2")
        assert f"{REPO} (revision 'v2') is not complete" in message
        assert "HF_HUB_OFFLINE" in message

    def test_a_snapshot_without_weights_is_refused_offline(self, cache: Path) -> None:
        write_snapshot(cache, "main", COMMIT_A, {"config.json": CONFIG})
        with pytest.raises(RequestError, match=r"has no model\.safetensors.*convert to safetensors first"):
            fetch_weights(resolve_model(REPO, None))

    def test_a_snapshot_without_config_is_refused(self, cache: Path) -> None:
        write_snapshot(cache, "main", COMMIT_A, {"model.safetensors": b""})
        assert f"{REPO} at {COMMIT_A} has no config.json" in refusal(REPO)


class TestDownload:
    def test_weights_come_second_and_only_those_that_are_read(self, start: Callable[[Hub], Hub]) -> None:
        unwanted = {"consolidated.safetensors": b"?", "pytorch_model.bin": b"?", "sample.mp4": b"?"}
        hub = start(Hub({"main": COMMIT_A}, {COMMIT_A: WHOLE | SHARDS | unwanted}))
        found = resolve_model(REPO, None)
        assert sorted(hub.served) == sorted(WHOLE)
        assert found.revision == COMMIT_A
        hub.served.clear()
        fetch_weights(found)
        assert sorted(hub.served) == sorted(SHARDS)
        assert all((found.path / name).read_bytes() == data for name, data in SHARDS.items())

    def test_the_commit_is_kept_when_the_branch_moves(self, start: Callable[[Hub], Hub]) -> None:
        revisions = {"main": COMMIT_A}
        single = {"config.json": CONFIG, "model.safetensors": b"old"}
        start(Hub(revisions, {COMMIT_A: single, COMMIT_B: single | {"model.safetensors": b"new"}}))
        found = resolve_model(REPO, None)
        revisions["main"] = COMMIT_B
        fetch_weights(found)
        assert (found.path / "model.safetensors").read_bytes() == b"old"

    def test_only_pickled_weights(self, start: Callable[[Hub], Hub]) -> None:
        start(Hub({"main": COMMIT_A}, {COMMIT_A: {"config.json": CONFIG, "pytorch_model.bin": b"?"}}))
        with pytest.raises(RequestError, match=f"{REPO} at {COMMIT_A} has no model.safetensors"):
            fetch_weights(resolve_model(REPO, None))

    def test_a_gated_repository(self, start: Callable[[Hub], Hub]) -> None:
        start(Hub({"main": COMMIT_A}, {COMMIT_A: WHOLE}, gated=True))
        message = refusal(REPO)
        assert f"{REPO} is gated; accept its licence" in message
        assert "log in with `hf auth login`" in message

    def test_an_unknown_revision(self, start: Callable[[Hub], Hub]) -> None:
        start(Hub({"main": COMMIT_A}, {COMMIT_A: WHOLE}))
        assert f'revision "x" does not exist in {REPO}' in refusal(REPO, "x")

    def test_an_unknown_repository(self, start: Callable[[Hub], Hub]) -> None:
        start(Hub({"main": COMMIT_A}, {COMMIT_A: WHOLE}))
        assert "there is no folder and no Hub model called org/other" in refusal("org/other")

    def test_no_connection(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            closed = f"http://127.0.0.1:{free.getsockname()[1]}"
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", closed)
        message = refusal(REPO)
        assert f"{REPO} is not complete in the Hub cache and could not be fetched" in message
        assert "check the connection" in message

    def test_no_space(self, start: Callable[[Hub], Hub], cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        start(Hub({"main": COMMIT_A}, {COMMIT_A: WHOLE | SHARDS}))
        found = resolve_model(REPO, None)

        def full(*_: object, **__: object) -> str:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("huggingface_hub.snapshot_download", full)
        with pytest.raises(RunError, match=f"no space left in the Hub cache {cache}") as caught:
            fetch_weights(found)
        assert isinstance(caught.value, CompressorError)
