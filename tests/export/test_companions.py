from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

import pytest

from compressor.errors import RequestError
from compressor.export.companions import MAX_COMPANION_BYTES, companion_files, copy_companions

COMPANIONS = {
    "tokenizer.json": b'{"version": "1.0"}',
    "tokenizer_config.json": b'{"tokenizer_class": "Qwen2Tokenizer"}',
    "special_tokens_map.json": b"{}",
    "added_tokens.json": b'{"<x>": 63}',
    "vocab.json": b"{}",
    "merges.txt": b"a b\r\n",
    "tokenizer.model": b"\x00\xff",
    "qwen.tiktoken": b"YQ== 0\n",
    "chat_template.jinja": b"{{ bos_token }}",
    "additional_chat_templates/tool_use.jinja": b"{# tools #}",
    "preprocessor_config.json": b"{}",
    "processor_config.json": b"{}",
    # No loader accepts it on saving: it must never pass through one.
    "generation_config.json": b'{"do_sample": false, "temperature": 0.6}',
    "modeling_custom.py": b"raise ImportError\n",
    "LICENSE": b"Apache\n",
    "NOTICE.txt": b"notice\n",
    "USE_POLICY.md": b"policy\n",
}
OTHERS = [
    "config.json", "README.md", "readme.MD", "compression.json", "selection.json", "recipe.yaml",
    "model.safetensors", "model-00001-of-00002.safetensors", "model.safetensors.bak", "MODEL2.SAFETENSORS",
    "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json", "consolidated.00.pth",
    "model.pt", "model.ckpt", "tf_model.h5", "flax_model.msgpack", "q4.gguf", "model.onnx", "model.onnx_data",
    "weights.npz", "model.pkl", "optimizer.pt", "scheduler.pt", "trainer_state.json", "training_args.bin",
    "rng_state_0.pth", "eval_results.json", "events.out.tfevents.123", "zero_to_fp32.py", "adapter_config.json",
    ".gitattributes", "onnx/config.json", "checkpoint-5/tokenizer.json", "additional_chat_templates/.hidden",
    "id_rsa", "id_ed25519.pub", "key.pem", "server.KEY", "prod.env", "token", "Token.txt", "hf_token.json",
    "secrets.json", "credentials.yaml", "passwd", "service_account.json", "additional_chat_templates/passwd",
]  # fmt: skip


def fill(folder: Path) -> Path:
    for name, content in COMPANIONS.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    for name in OTHERS:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"other")
    return folder


def link_as_cache(plain: Path, cache: Path) -> Path:
    """The layout of a Hub cache: blobs named by hash, and a snapshot of relative links to them."""
    snapshot = cache / "snapshots" / "abc"
    (cache / "blobs").mkdir(parents=True)
    for path in (path for path in plain.rglob("*") if path.is_file()):
        blob = cache / "blobs" / hashlib.sha256(str(path).encode()).hexdigest()
        shutil.copyfile(path, blob)
        blob.chmod(0o444)
        link = snapshot / path.relative_to(plain)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    return snapshot


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_which_files_travel(tmp_path: Path) -> None:
    assert [path.as_posix() for path in companion_files(fill(tmp_path))] == sorted(COMPANIONS)


def test_copies_are_the_same_bytes(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    names = copy_companions(fill(tmp_path / "source"), tmp_path / "out")
    assert list(names) == sorted(COMPANIONS)
    assert contents(tmp_path / "out") == COMPANIONS


def test_copies_of_a_cache_are_plain_files_of_their_own(tmp_path: Path) -> None:
    snapshot = link_as_cache(fill(tmp_path / "plain"), tmp_path / "cache")
    before = contents(tmp_path / "cache" / "blobs")
    (tmp_path / "out").mkdir()
    old_mask = os.umask(0o022)
    try:
        copy_companions(snapshot, tmp_path / "out")
    finally:
        os.umask(old_mask)
    assert contents(tmp_path / "cache" / "blobs") == before
    shutil.rmtree(tmp_path / "cache")
    assert contents(tmp_path / "out") == COMPANIONS
    files = [path for path in (tmp_path / "out").rglob("*") if not path.is_dir()]
    assert not any(path.is_symlink() for path in files)
    assert {path.stat().st_mode & 0o777 for path in files} == {0o644}


def test_what_is_there_is_never_written_through(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "tokenizer.json").write_bytes(b"new")
    (tmp_path / "elsewhere").write_bytes(b"precious")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "tokenizer.json").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileExistsError):
        copy_companions(tmp_path / "source", tmp_path / "out")
    assert (tmp_path / "elsewhere").read_bytes() == b"precious"


def test_large_files_and_what_is_no_file_stay(tmp_path: Path) -> None:
    for name, size in {"at-limit.txt": MAX_COMPANION_BYTES, "over-limit.txt": MAX_COMPANION_BYTES + 1}.items():
        with (tmp_path / name).open("wb") as file:
            file.truncate(size)
    os.mkfifo(tmp_path / "pipe")
    assert [path.name for path in companion_files(tmp_path)] == ["at-limit.txt"]


@pytest.mark.parametrize(
    ("target", "reason"),
    [("../blobs/gone", "No such file or directory"), ("tokenizer.json", "Too many levels of symbolic links")],
)
def test_a_link_to_nothing_is_refused(target: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").symlink_to(target)
    with pytest.raises(RequestError) as error:
        companion_files(tmp_path)
    assert str(error.value) == (
        f"{tmp_path}/tokenizer.json is a link to {target}, which leads to no file ({reason}); download the checkpoint "
        "again, or remove it."
    )
