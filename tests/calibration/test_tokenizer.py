"""The tokenizer of a checkpoint folder: loaded from there alone, or refused."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path
from typing import NoReturn

import huggingface_hub.constants
import pytest

from compressor.calibration.tokenizer import load_tokenizer
from compressor.errors import RequestError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "config.json")


@pytest.fixture
def folder(demo_model: Path, tmp_path: Path) -> Path:
    """A copy of the bundled checkpoint without its weights."""
    for name in TOKENIZER_FILES:
        shutil.copyfile(demo_model / name, tmp_path / name)
    return tmp_path


def refusal(folder: Path) -> str:
    with pytest.raises(RequestError) as caught:
        load_tokenizer(folder, trust_remote_code=False)
    return str(caught.value)


@pytest.mark.parametrize("name", ["fla", "without the config of a model", "of a large vocabulary"])
def test_no_connection_is_tried(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(*_: object) -> NoReturn:
        pytest.fail("a connection was tried")

    monkeypatch.setattr(socket.socket, "connect", connect)
    monkeypatch.setattr(socket, "getaddrinfo", connect)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    if name == "without the config of a model":
        (folder / "config.json").unlink()
    if name == "of a large vocabulary":  # transformers looks whether these are Mistral's
        (folder / "config.json").write_text('{"model_type":"qwen3_5_text","vocab_size":248320}')
    tokenizer = load_tokenizer(folder, trust_remote_code=False)
    assert tokenizer.decode(tokenizer("Chapter one")["input_ids"]) == "Chapter one"


def test_chat_template_and_class_are_the_folder_s(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    tokenizer = load_tokenizer(folder, trust_remote_code=False)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "one"}], tokenize=False) == "one!"


def test_a_folder_without_tokenizer_is_refused(folder: Path) -> None:
    for name in TOKENIZER_FILES[:3]:
        (folder / name).unlink()
    assert refusal(folder) == (
        f"the folder {folder} has no tokenizer (tokenizer.json, tokenizer.model, vocab.json ...); "
        "copy the files of the model's tokenizer into it."
    )
    assert "has no tokenizer (tokenizer.json" in refusal(folder / "missing")


def test_a_tokenizer_without_its_vocabulary_is_refused(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    assert refusal(folder).startswith(f"the folder {folder} has no tokenizer that can be loaded (ValueError: ")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_broken_files_are_refused(folder: Path, name: str) -> None:
    path = folder / name
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 12345\n"
    path.write_text(pointer)
    assert refusal(folder) == (
        f"{path} is a Git LFS pointer ({len(pointer)} bytes), not a tokenizer; run git lfs pull."
    )
    path.write_text('{"version": "1.0"')
    assert refusal(folder).startswith(f"{path} is not JSON (")
    path.write_bytes(b"\xff\xfe")
    assert refusal(folder).startswith(f"{path} is not JSON (")
    path.write_text("[]")
    assert refusal(folder) == f"{path} holds no JSON object; fetch it again."


def test_a_tokenizer_file_of_another_form_is_refused(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    assert refusal(folder).startswith(f"the folder {folder} has no tokenizer that can be loaded (KeyError: ")


def test_code_of_its_own_needs_permission(folder: Path) -> None:
    config = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": [None, "own.OwnTokenizer"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(
        "from transformers import PreTrainedTokenizerFast\n\nclass OwnTokenizer(PreTrainedTokenizerFast):\n    pass\n"
    )
    assert refusal(folder) == (
        f"the tokenizer in {folder} needs Python code of its own; read that code, "
        "then allow it with --trust-remote-code."
    )
