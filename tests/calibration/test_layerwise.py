"""Calibration layer by layer, with the weights left in the files, against the model in memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from compressor.artifacts import CalibrationProgress, CalibrationStatistics
from compressor.calibration.layer_outputs import LayerOutputs
from compressor.calibration.layerwise import calibrate_layerwise, num_layers
from compressor.calibration.offloaded import layer_stack
from compressor.calibration.run import calibrate
from compressor.calibration.tokens import TokenBatch, pad_batch
from compressor.errors import RunError
from compressor.loading import build_skeleton, load_model
from compressor.offloading import load_offloaded
from compressor.preparation import Source, open_model, open_source
from tests.families import SUPPORTED_VARIANTS, tiny_tokens
from tests.tiny_models import read_weights, save_tiny

CPU = torch.device("cpu")


def two_batches() -> list[TokenBatch]:
    padded = pad_batch([tiny_tokens(70, seed=1), tiny_tokens(31, seed=2)], pad_token_id=0)
    return [TokenBatch(torch.stack([tiny_tokens(90, seed=3), tiny_tokens(90, seed=4)]), None), padded]


def opened(name: str, folder: Path, dtype: torch.dtype = torch.float32) -> Source:
    return open_source(open_model(str(save_tiny(name, folder, dtype, max_shard_size="20KB")), None))


def in_memory(source: Source, dtype: torch.dtype = torch.float32) -> CalibrationStatistics:
    model = load_model(source.architecture, source.folder, source.checkpoint.raw_config, dtype, CPU)
    return calibrate(
        source.architecture,
        model,
        source.mixers,
        two_batches(),
        None,
        lambda progress, tokens: None,
        energy=True,
        input_squares=True,
    )


def layerwise(
    source: Source, folder: Path, dtype: torch.dtype = torch.float32, start: CalibrationProgress | None = None
) -> tuple[CalibrationStatistics, list[CalibrationProgress], int]:
    """The statistics, the progress after every layer, and the tokens that were advanced."""
    seen: list[CalibrationProgress] = []
    advanced: list[int] = []
    statistics = calibrate_layerwise(
        source.architecture,
        load_offloaded(source, dtype, CPU, folder / "weights"),
        source.mixers,
        two_batches(),
        LayerOutputs(folder / "outputs"),
        start,
        seen.append,
        advanced.append,
        energy=True,
        input_squares=True,
    )
    return statistics, seen, sum(advanced)


def assert_same(actual: CalibrationStatistics, expected: CalibrationStatistics) -> None:
    assert (actual.layers, actual.tokens) == (expected.layers, expected.tokens)
    for name in ("gram_q", "gram_k", "energy_q", "energy_k", "input_squares_q", "input_squares_k"):
        torch.testing.assert_close(vars(actual)[name], vars(expected)[name], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", SUPPORTED_VARIANTS)
def test_sums_are_those_of_the_model_in_memory(name: str, tmp_path: Path) -> None:
    source = opened(name, tmp_path / "source")
    assert_same(layerwise(source, tmp_path)[0], in_memory(source))


def test_weights_are_read_in_the_dtype_of_the_run(tmp_path: Path) -> None:
    source = opened("q35", tmp_path / "source", torch.bfloat16)
    for dtype in (torch.bfloat16, torch.float32):
        assert_same(layerwise(source, tmp_path, dtype)[0], in_memory(source, dtype))


def test_one_layer_at_a_time_has_weights(tmp_path: Path) -> None:
    source = opened("qn_experts", tmp_path / "source")
    offloaded = load_offloaded(source, torch.float32, CPU, tmp_path / "weights")
    in_memory_now: list[list[str]] = []

    def look(tokens: int) -> None:
        parameters = offloaded.model.named_parameters()
        in_memory_now.append([name for name, value in parameters if value.device.type != "meta"])

    look(0)
    outputs = LayerOutputs(tmp_path / "outputs")
    calibrate_layerwise(
        source.architecture, offloaded, source.mixers, two_batches(), outputs, None, lambda progress: None, look
    )
    look(0)
    assert in_memory_now[0] == in_memory_now[1] == in_memory_now[-1] == ["model.norm.weight"]
    layers = [{name.split(".")[2] for name in names if ".layers." in name} for names in in_memory_now[2:-1]]
    assert layers == [{str(layer)} for layer in range(num_layers(source.mixers)) for _ in two_batches()]
    assert not any("embed" in name or "lm_head" in name for names in in_memory_now for name in names)


class _StopError(Exception):
    pass


@pytest.mark.parametrize("name", ["q35", "gated_deltanet_hybrid"])
def test_an_interrupted_pass_goes_on_behind_the_last_layer(name: str, tmp_path: Path) -> None:
    source = opened(name, tmp_path / "source")
    whole, _, all_tokens = layerwise(source, tmp_path / "whole")
    saved: list[CalibrationProgress] = []

    def stop(progress: CalibrationProgress) -> None:
        saved.append(progress)
        if progress.batches == 2:
            raise _StopError

    folder = tmp_path / "interrupted"
    with pytest.raises(_StopError):
        calibrate_layerwise(
            source.architecture,
            load_offloaded(source, torch.float32, CPU, folder / "weights"),
            source.mixers,
            two_batches(),
            LayerOutputs(folder / "outputs"),
            None,
            stop,
            lambda tokens: None,
            energy=True,
            input_squares=True,
        )
    first = saved[-1]
    continued, seen, tokens = layerwise(source, folder, start=first)
    assert [progress.batches for progress in seen] == list(range(3, num_layers(source.mixers) + 1))
    assert tokens == all_tokens
    assert torch.equal(continued.gram_k, whole.gram_k)
    assert torch.equal(continued.gram_q, whole.gram_q)
    LayerOutputs(folder / "outputs").clear()
    again, seen, _ = layerwise(source, folder, start=first)  # the activations are gone: from the beginning
    assert seen[0].batches == 1
    assert torch.equal(again.gram_k, whole.gram_k)


def test_progress_without_what_is_asked_for_is_refused(tmp_path: Path) -> None:
    source = opened("q35", tmp_path / "source")
    _, seen, _ = layerwise(source, tmp_path)
    last = seen[-1]
    bare = CalibrationProgress(last.batches, last.grams, last.tokens, last.energies, None)
    with pytest.raises(ValueError, match="no input_squares"):
        layerwise(source, tmp_path, start=bare)


def test_nan_activations_name_the_layer(tmp_path: Path) -> None:
    source = opened("q35", tmp_path / "source")
    tensors = read_weights(source.folder)
    name = next(name for name in tensors if name.startswith("model.layers.2.linear_attn.in_proj_qkv"))
    for file in source.folder.glob("*.safetensors"):
        held = load_file(file)
        if name in held:
            save_file(held | {name: held[name] * float("nan")}, file, metadata={"format": "pt"})
    with pytest.raises(RunError, match="layer 2, head 0: query activations are NaN"):
        layerwise(source, tmp_path)


def test_outputs_come_back_as_they_were(tmp_path: Path) -> None:
    outputs = LayerOutputs(tmp_path / "outputs")
    hidden = torch.randn(2, 3, 4)
    outputs.save_embeddings(0, hidden)
    outputs.save_output(5, 0, (hidden, None, [hidden * 2, hidden * 3]))
    assert torch.equal(outputs.embeddings(0), hidden)
    first, second, third = outputs.output(5, 0, CPU)
    assert torch.equal(first, hidden)
    assert second is None
    assert [torch.equal(each, hidden * factor) for each, factor in zip(third, (2, 3), strict=True)] == [True, True]
    assert outputs.has(5, 1)
    assert not outputs.has(5, 2)
    outputs.remove(5)
    assert not outputs.has(5, 1)
    with pytest.raises(RunError, match=r"layer-00005/000000\.pt cannot be read"):
        outputs.output(5, 0, CPU)


@pytest.mark.parametrize("value", [{"hidden": torch.zeros(1)}, (torch.zeros(1), "text")])
def test_outputs_that_cannot_be_kept_are_refused(value: object, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"layer 3 returns a (dict|str), which cannot be kept between layers"):
        LayerOutputs(tmp_path).save_output(3, 0, value)


def test_a_model_without_a_list_of_layers_is_refused(tmp_path: Path) -> None:
    source = opened("q35", tmp_path / "source")
    strange = [replace(mixer, module="model.norm.0.mixer") for mixer in source.mixers]
    model = build_skeleton(source.architecture, source.folder, source.checkpoint.raw_config)
    assert layer_stack(model, source.mixers) == "model.layers"
    with pytest.raises(RunError, match=r"has no list of decoder layers that holds model\.norm\.0\.mixer"):
        layer_stack(model, strange)
