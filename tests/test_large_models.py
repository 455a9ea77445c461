"""Models larger than memory or than one GPU, through the command: --low-memory and --device-map."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import dispatch_model
from accelerate.utils import check_device_map

from compressor.artifacts import CalibrationProgress, CalibrationStatistics, ProgressFile
from compressor.calibration.layer_outputs import LayerOutputs
from compressor.calibration.run import calibrate
from compressor.calibration.tokens import TokenBatch
from compressor.checkpoint.config_file import read_config
from compressor.cli import main
from compressor.errors import RequestError
from compressor.loading import build_skeleton, load_model
from compressor.naming import key_of
from compressor.placing import spread_over_gpus
from tests.families import TinyCheckpoint, open_tiny, tiny_checkpoint, tiny_tokens
from tests.test_interruption import file_size_limit
from tests.test_pipeline import compress, hashes, make_source, make_text

WITHOUT_WHOLE_MODELS = ["--no-refit", "--no-evaluate", "--no-verify"]
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "method"),
    [("q35", "drrqr"), ("qw_experts", "s-wanda"), ("delta_net", "energy"), ("m2", "s-wanda"), ("zamba2", "energy")],
)
def test_a_run_in_low_memory_gives_the_same_folder(name: str, method: str, tmp_path: Path) -> None:
    source, text = make_source(name, tmp_path / "source", torch.bfloat16, shards="20KB"), make_text(tmp_path)
    options = [*WITHOUT_WHOLE_MODELS, "--method", method, "--batch-size", "4"]
    assert compress(source, tmp_path / "memory", text, *options) == 0
    assert compress(source, tmp_path / "disk", text, *options, "--low-memory") == 0
    expected, actual = hashes(tmp_path / "memory"), hashes(tmp_path / "disk")
    differing = {file for file in expected.keys() | actual.keys() if expected.get(file) != actual.get(file)}
    assert differing <= {"recipe.yaml", "compression.json", "README.md"}
    assert not (tmp_path / "disk.resume").exists()
    assert "low_memory: true" in (tmp_path / "disk" / "recipe.yaml").read_text()


def test_an_interrupted_run_in_low_memory_is_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, text = make_source("q35", tmp_path / "source"), make_text(tmp_path)
    assert compress(source, tmp_path / "whole", text, *WITHOUT_WHOLE_MODELS) == 0

    words, save = [*WITHOUT_WHOLE_MODELS, "--low-memory"], ProgressFile.save

    def stop_behind_the_second_layer(file: ProgressFile, progress: CalibrationProgress) -> None:
        save(file, progress)
        if progress.batches == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(ProgressFile, "save", stop_behind_the_second_layer)
        assert compress(source, tmp_path / "out", text, *words) == 130
    assert "give --resume to go on" in capsys.readouterr().err
    assert (tmp_path / "out.resume" / "activations").is_dir()
    assert compress(source, tmp_path / "out", text, *words, "--resume") == 0
    assert "resuming after 2 of 3 layers" in capsys.readouterr().out
    assert hashes(tmp_path / "out")["selection.json"] == hashes(tmp_path / "whole")["selection.json"]


def test_activations_that_have_no_room_are_told_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, text = make_source("q35", tmp_path / "source"), make_text(tmp_path)
    words = [*WITHOUT_WHOLE_MODELS, "--low-memory"]
    capsys.readouterr()
    with file_size_limit(2_000):
        assert compress(source, tmp_path / "out", text, *words) == 1
    assert capsys.readouterr().err == (
        f"compress: error: a file in {tmp_path / 'out.resume'} grew beyond the size limit of the file system or of "
        "`ulimit -f`; raise it or set a smaller --batch-size, and run again with --resume.\n"
    )
    assert not (tmp_path / "out").exists()
    assert compress(source, tmp_path / "out", text, *words, "--resume") == 0
    assert not (tmp_path / "out.resume").exists()


@pytest.mark.parametrize("name", ["q35", "qw_experts"])
def test_a_run_in_low_memory_that_ends_in_its_first_layer_leaves_nothing(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of experts, the loader writes weights in another form beside the activations."""
    source, text = make_source(name, tmp_path / "source"), make_text(tmp_path)
    save, words = LayerOutputs.save_output, [*WITHOUT_WHOLE_MODELS, "--low-memory"]

    def stop_behind_the_first_output(outputs: LayerOutputs, layer: int, batch: int, output: Any) -> None:
        save(outputs, layer, batch, output)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(LayerOutputs, "save_output", stop_behind_the_first_output)
        assert compress(source, tmp_path / "out", text, *words) == 130
    assert "nothing was saved yet that --resume could go on with" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "text.txt"]


