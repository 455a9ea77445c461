"""What of a base on the Hub goes into the card, and what never leaves the process, against a Hub on this machine."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub import ModelCard, constants
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from compressor.architectures.family import vision_note
from compressor.cli import main
from tests.export.hub_upload_server import TOKEN, Repository, UploadHub
from tests.test_pipeline import compress, make_source, make_text
from tests.tiny_models import save_tiny

BASE, REPO = "org/base", "someone/half"
METADATA = "license: other\nlicense_name: research\nlicense_link: LICENSE\npipeline_tag: image-text-to-text\n"
# huggingface_hub's own call of its HTTP library.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>' to upload raw bytes:DeprecationWarning")


@pytest.fixture
def based(hub: UploadHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> UploadHub:
    """With a multimodal model, and a cache of the client that is empty."""
    source = make_source("qw", tmp_path / "source")
    (source / "README.md").write_text(f"---\n{METADATA}---\n# Base\n")
    (source / "LICENSE").write_text("terms")
    files = {path.name: path.read_bytes() for path in source.iterdir()}
    hub.repositories[BASE] = Repository(files=files, commits=["a" * 40])
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return hub


def test_the_card_has_licence_task_and_commit_of_the_base(based: UploadHub, tmp_path: Path) -> None:
    options = ["--no-verify", "--no-evaluate", "--no-refit", "--push-to-hub", REPO]
    assert compress(Path(BASE), tmp_path / "out", make_text(tmp_path), *options) == 0
    pushed = based.repositories[REPO].files
    card = pushed["README.md"].decode()
    data = ModelCard(card).data.to_dict()
    assert {key: value for key, value in data.items() if key != "tags"} == {
        "base_model": BASE, "license": "other", "license_name": "research", "license_link": "LICENSE",
        "library_name": "transformers", "pipeline_tag": "image-text-to-text",
    }  # fmt: skip
    assert f"[{BASE}](https://huggingface.co/{BASE}) at revision `{'a' * 40}`" in card
    assert "# Base" not in card
    assert "These lines load the text model alone; `AutoModelForImageTextToText.from_pretrained` loads it with" in card
    assert pushed["LICENSE"] == b"terms"


def test_of_a_multimodal_model_the_load_lines_load_the_text_model(tmp_path: Path) -> None:
    """As the card says: the class for images and text loads the whole."""
    folder, note = save_tiny("qw", tmp_path), vision_note("qwen3_5")
    assert "the text model alone; `AutoModelForImageTextToText.from_pretrained` loads it with its vision tower" in note
    assert type(AutoModelForCausalLM.from_pretrained(folder)).__name__ == "Qwen3_5ForCausalLM"
    whole = AutoModelForImageTextToText.from_pretrained(folder)
    assert any("visual" in name for name, _ in whole.named_parameters())
    assert {vision_note(other) for other in ("qwen3_5_text", "qwen3_next", "mamba2")} == {""}


def test_a_hub_that_repeats_the_token_is_not_quoted(
    based: UploadHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither in the message nor in the traceback of --debug."""
    options = ["--no-verify", "--no-evaluate", "--no-refit"]
    assert compress(Path(BASE), tmp_path / "out", make_text(tmp_path), *options) == 0
    based.refuse_create, based.refusal = True, f"the token {TOKEN} may only read"
    capsys.readouterr()
    assert main(["push", str(tmp_path / "out"), REPO, "--debug"]) == 2
    told = capsys.readouterr()
    assert "the token may not do this (the token *** may only read); use one that may write" in told.err
    assert "Traceback" in told.err
    assert TOKEN not in told.out + told.err


@pytest.mark.slow
def test_a_hub_that_dies_midway_is_told_and_the_same_call_goes_on(
    based: UploadHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It takes one file and closes every connection of the next; the client tries for half a minute."""
    options = ["--no-verify", "--no-evaluate", "--no-refit", "--max-shard-size", "60KB"]
    assert compress(Path(BASE), tmp_path / "out", make_text(tmp_path), *options) == 0
    shards = list((tmp_path / "out").glob("*.safetensors"))
    assert len(shards) > 1
    based.stall_after = 1
    based.release.set()
    capsys.readouterr()
    assert main(["push", str(tmp_path / "out"), REPO, "--debug"]) == 1
    told = capsys.readouterr()
    assert f"the upload to {REPO} failed (" in told.err
    assert "the repository has all of the new files or none, and `compress push` of the same folder goes on" in told.err
    assert TOKEN not in told.out + told.err
    assert len(based.storage) == 1
    assert based.repositories[REPO].files.keys() == {".gitattributes"}
    based.stall_after = None
    assert main(["push", str(tmp_path / "out"), REPO]) == 0
    assert len(based.stored) == len(shards)
    assert all(based.repositories[REPO].files[path.name] == path.read_bytes() for path in shards)
