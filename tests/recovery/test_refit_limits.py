"""What the refit refuses, and the weights it gives back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from compressor.errors import RequestError, RunError
from compressor.recovery.refit import refit, refuse_too_few_tokens
from tests.families import tiny_checkpoint, tiny_tokens
from tests.recovery.pairs import (
    answers,
    changed,
    count_hooks,
    fitting_batches,
    held_out_batches,
    held_out_kl,
    ignore,
    one_batch,
    run,
    tiny_pair,
    weights,
)


@pytest.mark.parametrize("name", ["gated_deltanet", "delta_net", "q35", "qw"])
@pytest.mark.parametrize("width", [4, 12])
def test_no_model_comes_back_with_a_higher_divergence(name: str, width: int, tmp_path: Path) -> None:
    """Of random weights, better layers can make a worse model: both answers occur here."""
    tiny = tiny_pair(name, tmp_path, width)
    divergence = held_out_kl(tiny.pair.original)
    before = divergence(tiny.pair.compressed)
    result = run(tiny.pair, divergence)
    after = divergence(tiny.pair.compressed)
    assert result.kl_before == before
    assert result.kept_old == (result.kl_after > before)
    assert after == (before if result.kept_old else result.kl_after)


@pytest.mark.parametrize("after", [0.2, float("nan")])
def test_a_model_that_diverges_more_gets_its_weights_back(after: float, tmp_path: Path) -> None:
    tiny = tiny_pair("gated_deltanet", tmp_path, width=4)
    before = weights(tiny.pair.compressed)
    result = run(tiny.pair, answers(0.1, after))
    assert result.kept_old
    assert result.tensors == {}
    assert (result.kl_before, result.kl_after) == pytest.approx((0.1, after), nan_ok=True)
    assert any(layer.ridge is not None for layer in result.layers)
    assert changed(before, tiny.pair.compressed) == set()


def test_an_equal_divergence_is_no_reason_to_go_back(tmp_path: Path) -> None:
    tiny = tiny_pair("gated_deltanet", tmp_path, width=4)
    before = weights(tiny.pair.compressed)
    result = run(tiny.pair, answers(0.1, 0.1))
    assert not result.kept_old
    assert len(changed(before, tiny.pair.compressed)) == len(result.tensors) > 0


def test_a_divergence_that_cannot_be_measured_leaves_the_old_weights(tmp_path: Path) -> None:
    tiny = tiny_pair("gated_deltanet", tmp_path, width=4)
    before = weights(tiny.pair.compressed)
    measured: list[float] = []

    def divergence(model: PreTrainedModel) -> float:
        if measured:
            raise RunError("3 of 4 tokens have a divergence that is NaN")
        measured.append(0.1)
        return 0.1

    with pytest.raises(RunError, match="^3 of 4 tokens"):
        run(tiny.pair, divergence)
    assert changed(before, tiny.pair.compressed) == set()


@pytest.mark.parametrize("calls", [1, 6, 9, 12])
def test_an_exception_leaves_no_hook_and_no_new_weight(calls: int, tmp_path: Path) -> None:
    tiny = tiny_pair("gated_deltanet", tmp_path, width=4)
    before = weights(tiny.pair.compressed)
    seen: list[int] = []

    def stop(count: int) -> None:
        seen.append(count)
        if len(seen) == calls:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        refit(tiny.pair, fitting_batches(), held_out_batches(), answers(0.1), stop)
    assert changed(before, tiny.pair.compressed) == set()
    assert count_hooks(tiny.pair.original) == count_hooks(tiny.pair.compressed) == 0


def test_too_few_tokens_are_refused(tmp_path: Path) -> None:
    mixers = tiny_checkpoint("gated_deltanet_grouped", tmp_path).mixers
    message = "^the refit has 63 tokens for output projections of 64 inputs .* raise --calibration-samples, or give"
    with pytest.raises(RequestError, match=message):
        refuse_too_few_tokens(63, 10, mixers)
    with pytest.raises(RequestError, match="^the refit has 0 held-out tokens and needs at least 1"):
        refuse_too_few_tokens(64, 0, mixers)
    refuse_too_few_tokens(64, 1, mixers)


def test_refit_itself_refuses_too_few_tokens(tmp_path: Path) -> None:
    tiny = tiny_pair("gated_deltanet", tmp_path, width=4)
    few = [one_batch(tiny_tokens(31))]
    with pytest.raises(RequestError, match="^the refit has 31 tokens for output projections of 32 inputs"):
        refit(tiny.pair, few, held_out_batches(), answers(), ignore)
    with pytest.raises(RequestError, match="^the refit has 0 held-out tokens"):
        refit(tiny.pair, fitting_batches(), [], answers(), ignore)


@pytest.mark.parametrize("broken", ["original", "compressed"])
def test_activations_that_are_not_finite_name_their_layer(broken: str, tmp_path: Path) -> None:
    tiny = tiny_pair("gated_deltanet", tmp_path, width=4)
    before = weights(tiny.pair.compressed)
    model = tiny.pair.original if broken == "original" else tiny.pair.compressed
    module = model.get_submodule(f"{tiny.pair.mixers[1].module}.v_proj")
    module.register_forward_hook(lambda *_: torch.full_like(_[2], float("nan")))
    with pytest.raises(RunError, match="^layer 1: what the output projection reads or gives is NaN or infinite"):
        run(tiny.pair, answers(0.1))
    assert changed(before, tiny.pair.compressed) == set()


def test_a_projection_that_is_not_linear_is_refused(tmp_path: Path) -> None:
    tiny = tiny_pair("gated_deltanet", tmp_path, width=4)
    path = tiny.pair.architecture.output_projection(tiny.pair.mixers[0])
    parent = tiny.pair.compressed.get_submodule(tiny.pair.mixers[0].module)
    setattr(parent, path.rsplit(".", 1)[-1], nn.Sequential(parent.get_submodule(path.rsplit(".", 1)[-1])))
    with pytest.raises(RunError, match="^layer 0: the output projection is a Sequential and not a linear module"):
        run(tiny.pair, answers(0.1))
