"""Weights times the gradient of the loss, against plain autograd through the whole stock model in float64."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from compressor.calibration.tokens import TokenBatch, batches, pad_batch
from compressor.errors import RunError
from compressor.sensitivity.gradients import LossGradients, gradient_scores, loss_gradients
from tests.families import SUPPORTED_VARIANTS, TinyCheckpoint, in_float64, tiny_checkpoint, tiny_tokens


def scores(tiny: TinyCheckpoint, token_batches: Sequence[TokenBatch]) -> Tensor:
    gradients = loss_gradients(tiny.architecture, tiny.model, tiny.mixers, token_batches, lambda tokens: None)
    return gradient_scores(tiny.architecture, tiny.model, tiny.mixers, gradients)


def plain_scores(tiny: TinyCheckpoint, sequences: Sequence[Tensor]) -> Tensor:
    """From the mean loss of all next tokens; the model is float64 afterwards, with gradients everywhere."""
    dtype = torch.float32 if tiny.raw_config["model_type"] == "mamba2" else torch.float64  # it computes in no other
    if dtype == torch.float64:
        in_float64(tiny.model)
    losses = []
    for sequence in sequences:
        logits = tiny.model(input_ids=sequence[None], use_cache=False).logits[0]
        assert logits.dtype == dtype
        losses.append(functional.cross_entropy(logits[:-1], sequence[1:], reduction="none"))
    torch.cat(losses).mean().backward()
    found = []
    for mixer in tiny.mixers:
        module = tiny.model.get_submodule(mixer.module)
        products = {
            name: (weight * weight.grad).abs().sum(1)
            for name, weight in module.named_parameters()
            if weight.ndim == 2 and weight.grad is not None
        }
        width = mixer.num_k_heads * mixer.head_k_dim
        if "in_proj_qkv.weight" in products:
            query, key = products["in_proj_qkv.weight"][: 2 * width].split(width)
        elif "in_proj.weight" in products:
            key, query = products["in_proj.weight"][-2 * width - mixer.num_v_heads : -mixer.num_v_heads].split(width)
        elif "in_proj_qkvz.weight" in products:
            shares = products["in_proj_qkvz.weight"].chunk(mixer.num_k_heads)
            query = torch.cat([share[: mixer.head_k_dim] for share in shares])
            key = torch.cat([share[mixer.head_k_dim : 2 * mixer.head_k_dim] for share in shares])
        else:
            query, key = products["q_proj.weight"], products["k_proj.weight"].unflatten(0, (-1, width)).sum(0)
        found.append(torch.stack([query, key]).detach().double().unflatten(1, (mixer.num_k_heads, -1)))
    return torch.stack(found, dim=1)


@pytest.mark.parametrize("name", SUPPORTED_VARIANTS)
def test_scores_are_those_of_plain_autograd(name: str, tmp_path: Path) -> None:
    """Sequences of several lengths and batches: 40 tokens go through the recurrent form, 150 through the chunked."""
    tiny = tiny_checkpoint(name, tmp_path)
    sequences = [tiny_tokens(length, seed=seed) for seed, length in enumerate((150, 150, 150, 40, 1))]
    actual = scores(tiny, list(batches(sequences, 2)))
    expected = plain_scores(tiny, sequences[:-1])
    assert actual.dtype == torch.float64
    torch.testing.assert_close(actual, expected, rtol=2e-3, atol=2e-4 * float(expected.max()))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["gated_deltanet", "gated_deltaproduct", "delta_net", "q35"])
def test_padding_is_not_predicted(name: str, side: str, tmp_path: Path) -> None:
    tiny = tiny_checkpoint(name, tmp_path)
    sequences = [tiny_tokens(length, seed=length) for length in (90, 70)]
    padded = pad_batch(sequences, pad_token_id=7)
    if side == "left":
        assert padded.attention_mask is not None
        rows = [torch.cat([torch.full((90 - len(s),), 7), s]) for s in sequences]
        padded = TokenBatch(torch.stack(rows), padded.attention_mask.flip(1))
    expected = scores(tiny, list(batches(sequences, 1)))
    torch.testing.assert_close(scores(tiny, [padded]), expected, rtol=1e-3, atol=1e-4 * float(expected.max()))


def test_gradients_add_up_over_parts_and_every_batch_is_reported(tmp_path: Path) -> None:
    """The absolute value is taken of the whole sum: parts of opposite sign cancel."""
    tiny = tiny_checkpoint("gated_deltanet", tmp_path)
    sequences = [tiny_tokens(64, seed=seed) for seed in range(4)]
    reported: list[int] = []
    first, second = (
        loss_gradients(tiny.architecture, tiny.model, tiny.mixers, list(batches(part, 1)), reported.append)
        for part in (sequences[:1], sequences[1:])
    )
    assert reported == [64] * 4
    assert (first.predicted, second.predicted) == (63, 189)
    both = LossGradients(first.query + second.query, first.key + second.key, 252)
    whole = scores(tiny, list(batches(sequences, 4)))
    parts = gradient_scores(tiny.architecture, tiny.model, tiny.mixers, both)
    torch.testing.assert_close(parts, whole, rtol=1e-4, atol=1e-6 * float(whole.max()))
    apart = [gradient_scores(tiny.architecture, tiny.model, tiny.mixers, part) for part in (first, second)]
    assert bool((0.25 * apart[0] + 0.75 * apart[1] > 1.1 * whole).any())


@pytest.mark.parametrize("name", ["gated_deltanet_hybrid", "q35"])
def test_the_model_is_left_as_it_was(name: str, tmp_path: Path) -> None:
    tiny = tiny_checkpoint(name, tmp_path)
    frozen = next(tiny.model.parameters()).requires_grad_(False)
    before = {path: value.clone() for path, value in tiny.model.state_dict().items()}
    ids = tiny_tokens(80)[None]
    with torch.no_grad():
        logits = tiny.model(input_ids=ids, use_cache=False).logits
    scores(tiny, list(batches([tiny_tokens(80)], 1)))
    torch.testing.assert_close(dict(tiny.model.state_dict()), before, rtol=0, atol=0)
    assert not any(module.training for module in tiny.model.modules())
    assert not frozen.requires_grad
    assert all(p.requires_grad and p.grad is None for p in tiny.model.parameters() if p is not frozen)
    loss = tiny.model(input_ids=ids, use_cache=False).logits.sum()
    assert torch.equal(loss, logits.sum())
    loss.backward()  # the hooks that took gradients away are gone
    assert all(p.grad is not None for path, p in tiny.model.named_parameters() if path.endswith("_proj.weight"))


def test_dropout_stays_off(tmp_path: Path) -> None:
    """Softmax layers of a hybrid drop attention in training mode; scores are the same twice."""
    tiny = tiny_checkpoint("q35", tmp_path)
    for module in tiny.model.modules():
        if type(module).__name__ == "Qwen3_5Attention":
            module.attention_dropout = 0.5  # type: ignore[assignment]
    token_batches = list(batches([tiny_tokens(80)], 1))
    assert torch.equal(scores(tiny, token_batches), scores(tiny, token_batches))


def test_gradients_that_are_not_finite_name_layer_head_and_stream(tmp_path: Path) -> None:
    tiny = tiny_checkpoint("gated_deltanet", tmp_path)
    projection = tiny.model.get_submodule("model.layers.1.attn.k_proj")
    assert isinstance(projection, nn.Linear)
    with torch.no_grad():
        projection.weight[16 + 3] = torch.inf
    with pytest.raises(
        RunError, match=r"^layer \d, head \d: the gradient of the loss by the (query|key) projection is"
    ):
        scores(tiny, list(batches([tiny_tokens()], 1)))
