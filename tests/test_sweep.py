"""One calibration for many cuts: saved statistics, `compress sweep`, and widths from a budget of bytes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from compressor.cli import main
from compressor.errors import RequestError
from compressor.sweep_recipes import sweep_recipes
from compressor.width import width_within
from tests.test_pipeline import FAST, compress, make_source, make_text
from tests.test_refusals import refused
from tests.tiny_models import read_weights, save_tiny, save_tiny_tokenizer, write_weights

QUICK = ["--no-verify", "--no-evaluate", "--no-refit"]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_source("gated_deltanet", tmp_path_factory.mktemp("source") / "model")


@pytest.fixture(scope="module")
def saved(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Statistics of the tiny model, beside the text that they are of and the cut of the run that saved them."""
    folder = tmp_path_factory.mktemp("saved")
    file = folder / "statistics.safetensors"
    assert compress(source, folder / "cut", make_text(folder), *QUICK, "--save-statistics", str(file)) == 0
    return file


def sweep(source: Path, output: Path, text: Path, *options: str) -> list[str]:
    return ["sweep", str(source), "--output-dir", str(output), "--calibration", str(text), *FAST, *options]


def read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def test_statistics_give_the_same_cuts_without_calibration(source: Path, saved: Path, tmp_path: Path) -> None:
    text = saved.parent / "text.txt"
    for method in ("drrqr", "energy"):
        words = [*QUICK, "--method", method]
        assert compress(source, tmp_path / method, text, *words) == 0
        assert compress(source, tmp_path / f"{method}-saved", text, *words, "--statistics", str(saved)) == 0
        report = read(tmp_path / f"{method}-saved" / "compression.json")
        assert "calibrating" not in report["timings_s"]
        for name in ("selection.json", "model.safetensors"):
            files = [(tmp_path / folder / name).read_bytes() for folder in (method, f"{method}-saved")]
            assert files[0] == files[1]


def refuse_statistics(
    capsys: pytest.CaptureFixture[str], model: Path, saved: Path, options: Sequence[str], *fragments: str
) -> None:
    text, output = saved.parent / "text.txt", model.parent / "out"
    words = [str(model), "--output-dir", str(output), "--calibration", str(text), *FAST, *QUICK, "--ratio", "0.5"]
    refused(capsys, [*words, "--statistics", str(saved), *options], *fragments)
    assert not output.exists()