def test_lost_activations_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, text = make_source("q35", tmp_path / "source"), make_text(tmp_path)
    save, words = ProgressFile.save, [*WITHOUT_WHOLE_MODELS, "--low-memory"]

    def stop_behind_the_first_layer(file: ProgressFile, progress: CalibrationProgress) -> None:
        save(file, progress)
        raise KeyboardInterrupt

    monkeypatch.setattr(ProgressFile, "save", stop_behind_the_first_layer)
    assert compress(source, tmp_path / "out", text, *words) == 130
    left = tmp_path / "out.resume" / "activations"
    shutil.rmtree(left)
    assert compress(source, tmp_path / "out", text, *words, "--resume") == 130
    shown = capsys.readouterr().out
    assert f"note: {left} lacks what the next layer reads: calibrating again" in " ".join(shown.split())
    assert "resuming after" not in shown


def test_all_that_low_memory_cannot_do_is_said_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(tmp_path / "absent"), "--ratio", "0.5", "--low-memory"]
    assert main([*words, "--no-refit", "--recover", "--norm-epsilon", "auto", "--method", "fisher"]) == 2
    error = capsys.readouterr().err
    assert "these need whole models: evaluation, verification; add --no-evaluate, --no-verify" in error
    assert "training needs whole models; leave --recover out" in error
    assert "--norm-epsilon auto looks at passes through the whole model; use --norm-epsilon keep" in error
    assert "the method fisher needs passes through the whole model; use --method drrqr or energy" in error
    assert "no folder" not in error  # before the model is looked for
    assert main([*words, *WITHOUT_WHOLE_MODELS]) == 2
    assert "there is no folder" in capsys.readouterr().err


def test_low_memory_is_for_one_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    words = [str(tmp_path), "--ratio", "0.5", "--low-memory", *WITHOUT_WHOLE_MODELS, "--dry-run"]
    assert main(words) == 2
    assert "--low-memory is for one process, and 2 were launched" in capsys.readouterr().err


def test_activations_need_room_on_the_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, text = make_source("q35", tmp_path / "source"), make_text(tmp_path)
    many = ["--calibration-samples", "100000000", "--sequence-length", "80", "--dry-run"]
    assert compress(source, tmp_path / "out", text, *WITHOUT_WHOLE_MODELS, "--low-memory", *many) == 2
    # three sets of 100,000,000 x 80 activations of 32 float32
    assert "needs 3.07 TB and its file system has" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="not measured: there is a GPU")
def test_a_device_map_needs_gpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(tmp_path / "absent"), "--ratio", "0.5", "--device-map", "auto"]
    assert main([*words, "--recover", "--method", "gradient"]) == 2
    error = capsys.readouterr().err
    assert "torch sees 0 on this machine; use --low-memory" in error
    assert "add --no-verify, and run compress verify DIR --device cpu afterwards" in error
    assert "--device-map auto cannot train" in error
    assert "the method gradient needs them through the whole model" in error
    assert main([*words, "--device", "cuda:1", "--low-memory", *WITHOUT_WHOLE_MODELS]) == 2
    error = capsys.readouterr().err
    assert "--device cuda:1 is one; leave --device out" in error
    assert "--device-map spreads them; leave one out" in error
    assert main([*words[:-1], "everywhere"]) == 2
    assert "--device-map: Input should be 'auto'" in capsys.readouterr().err


def statistics(tiny: TinyCheckpoint, model: torch.nn.Module) -> CalibrationStatistics:
    tokens = [TokenBatch(torch.stack([tiny_tokens(90, seed=seed), tiny_tokens(90, seed=9)]), None) for seed in (1, 2)]
    return calibrate(
        tiny.architecture,
        model,  # type: ignore[arg-type]
        tiny.mixers,
        tokens,
        None,
        lambda progress, count: None,
        energy=True,
        input_squares=True,
    )


