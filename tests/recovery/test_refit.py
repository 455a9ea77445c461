"""The refit of output projections, against whole forward passes and float64 sums over single tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compressor.architectures.base import Mixer
from compressor.evaluation.language_modelling import next_token_logits
from compressor.recovery.refit import layer_tokens, refit
from compressor.verification.oracle import relative_error
from tests.families import SUPPORTED_VARIANTS, open_tiny, tiny_tokens
from tests.recovery.pairs import (
    TinyPair,
    answers,
    changed,
    fitting_batches,
    held_out_batches,
    ignore,
    one_batch,
    run,
    sequences_of,
    tiny_pair,
    weights,
)
from tests.tiny_models import read_weights, write_weights


def whole_passes(model: nn.Module, decoder: nn.Module, path: str) -> tuple[Tensor, Tensor, Tensor]:
    """What enters the block, what enters and what leaves the projection on the held-out tokens: float64 [N, C]."""
    seen: tuple[list[Tensor], list[Tensor], list[Tensor]] = ([], [], [])

    def before(module: nn.Module, args: tuple[Any, ...]) -> None:
        seen[0].append(args[0][0].double())

    def after(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        seen[1].append(args[0][0].double())
        seen[2].append(output[0].double())

    handles = [
        model.get_submodule(path.rsplit(".", 2)[0]).register_forward_pre_hook(before),
        model.get_submodule(path).register_forward_hook(after),
    ]
    with torch.inference_mode():
        for sequence in sequences_of(held_out_batches()):
            decoder(input_ids=sequence[None], use_cache=False)
    for handle in handles:
        handle.remove()
    return torch.cat(seen[0]), torch.cat(seen[1]), torch.cat(seen[2])


def layer_errors(tiny: TinyPair, mixer: Mixer, old: Tensor, adds_to_residual: bool = True) -> tuple[float, float]:
    """Relative errors of the compressed model as it is, with `old` in one layer's place and with its own weights."""
    path = tiny.pair.architecture.output_projection(mixer)
    models = (tiny.pair.original, tiny.pair.compressed)
    decoders = [tiny.pair.architecture.decoder(model) for model in models]
    residual, _, targets = whole_passes(models[0], decoders[0], path)
    residual_now, inputs, outputs = whole_passes(models[1], decoders[1], path)
    if adds_to_residual:
        targets = targets + residual - residual_now
    bias = models[1].get_submodule(path).bias
    if bias is not None:  # nothing of it is refitted
        targets, outputs = targets - bias.detach().double(), outputs - bias.detach().double()
    missed = targets - inputs @ old.double().mT, targets - outputs
    return float(missed[0].norm() / targets.norm()), float(missed[1].norm() / targets.norm())


@pytest.mark.parametrize("name", SUPPORTED_VARIANTS)
def test_every_changed_layer_errs_less_on_held_out_tokens(name: str, tmp_path: Path) -> None:
    """A later layer does not reach an earlier one, so the finished model has every layer as it was judged."""
    tiny = tiny_pair(name, tmp_path, width=4)
    before = weights(tiny.pair.compressed)
    untouched = weights(tiny.pair.original)
    result = run(tiny.pair, answers(0.1, 0.1))
    assert changed(untouched, tiny.pair.original) == set()
    names = {mixer.layer: f"{tiny.pair.architecture.output_projection(mixer)}.weight" for mixer in tiny.pair.mixers}
    taken = {layer.layer for layer in result.layers if layer.ridge is not None}
    assert [layer.layer for layer in result.layers] == list(names)
    assert taken
    assert changed(before, tiny.pair.compressed) == {names[layer] for layer in taken}
    for layer, mixer in zip(result.layers, tiny.pair.mixers, strict=True):
        old, new = layer_errors(tiny, mixer, before[names[mixer.layer]])
        assert (layer.error_before, layer.error_after) == pytest.approx((old, new), rel=1e-4)
        assert new < old if layer.ridge is not None else new == pytest.approx(old, rel=1e-6)


@pytest.mark.parametrize("name", ["gated_deltanet", "delta_net"])
def test_attention_over_residuals_is_fitted_to_the_mixer_alone(name: str, tmp_path: Path) -> None:
    tiny = tiny_pair(name, tmp_path, width=4, overrides={"attnres_block_size": 2})
    before = weights(tiny.pair.compressed)
    result = run(tiny.pair, answers(0.1, 0.1))
    for layer, mixer in zip(result.layers, tiny.pair.mixers, strict=True):
        old = before[f"{tiny.pair.architecture.output_projection(mixer)}.weight"]
        expected = layer_errors(tiny, mixer, old, adds_to_residual=False)
        assert (layer.error_before, layer.error_after) == pytest.approx(expected, rel=1e-4)
        assert layer.error_after < layer.error_before