def test_statistics_of_another_width_or_model_are_refused(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wide = save_tiny_tokenizer(save_tiny("gated_deltanet", tmp_path / "wide", overrides={"head_dim": 32}))
    refuse_statistics(capsys, wide, saved, [], "is of heads with 16 key channels and", "wide has 32", "leave --statis")
    other = make_source("gated_deltanet", tmp_path / "other")
    write_weights(other, {name: tensor * 1.01 for name, tensor in read_weights(other).items()})
    refuse_statistics(capsys, other, saved, [], "is of another model than", "the hash of weights and config differs")


def test_statistics_of_other_tokens_dtype_or_method_are_refused(
    source: Path, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    same = tmp_path / "same"
    same.symlink_to(source)
    refuse_statistics(capsys, same, saved, ["--seed", "3"], "is of other calibration tokens", "the seed it was made")
    refuse_statistics(capsys, same, saved, ["--dtype", "bfloat16"], "measured in float32", "give --dtype float32")
    refuse_statistics(capsys, same, saved, ["--method", "gradient"], "holds no gradient of the channels")
    refuse_statistics(capsys, same, saved, ["--dtype", "bfloat16", "--dry-run"], "measured in float32")
    both = ["--save-statistics", str(tmp_path / "x.safetensors")]
    refuse_statistics(capsys, same, saved, both, "would save what --statistics")


@pytest.mark.parametrize(
    ("name", "content", "fragment"),
    [
        ("absent", None, "there is no such file"),
        (".", None, "that is a folder, not a file; give one that --save-statistics wrote."),
        ("text", b"no statistics at all", "cannot be read"),
        ("model.safetensors", None, "is a safetensors file that holds no statistics; give one that --save-stat"),
    ],
)
def test_files_that_hold_no_statistics(
    name: str,
    content: bytes | None,
    fragment: str,
    source: Path,
    saved: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = source / name if name.startswith("model") else tmp_path / name
    if content is not None:
        file.write_bytes(content)
    words = ["--statistics", str(file), "--output-dir", str(tmp_path / "out"), "--ratio", "0.5", *FAST]
    refused(capsys, [str(source), "--calibration", str(saved.parent / "text.txt"), *words], fragment)


@pytest.mark.slow
def test_sweep_makes_every_checkpoint_that_single_runs_make(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, output = make_text(tmp_path), tmp_path / "sweep"
    options = ["--ratios", "0.25,0.5", "--methods", "drrqr,energy", "--no-verify"]
    assert main(sweep(source, output, text, *options)) == 0
    out = capsys.readouterr().out
    assert out.count("calibrating:") == 1
    result = read(output / "sweep.json")
    folders = {"drrqr-12", "drrqr-8", "energy-12", "energy-8"}
    assert {path.name for path in output.iterdir()} == folders | {"sweep.json", "sweep.png"}
    assert [cut["folder"] for cut in result["cuts"]] == ["drrqr-12", "drrqr-8", "energy-12", "energy-8"]
    assert result["nested"]["energy"]
    assert result["original"]["state_bytes_per_sequence"] == 4096
    assert [cut["figures"]["state_bytes_per_sequence"] for cut in result["cuts"]] == [3072, 2048, 3072, 2048]
    for cut in result["cuts"]:
        alone = tmp_path / cut["folder"]
        words = ["--method", cut["method"], "--ratio", str(cut["ratio"]), "--no-verify"]
        assert compress(source, alone, text, *words) == 0
        for name in ("model.safetensors", "config.json", "selection.json"):
            assert (alone / name).read_bytes() == (output / cut["folder"] / name).read_bytes()
        report, swept = (read(folder / "compression.json") for folder in (alone, output / cut["folder"]))
        assert report["evaluation"] == {**swept["evaluation"], "after": report["evaluation"]["after"]}
        assert cut["figures"]["kl_text"] == pytest.approx(report["evaluation"]["after"]["kl_text"])
        assert swept["output_dir"] == str(output / cut["folder"])


def test_sweep_of_the_table_alone(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, output, file = make_text(tmp_path), tmp_path / "sweep", tmp_path / "statistics.safetensors"
    options = ["--ratios", "0.5", "--methods", "energy,fisher", "--table-only", "--no-refit"]
    assert main(sweep(source, output, text, *options, "--save-statistics", str(file))) == 0
    out = capsys.readouterr().out
    assert "energy" in out
    assert "narrower" not in out
    assert {path.name for path in output.iterdir()} == {"sweep.json", "sweep.png"}
    result = read(output / "sweep.json")
    assert [(cut["method"], cut["folder"], cut["passes"] > 0) for cut in result["cuts"]] == [
        ("energy", None, False),
        ("fisher", None, True),
    ]
    assert not result["refit"]
    assert result["nested"] == {}
    assert len({cut["figures"]["kl_text"] for cut in result["cuts"]}) == 2
    assert file.exists()
    assert not (tmp_path / "sweep.resume").exists()


@pytest.mark.parametrize(
    ("options", "fragments"),
    [
        (["--ratios", "0.5,0.51"], ["--ratios 0.5 and 0.51 both keep 8 of 16 key channels"]),
        (["--ratios", "0.5,0.5"], ["--ratios: 0.5 is named twice; leave one out."]),
        (["--ratios", "0.5,0.5000001"], ["--ratios 0.5 and 0.5000001 both keep 8 of 16 key channels"]),
        (["--ratios", "half"], ['--ratios "half" has a word that is no number']),
        (["--ratios", ","], ["--ratios names none"]),
        (["--ratios", ""], ["--ratios names none and at least one is needed"]),
        (["--methods", ""], ["--methods names none and at least one is needed"]),
        (["--ratios", "0"], ["--ratios 0 removes nothing"]),
        (["--ratios", "0.5,1.5"], ["--ratios 1.5 is no share that can be removed; give numbers above 0 and below 1"]),
        (["--ratios", "1"], ["--ratios 1 is no share"]),
        (["--ratios", "1.0000001"], ["--ratios 1.0000001 is no share"]),
        (["--ratios", "inf"], ["--ratios inf is no share"]),
        (["--ratios", "x" * 5000], ["xxx ... xxx", "has a word that is no number"]),
        (["--methods", "x" * 5000], ["xxx ... xxx", "is no method; known here"]),
        (["--ratios", "-0.5"], ["--ratios -0.5 is no share"]),
        (["--ratios", "nan"], ["--ratios nan is no share"]),
        (["--ratios", "0.99"], ["--ratios 0.99 leaves 0.16 of 16 key channels, which --round-to 1 rounds to 0"]),
        (["--methods", "auto"], ["name those instead: drrqr,energy,fisher, on Mamba-2 also ghost,gradient."]),
        (["--methods", "drrq"], ['--methods "drrq" is no method; did you mean drrqr? Known here: drrqr, l1']),
        (["--methods", "foo"], ["known here: drrqr, l1, energy, s-wanda, gradient, ghost, random, fisher."]),
        (["--methods", "drrqr,energy,drrqr"], ["--methods: drrqr is named twice; leave one out."]),
        (["--seed", "-1"], ["--seed: Input should be greater than or equal to 0"]),
        (
            ["--methods", "fisher", "--scoring", "q"],
            ["request: --scoring: Scoring 'q' means nothing to the method fisher"],
        ),
    ],
)
def test_sweeps_that_are_refused(
    options: list[str], fragments: list[str], source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refused(capsys, sweep(source, tmp_path / "out", make_text(tmp_path), *options), *fragments)
    assert not (tmp_path / "out").exists()


def test_a_sweep_lists_the_methods_that_it_takes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["sweep", "--help"])
    out = capsys.readouterr().out
    assert "fisher" in out
    assert "auto" not in re.search(r"--methods A,B +of (.*?)\(", out, re.DOTALL).group(1)  # type: ignore[union-attr]


def test_a_sweep_needs_whole_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["sweep", "--output-dir", str(tmp_path / "out"), "--low-memory"])
    assert exit_.value.code == 2
    assert "unrecognized arguments: --low-memory" in capsys.readouterr().err
    with pytest.raises(RequestError, match="a sweep measures every cut, which needs whole models; leave it out, or"):
        sweep_recipes({"calibration": {"low_memory": True}}, (0.5,), ("drrqr",), tmp_path)
    spread = {"runtime": {"device_map": "auto"}, "export": {"verify": False}}
    assert len(sweep_recipes(spread, (0.5,), ("drrqr",), tmp_path)) == 1
    with pytest.raises(RequestError, match="^runtime.device_map: auto runs no backward passes, and the method fisher"):
        sweep_recipes(spread, (0.5,), ("drrqr", "fisher"), tmp_path)


def test_a_sweep_saves_no_adapters(tmp_path: Path) -> None:
    for recovery in ({"train": True, "save_adapter": "adapter"}, {"save_adapter": "adapter"}):
        with pytest.raises(RequestError) as refused:
            sweep_recipes({"recovery": recovery}, (0.5, 0.75), ("drrqr",), tmp_path)
        assert str(refused.value) == (
            "recovery.save_adapter: adapter is a folder for one adapter, and a sweep makes several cuts; leave it "
            "out, or make each cut alone with compress --save-adapter."
        )


def test_width_within_is_the_largest_that_fits() -> None:
    """Against a search over all multiples."""
    for d in (16, 20, 64):
        for step in (1, 4, 16):
            for target in range(step * 256, d * 256, 100):
                fitting = [keep for keep in range(step, d, step) if keep * 256 <= target]
                assert width_within(d, 256, target, step) == max(fitting)


def test_budgets_that_no_width_meets() -> None:
    with pytest.raises(RequestError, match=r"1,000 bytes .* 16 of 64 key .* --round-to 16 keeps, take 4,096; ask for"):
        width_within(64, 256, 1000, 16)
    with pytest.raises(RequestError, match="16,384 now: nothing would be removed; ask for less"):
        width_within(64, 256, 64 * 256, 16)


def test_a_budget_of_state_bytes_through_the_command(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, output = make_text(tmp_path), tmp_path / "out"
    words = [str(source), "--calibration", str(text), *FAST, *QUICK, "--output-dir", str(output)]
    assert main([*words, "--target-state-bytes", "3kB"]) == 0
    report = read(output / "compression.json")
    assert report["key_dim"]["after"] == 11
    assert report["state_bytes_per_sequence"]["after"] == 11 * 256
    recipe = [
        "--recipe",
        str(output / "recipe.yaml"),
        "--output-dir",
        str(tmp_path / "again"),
        "--ratio",
        "0.5",
        "--no-verify",
    ]
    assert main(recipe) == 0
    assert read(tmp_path / "again" / "compression.json")["key_dim"]["after"] == 8
    refused(capsys, [*words, "--target-state-bytes", "100"], "1 of 16 key channels a head", "take 256; ask for at")
    refused(capsys, [*words, "--target-state-bytes", "1GB"], "takes 4,096 now: nothing would be removed")
    refused(capsys, [*words, "--target-state-bytes", "much"], "--target-state-bytes: ", "'much'")
    refused(capsys, [*words, "--target-state-bytes", "3kB", "--ratio", "0.5"], "give exactly one of --ratio")


def test_what_the_words_show_is_refused_before_torch_is_imported(tmp_path: Path) -> None:
    """Half a second instead of several."""
    requests = [["--ratios", "0"], ["--ratios", "0.5,0.5"], ["--methods", "auto"], ["--device", "tpu"], ["--f", "0.5"]]
    calls = [["sweep", "--output-dir", str(tmp_path / "out"), *words] for words in requests]
    code = f"import sys; from compressor.cli import main; print([main(w) for w in {calls!r}], 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[2, 2, 2, 2, 2] False", done.stderr
