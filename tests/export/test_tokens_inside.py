from __future__ import annotations

import json
from pathlib import Path

import pytest

from compressor.export import tokens_inside
from compressor.export.tokens_inside import blocks, holds_any, holds_token, masking

OTHER = "hf_" + "aB3dE" * 6 + "fG7h"


def test_a_token_is_found_wherever_the_blocks_are_cut() -> None:
    text = b"x" * 300 + b" " + OTHER.encode() + b" " + b"y" * 300
    for size in range(1, 200, 7):
        pieces = [text[start : start + size] for start in range(0, len(text), size)]
        assert holds_token(iter(pieces))
        assert holds_any(iter(pieces), (OTHER.encode(),))
        assert not holds_any(iter(pieces), (b"z", b"yx"))
    assert holds_token(iter([OTHER.encode()]))
    assert not holds_token(iter([]))


@pytest.mark.parametrize(
    "text",
    [
        OTHER[:-1],
        OTHER + "i",
        "x" + OTHER,
        "hf_" + "x" * 34,
        "hf_" + "_".join(["abcdefg"] * 5),
        # A cut must not make a token of what is none.
        "z" * 100 + OTHER + "i" * 400,
        "q" * 150 + OTHER + " ",
    ],
)
def test_what_is_no_token(text: str) -> None:
    for size in (1, 64, 137, 1000):
        pieces = [text.encode()[start : start + size] for start in range(0, len(text), size)]
        assert not holds_token(iter(pieces))


def test_of_weights_the_header_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens_inside, "_BLOCK_BYTES", 16)
    header = json.dumps({"__metadata__": {"note": OTHER}}).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + OTHER.encode() * 100)
    assert b"".join(blocks(file, only_header=True)) == header
    assert max(map(len, blocks(file, only_header=True))) == 16
    assert holds_token(blocks(file, only_header=True))
    assert b"".join(blocks(file, only_header=False)) == file.read_bytes()
    file.write_bytes((1 << 60).to_bytes(8, "little") + b"{}")
    assert b"".join(blocks(file, only_header=True)) == b"{}"


def test_lines_are_printed_without_tokens() -> None:
    assert masking(None)(f"a {OTHER}, secret") == "a ***, secret"
    assert masking("secret")(f"a {OTHER}, secret") == "a ***, ***"
