"""Requests that cannot be met: one sentence, exit status 2, nothing written."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from compressor.cli import main
from tests.test_pipeline import FAST, compress, make_source, make_text
from tests.tiny_models import edit_config, save_tiny, save_tiny_tokenizer


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_source("gated_deltanet", tmp_path_factory.mktemp("source") / "model")


def refused(capsys: pytest.CaptureFixture[str], words: Sequence[str], *fragments: str) -> None:
    assert main(list(words)) == 2
    error = capsys.readouterr().err
    for fragment in fragments:
        assert fragment in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("options", "fragments"),
    [
        (["--ratio", "1"], ["the request: --ratio: Input should be less than 1 (got 1.0)"]),
        (["--ratio", "-0.5"], ["--ratio: Input should be greater"]),
        (["--ratio", "0.5", "--target-dim", "8"], ["exactly one of --ratio", "--target-dim"]),
        (["--ratio", "nan"], ["the request: --ratio: Input should be a finite number (got nan)"]),
        (["--ratio", "inf"], ["the request: --ratio: Input should be a finite number (got inf)"]),
        ([], ["exactly one of --ratio"]),
        (["--target-dim", "17"], ["--target-dim 17", "16 key channels"]),
        (["--target-dim", "0"], ["--target-dim: Input should be greater than or equal to 1"]),
        (["--ratio", "0.9", "--round-to", "16"], ["rounds to 0", "--round-to 1"]),
        (["--ratio", "0.5", "--method", "drrq"], ["did you mean drrqr"]),
        (["--ratio", "0.5", "--scoring", "k", "--method", "random"], ["the request: --scoring: Scoring 'k' means"]),
        (["--ratio", "0.5", "--scoring", "v"], ["--scoring: ", "'qk', 'k' or 'q'"]),
        (["--ratio", "0.5", "--f", "0.9"], ["--f: "]),
        (["--ratio", "0.5", "--norm-epsilon", "none"], ["--norm-epsilon: ", "'keep', 'scaled' or 'auto'"]),
        (["--ratio", "0.5", "--device", "cuda:77"], ["cuda:77", "torch sees"]),
        (["--ratio", "0.5", "--device", "cuda:999"], ["cuda:999", "torch sees"]),
        (["--ratio", "0.5", "--seed", "9" * 30], ["--seed: ", "less than or equal to"]),
        (
            ["--ratio", "0.5", "--calibration", "/dev/zero"],
            ['"/dev/zero" is a device, neither a file nor a folder; give'],
        ),
        (["--ratio", "0.5", "--device", "tpu"], ['--device: "tpu" is no device']),
        (["--ratio", "0.5", "--dtype", "int8"], ["--dtype: "]),
        (["--ratio", "0.5", "--max-shard-size", "many"], ["--max-shard-size: ", "many", "5GB"]),
        (["--ratio", "0.5", "--revision", "main"], ["revision"]),
        (["--ratio", "0.5", "--sequence-length", "4096"], ["--sequence-length 4096", "2048 positions"]),
        (["--ratio", "0.5", "--calibration", "/nowhere/x.txt"], ["/nowhere/x.txt"]),
        (["--ratio", "0.5", "--no-refit", "--calibration-samples", "1", "--sequence-length", "20"], ["20", "160"]),
        (
            ["--ratio", "0.5", "--calibration-samples", "2", "--sequence-length", "20"],
            ["20 tokens", "--calibration-samples"],
        ),
    ],
)
def test_impossible_requests(
    options: list[str], fragments: list[str], source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = make_text(tmp_path)
    output = tmp_path / "out"
    words = [str(source), "--output-dir", str(output), "--calibration", str(text), "--round-to", "1", *options]
    refused(capsys, words, *fragments)
    assert not output.exists()
    assert not (tmp_path / "out.resume").exists()


def test_unknown_family(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = edit_config(make_source("gated_deltanet", tmp_path / "model"), {"model_type": "gated_delta_net"})
    refused(
        capsys, [str(folder), "--ratio", "0.5"],
        "model_type 'gated_delta_net' is not a family that can be cut", "bamba, delta_net", "did you mean",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("gla", "the gate that gives them, gk_proj, has to be cut"),
        ("kimi_linear", "linear_head_dim is the width of its keys and of its values at once"),
        ("retnet", "a rotary embedding whose angles follow from the width of the head"),
        ("rwkv7", "its keys are as wide as hidden_size and head_dim only divides them into heads"),
    ],
)
def test_families_that_cannot_be_cut(
    model_type: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = edit_config(make_source("gated_deltanet", tmp_path / "model"), {"model_type": model_type})
    for words in ([str(folder), "--ratio", "0.5"], ["inspect", str(folder)]):
        refused(capsys, words, f"model_type '{model_type}' cannot be cut: ", reason, "use a model of another family")


def test_model_without_linear_layers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layers = {"layer_types": ["full_attention"] * 4}
    folder = save_tiny_tokenizer(save_tiny("q35", tmp_path / "model", overrides=layers))
    refused(capsys, [str(folder), "--ratio", "0.5"], "has no linear-attention layer: nothing to prune.")


def test_quantised_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_source("q35", tmp_path / "model")
    edit_config(folder, {"quantization_config": {"quant_method": "gptq", "bits": 4}})
    refused(capsys, [str(folder), "--ratio", "0.5"], "gptq", "dequantise")


def test_folder_without_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_tiny("q35", tmp_path / "model")
    refused(
        capsys, [str(folder), *FAST, "--ratio", "0.5", "--calibration", str(make_text(tmp_path))], "has no tokenizer"
    )


def test_head_that_stock_loaders_would_draw(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_source("qw", tmp_path / "model")
    edit_config(folder, {"tie_word_embeddings": False})
    words = [str(folder), "--ratio", "0.5", "--calibration", str(make_text(tmp_path)), *FAST]
    refused(capsys, words, "text_config ties the embeddings", "Set tie_word_embeddings to true at the top level")


def test_layout_of_an_older_fla(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tests.tiny_models import read_weights, write_weights

    folder = make_source("delta_net", tmp_path / "model")
    write_weights(folder, {name.replace("attn.o_norm", "attn.norm"): t for name, t in read_weights(folder).items()})
    words = [str(folder), "--ratio", "0.5", "--calibration", str(make_text(tmp_path)), *FAST]
    refused(capsys, words, "missing model.layers.0.attn.o_norm.weight (and 1 more)", "older fla layout")


def test_existing_output(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, output = make_text(tmp_path), tmp_path / "out"
    output.mkdir()
    (output / "precious.txt").write_text("x")
    words = [str(source), "--ratio", "0.5", "--output-dir", str(output), "--calibration", str(text), *FAST]
    refused(capsys, words, "is not empty", "--overwrite")
    refused(capsys, [*words, "--overwrite"], str(output))
    assert (output / "precious.txt").read_text() == "x"


def test_overwrite_replaces_a_result(source: Path, tmp_path: Path) -> None:
    text, output = make_text(tmp_path), tmp_path / "out"
    assert compress(source, output, text, "--target-dim", "4", "--no-verify", "--max-shard-size", "10KB") == 0
    assert compress(source, output, text, "--target-dim", "8", "--no-verify", "--overwrite") == 0
    assert [path.name for path in output.glob("*.safetensors*")] == ["model.safetensors"]
    assert json.loads((output / "config.json").read_text())["head_dim"] == 8


def test_output_that_is_the_source(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_source("q35", tmp_path / "model")
    link = tmp_path / "link"
    link.symlink_to(folder)
    for output in (folder, link, tmp_path / "model" / ".." / "model", folder / "inside"):
        refused(
            capsys, [str(folder), *FAST, "--ratio", "0.5", "--output-dir", str(output), "--overwrite"], "source folder"
        )


@pytest.mark.parametrize("text", ["", "\n\n  \n", "ab"])
def test_empty_or_small_text(text: str, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "small.txt"
    file.write_text(text)
    words = [str(source), "--ratio", "0.5", "--output-dir", str(tmp_path / "out"), "--calibration", str(file), *FAST]
    refused(capsys, words, "small.txt")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["small.txt"]


def test_too_little_space(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny = tmp_path / "disk"
    tiny.mkdir()
    if os.system(f"mount -t tmpfs -o size=16k tmpfs {tiny} 2>/dev/null") != 0:
        pytest.skip("mounting a small file system is not permitted here")
    try:
        words = [
            str(source),
            "--ratio",
            "0.5",
            "--output-dir",
            str(tiny / "out"),
            "--calibration",
            str(make_text(tmp_path)),
        ]
        refused(capsys, [*words, *FAST], "needs", "free")
        assert list(tiny.iterdir()) == []
    finally:
        os.system(f"umount {tiny}")


def test_missing_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refused(capsys, [str(tmp_path / "absent"), "--ratio", "0.5"], "absent")
    refused(capsys, ["no-such-org/no-such-model", "--ratio", "0.5"], "no-such-org/no-such-model")


def test_dry_run_writes_nothing(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = make_text(tmp_path)
    assert compress(source, tmp_path / "out", text, "--dry-run") == 0
    assert "nothing was written" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["text.txt"]


def test_validate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("selection: {ratio: 0.5, methd: drrqr}\n")
    refused(capsys, ["validate", str(recipe)], "recipe.yaml: selection.methd is not a setting; did you mean method?")
    recipe.write_text("selection: {ratio: 0.5}\n")
    assert main(["validate", str(recipe)]) == 0


def test_inspect(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(source)]) == 0
    output = capsys.readouterr().out
    assert "Gated DeltaNet (fla), 2 linear-attention layers of 2" in output
    assert "4,096 bytes in float32" in output


def test_debug_shows_the_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path), "--ratio", "0.5", "--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "changes", "fragment"),
    [
        ("gated_deltanet", {"head_dim": "16"}, "the stock classes make no model from"),
        ("gated_deltanet", {"head_dim": -16}, "head_k_dim = -16; it must be a whole number of at least 1"),
        ("gated_deltanet", {"num_heads": 0}, "num_k_heads = 0; it must be a whole number of at least 1"),
        ("gated_deltanet", {"num_heads": None}, "the stock classes make no model from"),
        ("gated_deltanet", {"norm_eps": "small"}, "the stock classes make no model from"),
        ("gated_deltanet", {"expand_v": 1.01}, "does not produce an integer value"),
        ("gated_deltanet", {"num_v_heads": 3}, "3 value heads for 2 key heads"),
        ("gated_deltanet", {"num_hidden_layers": 100_000}, "no tensor model.layers.2.attn.q_proj.weight"),
        ("gated_deltanet", {"hidden_size": 64}, "config says hidden size 64"),
        ("delta_net", {"num_heads": 5}, "the stock classes make no model from"),
        ("q35", {"linear_key_head_dim": "16"}, "expected int, got str"),
        ("q35", {"layer_types": ["x"] * 4}, "layer_types"),
        ("q35", {"linear_num_value_heads": 3}, "3 value heads for 2 key heads"),
    ],
)
def test_configs_that_describe_no_model(
    name: str, changes: dict[str, object], fragment: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_source(name, tmp_path / "model")
    edit_config(folder, changes)
    words = [str(folder), "--ratio", "0.5", "--calibration", str(make_text(tmp_path)), *FAST]
    refused(capsys, words, fragment)


@pytest.mark.parametrize(
    ("options", "fragments"),
    [
        (["--output-dir", "/proc/x"], ["/proc"]),
        (["--output-dir", "x" * 300], ["300 bytes of at most 200"]),
        (["--calibration", ""], ['--calibration: "" is empty']),
        ([""], ['MODEL: "" is empty']),
        (["--calibration-samples", "0"], ["--calibration-samples: Input should be greater"]),
        (["--calibration-samples", "1"], ["--calibration-samples 1 leaves none", "or --no-refit."]),
        (["--revision", "v1"], ["--revision v1 belongs to a Hub model"]),
        (["--rat", "0.3"], None),
    ],
)
def test_more_requests(
    options: list[str], fragments: list[str] | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--ratio", "0.5", "--output-dir", str(tmp_path / "out"), *options]
    if fragments is None:
        with pytest.raises(SystemExit, match="2"):
            main(words)
        assert "unrecognized arguments: --rat" in capsys.readouterr().err
    else:
        refused(capsys, words, *fragments)


def test_dry_run_reads_the_text(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"text": "one"}\n{"text": "tw\n')
    words = [str(source), "--ratio", "0.5", "--calibration", str(broken), *FAST, "--dry-run"]
    refused(capsys, words, "broken.jsonl", "line 2")


def test_a_generation_config_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_source("q35", tmp_path / "model")
    (folder / "generation_config.json").write_text("[1]")
    words = [str(folder), "--ratio", "0.5", "--calibration", str(make_text(tmp_path)), *FAST]
    refused(capsys, words, "generation_config.json")
