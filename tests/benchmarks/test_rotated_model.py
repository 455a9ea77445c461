"""Models whose channels are directions: what a rotation must leave, and where its stand-ins must agree with it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.pca import FILTERS
from benchmarks.rotated_model import Directions, RotatedChannels, rotated_weights
from compressor.architectures.base import RecurrenceTap
from compressor.architectures.masking import MaskedChannels
from compressor.errors import RequestError
from compressor.evaluation.language_modelling import next_token_logits
from tests.families import TinyCheckpoint, open_tiny, tiny_tokens
from tests.tiny_models import save_tiny

FAMILIES = (
    "gated_deltanet",
    "gated_deltanet_grouped",
    "gated_deltaproduct",
    "delta_net",
    "q35",
    "qn",
    "oh",
    "m2",
    "m2_fla",
)
KEEP = 6


def opened(name: str, folder: Path, **overrides: object) -> TinyCheckpoint:
    return open_tiny(save_tiny(name, folder, overrides=overrides))


def random_directions(tiny: TinyCheckpoint) -> dict[int, Tensor]:
    """Another rotation for every head."""
    generator = torch.Generator().manual_seed(0)
    shape = (tiny.mixers[0].num_k_heads, tiny.mixers[0].head_k_dim, tiny.mixers[0].head_k_dim)
    drawn = (torch.randn(shape, dtype=torch.float64, generator=generator) for _ in tiny.mixers)
    return {mixer.layer: torch.linalg.qr(matrix).Q for mixer, matrix in zip(tiny.mixers, drawn, strict=True)}


def scale(tiny: TinyCheckpoint, keep: int) -> float:
    return tiny.architecture.output_scale(tiny.mixers[0].head_k_dim, keep)


def exact_logits(tiny: TinyCheckpoint, directions: Directions, keep: int) -> Tensor:
    tap = RotatedChannels(tiny.architecture, directions, keep, scale(tiny, keep))
    with tiny.architecture.tapped(tiny.model, tiny.mixers, tap):
        return next_token_logits(tiny.model, tiny_tokens())


def channel_logits(tiny: TinyCheckpoint, kept: dict[int, Tensor]) -> Tensor:
    keep = next(iter(kept.values())).shape[1]
    tap = MaskedChannels(kept, tiny.mixers[0].head_k_dim, scale(tiny, keep))
    with tiny.architecture.tapped(tiny.model, tiny.mixers, tap):
        return next_token_logits(tiny.model, tiny_tokens())


def weight_logits(tiny: TinyCheckpoint, directions: Directions, keep: int, method: str) -> Tensor:
    kept = {layer: torch.arange(keep).expand(len(rows), -1) for layer, rows in directions.items()}
    with rotated_weights(tiny.architecture, tiny.model, tiny.mixers, directions, FILTERS[method]):
        return channel_logits(tiny, kept)


def error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def give_filters(tiny: TinyCheckpoint, of_head: Tensor) -> None:
    """All channels of a head get the same filter, `of_head` [H_k, taps], in every layer."""
    parameters = dict(tiny.model.named_parameters())
    for mixer in tiny.mixers:
        for channel_map in tiny.architecture.channel_maps(mixer):
            weight = parameters.get(channel_map.tensor)
            if weight is not None and weight.ndim == 3:
                weight.detach()[channel_map.rows[..., 0], 0] = of_head[:, None, :]


def identity_filters(tiny: TinyCheckpoint) -> Tensor:
    filters = torch.zeros(tiny.mixers[0].num_k_heads, tiny.mixers[0].convolution_size)
    filters[:, -1] = 1.0
    return filters


@pytest.mark.parametrize("name", [*FAMILIES, "gated_deltanet_no_short_conv", "delta_net_relu"])
def test_all_directions_reproduce_the_model(name: str, tmp_path: Path) -> None:
    tiny = opened(name, tmp_path)
    plain = next_token_logits(tiny.model, tiny_tokens())
    assert error(exact_logits(tiny, random_directions(tiny), tiny.mixers[0].head_k_dim), plain) < 1e-5
    assert error(exact_logits(tiny, random_directions(tiny), KEEP), plain) > 1e-3


@pytest.mark.parametrize("name", [*FAMILIES, "gated_deltanet_no_short_conv", "delta_net_elu"])
def test_directions_that_are_channels_are_a_cut_to_them(name: str, tmp_path: Path) -> None:
    """So the rows of every tensor that makes a channel are the right ones, in each family."""
    overrides = {"conv_bias": True} if name in ("gated_deltanet", "delta_net") else {}
    tiny = opened(name, tmp_path, **overrides)
    width, heads = tiny.mixers[0].head_k_dim, tiny.mixers[0].num_k_heads
    generator = torch.Generator().manual_seed(1)
    order = {mixer.layer: torch.rand(heads, width, generator=generator).argsort(-1) for mixer in tiny.mixers}
    directions = {layer: torch.eye(width, dtype=torch.float64)[rows] for layer, rows in order.items()}
    cut = channel_logits(tiny, {layer: rows[:, :KEEP] for layer, rows in order.items()})
    assert error(weight_logits(tiny, directions, KEEP, "pca-nearest"), cut) < 1e-5
    assert error(exact_logits(tiny, directions, KEEP), cut) < 1e-5


@pytest.mark.parametrize("method", FILTERS)
def test_without_activation_one_filter_a_head_can_be_rotated_exactly(method: str, tmp_path: Path) -> None:
    tiny = opened("delta_net_identity", tmp_path)
    directions = random_directions(tiny)
    identity = identity_filters(tiny)
    drawn = torch.randn(identity.shape, generator=torch.Generator().manual_seed(3))
    assert error(weight_logits(tiny, directions, KEEP, method), exact_logits(tiny, directions, KEEP)) > 1e-3
    for of_head in (identity, drawn):
        give_filters(tiny, of_head)
        assert error(weight_logits(tiny, directions, KEEP, method), exact_logits(tiny, directions, KEEP)) < 1e-5


def test_an_activation_cannot_be_rotated(tmp_path: Path) -> None:
    tiny = opened("gated_deltanet", tmp_path)
    give_filters(tiny, identity_filters(tiny))
    directions = random_directions(tiny)
    exact = exact_logits(tiny, directions, KEEP)
    assert error(weight_logits(tiny, directions, KEEP, "pca-nearest"), exact) > 1e-3


def test_weights_are_put_back_even_after_a_failure(tmp_path: Path) -> None:
    tiny = opened("q35", tmp_path)
    before = {name: parameter.clone() for name, parameter in tiny.model.named_parameters()}
    changed: list[str] = []

    def fail_when_rotated() -> None:
        rotation = random_directions(tiny)
        with rotated_weights(tiny.architecture, tiny.model, tiny.mixers, rotation, FILTERS["pca-shared"]):
            parameters = tiny.model.named_parameters()
            changed.extend(name for name, parameter in parameters if not parameter.equal(before[name]))
            raise InterruptedError

    with pytest.raises(InterruptedError):
        fail_when_rotated()
    assert len(changed) == 2 * len(tiny.mixers)
    assert all(parameter.equal(before[name]) for name, parameter in tiny.model.named_parameters())


def test_decays_of_channels_are_refused_before_anything_is_changed(tmp_path: Path) -> None:
    tiny = opened("kda", tmp_path)
    before = {name: parameter.clone() for name, parameter in tiny.model.named_parameters()}
    message = r"^key channels of Kimi delta attention \(fla\) decay each by its own factor, .*; name a model with one"
    with pytest.raises(RequestError, match=message):
        exact_logits(tiny, random_directions(tiny), tiny.mixers[0].head_k_dim)
    with pytest.raises(RequestError, match=message):
        weight_logits(tiny, random_directions(tiny), KEEP, "pca-nearest")
    assert all(parameter.equal(before[name]) for name, parameter in tiny.model.named_parameters())


def test_rotated_channels_under_their_decays_are_another_model(tmp_path: Path) -> None:
    """Why they are refused: with every direction kept, a family with one decay a head would be reproduced."""
    tiny = opened("kda", tmp_path)
    rotation = random_directions(tiny)

    class Rotated(RecurrenceTap):
        def on_query(self, layer: int, query: Tensor) -> Tensor:
            return torch.einsum("bthd,hkd->bthk", query, rotation[layer].to(query.dtype))

        on_key = on_query

    with tiny.architecture.tapped(tiny.model, tiny.mixers, Rotated()):
        rotated = next_token_logits(tiny.model, tiny_tokens())
    assert error(rotated, next_token_logits(tiny.model, tiny_tokens())) > 1e-3