@pytest.mark.parametrize("name", SUPPORTED_VARIANTS)
def test_without_a_cut_nothing_changes(name: str, tmp_path: Path) -> None:
    tiny = tiny_pair(name, tmp_path, width=16)
    tokens = tiny_tokens(100)
    before = next_token_logits(tiny.pair.compressed, tokens)
    result = run(tiny.pair, answers(0.0, 0.0))
    assert all(layer.error_before < 1e-5 for layer in result.layers)
    assert relative_error(next_token_logits(tiny.pair.compressed, tokens), before) < 1e-6


@pytest.mark.parametrize("name", ["gated_deltanet_tied", "gated_deltaproduct_tied", "delta_net", "q35", "qw"])
def test_new_tensors_fit_the_files(name: str, tmp_path: Path) -> None:
    """bfloat16 files, float32 in memory: the files reload to the very weights that were judged."""
    tiny = tiny_pair(name, tmp_path, width=4, dtype=torch.bfloat16)
    result = run(tiny.pair, answers(0.1, 0.1))
    files = read_weights(tiny.compressed.folder)
    assert result.tensors
    for tensor_name, tensor in result.tensors.items():
        assert tensor.shape == files[tensor_name].shape
        assert tensor.dtype == files[tensor_name].dtype == torch.bfloat16
        assert tensor.device.type == "cpu"
    write_weights(tiny.compressed.folder, files | dict(result.tensors))
    reloaded = open_tiny(tiny.compressed.folder)
    tokens = tiny_tokens(100)
    assert torch.equal(next_token_logits(reloaded.model, tokens), next_token_logits(tiny.pair.compressed, tokens))


def test_batching_and_padding_do_not_matter(tmp_path: Path) -> None:
    found = []
    for number in range(2):
        tiny = tiny_pair("q35", tmp_path / str(number), width=4)
        fitting = fitting_batches()
        if number:
            fitting = [one_batch(row) for row in sequences_of(fitting)]
        refit(tiny.pair, fitting, held_out_batches(), answers(0.1, 0.1), ignore)
        found.append(next_token_logits(tiny.pair.compressed, tiny_tokens(100)))
    assert relative_error(found[0], found[1]) < 1e-3


def test_a_bias_stays_and_is_not_fitted(tmp_path: Path) -> None:
    tiny = tiny_pair("gated_deltanet", tmp_path, width=16)
    for model in (tiny.pair.original, tiny.pair.compressed):
        for mixer in tiny.pair.mixers:
            module = model.get_submodule(tiny.pair.architecture.output_projection(mixer))
            module.bias = nn.Parameter(torch.full((32,), 3.0))
    before = weights(tiny.pair.compressed)
    result = run(tiny.pair, answers(0.1, 0.1))
    assert all(layer.error_before < 1e-5 for layer in result.layers)
    assert not any(name.endswith("bias") for name in changed(before, tiny.pair.compressed))


def test_models_of_two_dtypes(tmp_path: Path) -> None:
    tiny = tiny_pair("gated_deltanet", tmp_path, width=4)
    tiny.pair.original.to(torch.bfloat16)
    result = run(tiny.pair, answers(0.1, 0.1))
    assert all(layer.error_after < layer.error_before for layer in result.layers)
    assert {tensor.dtype for tensor in result.tensors.values()} == {torch.float32}


@pytest.mark.parametrize("name", ["gated_deltanet_hybrid", "delta_net"])
def test_progress_counts_what_it_said(name: str, tmp_path: Path) -> None:
    tiny = tiny_pair(name, tmp_path, width=4)
    counted: list[int] = []
    refit(tiny.pair, fitting_batches(), held_out_batches(), answers(0.1, 0.1), counted.append)
    tokens = sum(len(row) for row in sequences_of([*fitting_batches(), *held_out_batches()]))
    layers = sum(mixer.layer + 1 for mixer in tiny.pair.mixers)
    assert sum(counted) == layer_tokens(tiny.pair.mixers, tokens) == layers * tokens