@pytest.mark.parametrize("name", ["q35", "qw", "gated_deltanet_grouped", "delta_net"])
def test_sums_of_a_dispatched_model_are_the_same(name: str, tmp_path: Path) -> None:
    """With the hooks that accelerate puts on each part, of which a machine without a GPU has all on the CPU."""
    tiny = tiny_checkpoint(name, tmp_path)
    raw = read_config(tmp_path / "config.json")
    parts = {path: "cpu" for path, module in tiny.model.named_modules() if path and not list(module.children())}
    parts = {path: device for path, device in parts.items() if ".layers." not in path}
    stack = tiny.mixers[0].module.rpartition(".")[0].rpartition(".")[0]
    parts |= {f"{stack}.{number}": "cpu" for number, _ in enumerate(tiny.model.get_submodule(stack).children())}
    loaded = load_model(tiny.architecture, tmp_path, raw, torch.float32, CPU, {"": "cpu"})
    dispatched = dispatch_model(loaded, parts, force_hooks=True)
    expected, actual = statistics(tiny, tiny.model), statistics(tiny, dispatched)
    for field in ("gram_q", "gram_k", "energy_q", "input_squares_k"):
        assert torch.equal(vars(actual)[field], vars(expected)[field])


def skeleton_and_bytes(name: str, folder: Path) -> tuple[torch.nn.Module, int]:
    tiny = tiny_checkpoint(name, folder)
    size = sum(parameter.nbytes for parameter in tiny.model.parameters())
    return build_skeleton(tiny.architecture, folder, dict(tiny.raw_config)), size


@pytest.mark.parametrize("name", ["q35", "gated_deltanet_hybrid", "qn_experts"])
def test_layers_are_spread_whole(name: str, tmp_path: Path) -> None:
    skeleton, size = skeleton_and_bytes(name, tmp_path)
    devices = spread_over_gpus(skeleton, torch.float32, {0: size, 1: size})  # type: ignore[arg-type]
    check_device_map(skeleton, devices)
    assert set(devices.values()) == {0, 1}
    assert all(path.count(".") <= 2 for path in devices)  # model.layers.N and no part of it


def test_a_model_larger_than_all_gpus_is_refused(tmp_path: Path) -> None:
    skeleton, size = skeleton_and_bytes("q35", tmp_path)
    gpus = {0: size // 4, 1: size // 4, "cpu": size}
    with pytest.raises(RequestError, match=r"the free memory of 2 GPUs does not hold the model .* use --low-memory"):
        spread_over_gpus(skeleton, torch.float32, gpus)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=r"^runtime.device_map: auto: .* or use calibration.low_memory: true\.$"):
        spread_over_gpus(skeleton, torch.float32, gpus, key_of)  # type: ignore[arg-type]


@pytest.mark.gpu
def test_low_memory_on_a_gpu(tmp_path: Path) -> None:
    words = ["--ratio", "0.5", "--calibration", "demo", "--device", "cuda", *WITHOUT_WHOLE_MODELS]
    assert main([*words, "--output-dir", str(tmp_path / "memory")]) == 0
    assert main([*words, "--output-dir", str(tmp_path / "disk"), "--low-memory"]) == 0
    kept = [json.loads((tmp_path / name / "selection.json").read_text()) for name in ("memory", "disk")]
    assert kept[0] == kept[1]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="not measured: fewer than two GPUs")
def test_a_model_spread_over_two_gpus(tmp_path: Path) -> None:
    words = ["--ratio", "0.5", "--calibration", "demo", "--no-verify"]
    assert main([*words, "--output-dir", str(tmp_path / "one"), "--device", "cuda:0"]) == 0
    assert main([*words, "--output-dir", str(tmp_path / "spread"), "--device-map", "auto"]) == 0
    kept = [json.loads((tmp_path / name / "selection.json").read_text()) for name in ("one", "spread")]
    assert kept[0] == kept[1]
    figures = [
        json.loads((tmp_path / name / "compression.json").read_text())["evaluation"] for name in ("one", "spread")
    ]
    assert figures[1]["after"]["kl_text"] == pytest.approx(figures[0]["after"]["kl_text"], rel=0.05)
    assert open_tiny(tmp_path / "spread").mixers[0].head_k_dim == open_tiny(tmp_path / "one").mixers[0].head_k_dim
