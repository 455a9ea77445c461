from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from compressor.checkpoint.config_file import decoder_config, dump_config, read_config
from compressor.errors import RequestError
from tests.tiny_models import save_tiny


def refusal(path: Path, content: str | bytes) -> str:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(RequestError) as caught:
        read_config(path)
    return str(caught.value)


def test_infinity_keeps_its_spelling(tmp_path: Path) -> None:
    path = save_tiny("m2", tmp_path) / "config.json"
    tagged = path.read_text()
    config = read_config(path)
    assert config["time_step_limit"] == [0.0, {"__float__": "Infinity"}]
    assert dump_config(config) == tagged

    config["time_step_limit"] = [0.0, math.inf]
    path.write_text(dump_config(config))
    assert "Infinity\n" in path.read_text()
    assert "__float__" not in path.read_text()
    assert read_config(path)["time_step_limit"] == [0.0, math.inf]


@pytest.mark.parametrize("family", ["m2", "nh"])
@pytest.mark.parametrize("bare", [False, True])
def test_stock_reads_what_was_dumped(tmp_path: Path, family: str, bare: bool) -> None:
    from transformers import AutoConfig

    path = save_tiny(family, tmp_path) / "config.json"
    config = read_config(path)
    if bare:
        config["time_step_limit"] = [0.0, math.inf]
    path.write_text(dump_config(config), encoding="utf-8")
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert list(loaded.time_step_limit) == [0.0, math.inf]
    assert loaded.num_hidden_layers == (4 if family == "nh" else 2)


def test_dump_changes_nothing_but_white_space(tmp_path: Path) -> None:
    source = (
        '{"model_type": "x", "zeta": 1, "alpha": {"b": 1e-06, "a": "größe"}, "torch_dtype": "bfloat16",'
        ' "rope_theta": 10000000.0, "list": [1, 2.0, null, true], "low": -Infinity}'
    )
    (tmp_path / "config.json").write_text(source, encoding="utf-8")
    dumped = dump_config(read_config(tmp_path / "config.json"))
    assert json.loads(dumped) == json.loads(source)
    assert "".join(dumped.split()) == "".join(source.split())
    assert dumped.startswith('{\n  "model_type": "x",\n  "zeta": 1,\n')
    assert dumped.endswith("}\n")


def test_decoder_config() -> None:
    text = {"hidden_size": 32}
    assert decoder_config({"model_type": "qwen3_5", "text_config": text}) is text
    plain = {"model_type": "gated_deltanet", "text_config": None}
    assert decoder_config(plain) is plain


def test_the_original_state_spaces_layout(tmp_path: Path) -> None:
    fields = '{"d_model":32,"n_layer":2,"vocab_size":64,"ssm_cfg":{"layer":"Mamba2"},"rms_norm":true}'
    message = refusal(tmp_path / "config.json", fields)
    assert "config.json has no model_type: this is the original state-spaces layout" in message
    assert "convert the checkpoint to the Hugging Face layout first" in message


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('{"hidden_size": 32}', "has no model_type, by which transformers finds the class; add it."),
        ('{"model_type": null}', "has no model_type"),
        ('{\n  "model_type": "x",\n  "a": 1,,\n}', r"is not valid JSON (line 3, column 10: "),
        ("[1, 2]", "holds a JSON list, not an object"),
        ("", "is not valid JSON (line 1, column 1: "),
        (b'{"a": "\xff"}', "is not UTF-8 text (byte 7)"),
        ("[" * 100_000, "is not valid JSON (maximum recursion depth"),
        ("9" * 5000, "is not valid JSON (Exceeds the limit"),
        ("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "is a Git LFS pointer, not the file"),
    ],
)
def test_refusals(tmp_path: Path, content: str | bytes, expected: str) -> None:
    path = tmp_path / "config.json"
    message = refusal(path, content)
    assert message.startswith(str(path))
    assert expected in message


def test_an_absent_file(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"config\.json cannot be read \(No such file or directory\)"):
        read_config(tmp_path / "config.json")
