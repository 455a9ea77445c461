"""States cut at boundaries, against cuts by exact SVDs made by hand; the search against planted heads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from compressor.evaluation.forward import TokenFigures
from compressor.probe.experiment import truncate_on_text
from compressor.probe.head_search import search_heads
from compressor.probe.segments import Boundary, read_in_segments
from compressor.probe.states import Probed
from compressor.probe.truncation import Cut, Reading, measure_cut
from tests.families import TinyCheckpoint, open_tiny, tiny_checkpoint, tiny_tokens
from tests.probe.test_measured_states import probed
from tests.tiny_models import save_tiny


def nothing(tokens: int) -> None:
    """Progress that nobody looks at."""


def losses(figures: tuple[TokenFigures, ...] | list[TokenFigures]) -> Tensor:
    return torch.stack([figure.losses.double() for figure in figures])


@pytest.mark.parametrize(
    "name", ["gated_deltanet_grouped", "gated_deltanet_wide_values", "gated_deltaproduct", "delta_net", "q35"]
)
@pytest.mark.parametrize("rank", [1, 3])
def test_a_cut_is_the_nearest_state_of_that_rank(name: str, rank: int, tmp_path: Path) -> None:
    tiny = tiny_checkpoint(name, tmp_path)
    documents, target = [tiny_tokens(256, seed) for seed in range(3)], probed(tiny)
    layer = tiny.mixers[-1].layer

    def by_hand(boundary: Boundary) -> None:
        for mixer in tiny.mixers:
            state = target.layout.read(boundary.cache, mixer)
            left, values, right = torch.linalg.svd(state.double(), full_matrices=False)
            cut = (left[..., :rank] * values[..., None, :rank]) @ right[..., :rank, :]
            if mixer.layer == layer:
                cut[:, 1:] = state[:, 1:].double()
            target.layout.write(boundary.cache, mixer, cut)

    heads = {mixer.layer: tuple(range(mixer.num_v_heads)) for mixer in tiny.mixers} | {layer: (0,)}
    found = measure_cut(target, documents, Cut(rank, heads), Reading(64, 2, 0), nothing)
    expected = read_in_segments(tiny.model, documents, 64, 2, by_hand)
    torch.testing.assert_close(losses(found.figures), losses(expected), rtol=1e-3, atol=1e-3)
    untouched = measure_cut(target, documents, None, Reading(64, 2, 0), nothing)
    assert torch.equal(losses(found.figures)[:, :64], losses(untouched.figures)[:, :64])
    assert float((losses(found.figures) - losses(untouched.figures))[:, 64:].abs().max()) > 1e-2


def test_all_directions_change_nothing(tmp_path: Path) -> None:
    tiny = tiny_checkpoint("gated_deltanet", tmp_path)
    documents = [tiny_tokens(200)]
    whole = measure_cut(probed(tiny), documents, None, Reading(64, 1, 0), nothing)
    full = measure_cut(probed(tiny), documents, Cut(16), Reading(64, 1, 0), nothing)
    assert torch.equal(losses(whole.figures), losses(full.figures))
    assert full.exact == 0


def test_warm_starts_do_not_move_losses(tmp_path: Path) -> None:
    """Wide enough states for the iteration: whatever the batch and the seed, the losses of exact cuts."""
    tiny = open_tiny(save_tiny("gated_deltanet", tmp_path, overrides={"head_dim": 64, "num_hidden_layers": 1}))
    documents, target = [tiny_tokens(320, seed) for seed in range(3)], probed(tiny)
    found = [losses(measure_cut(target, documents, Cut(4), Reading(64, size, seed), nothing).figures) for size, seed in
             ((1, 0), (3, 1))]  # fmt: skip
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-4)


def test_differences_are_paired(tmp_path: Path) -> None:
    tiny = tiny_checkpoint("gated_deltanet", tmp_path)
    documents, target = [tiny_tokens(192, seed) for seed in range(4)], probed(tiny)
    dense = measure_cut(target, documents, None, Reading(64, 2, 0), nothing).figures
    found = truncate_on_text(target, documents, dense, (4, 1), Reading(64, 2, 0), nothing)
    assert [each.rank for each in found] == [None, 4, 1]
    assert found[0].difference is None
    by_hand = losses(measure_cut(target, documents, Cut(1), Reading(64, 2, 0), nothing).figures) - losses(dense)
    difference = found[2].difference
    assert difference is not None
    assert difference.all.mean == pytest.approx(float(by_hand.mean()), rel=1e-6)
    means = by_hand.mean(1)
    assert difference.all.standard_error == pytest.approx(float(means.std() / 2), rel=1e-6)
    first = difference.by_position[0]
    assert (first.start, first.stop, first.loss.mean) == (0, 64, pytest.approx(float(by_hand[:, :63].mean()), abs=1e-9))


def planted(tmp_path: Path, carriers: set[tuple[int, int]]) -> TinyCheckpoint:
    """Three layers of four heads, of which the carriers alone reach the residual stream; sharp predictions."""
    fields = {"num_hidden_layers": 3, "num_heads": 4, "initializer_range": 0.3}
    tiny = open_tiny(save_tiny("gated_deltanet", tmp_path, overrides=fields))
    with torch.no_grad():
        for mixer in tiny.mixers:
            weight = tiny.model.get_submodule(tiny.architecture.output_projection(mixer)).weight
            for head in range(mixer.num_v_heads):
                if (mixer.layer, head) not in carriers:
                    weight[:, head * mixer.head_v_dim : (head + 1) * mixer.head_v_dim] = 0
                else:
                    weight[:, head * mixer.head_v_dim : (head + 1) * mixer.head_v_dim] *= 3
    return tiny


@torch.inference_mode()
def sampled_documents(tiny: TinyCheckpoint, count: int, length: int) -> list[Tensor]:
    """Text of the model itself: any change of its predictions raises the loss, but for noise."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 64, (count, 1), generator=generator)
    cache, column = None, tokens
    while tokens.shape[1] < length:
        output = tiny.model(input_ids=column, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        column = torch.multinomial(output.logits[:, -1].softmax(-1), 1, generator=generator)
        tokens = torch.cat([tokens, column], dim=1)
    return list(tokens)


@pytest.mark.parametrize("carriers", [{(1, 2)}, {(0, 1), (2, 3)}])
def test_planted_heads_are_found(carriers: set[tuple[int, int]], tmp_path: Path) -> None:
    tiny = planted(tmp_path, carriers)
    target: Probed = probed(tiny)
    documents = sampled_documents(tiny, 12, 256)
    passes = 0

    def measure(cut: Cut | None) -> Tensor:
        nonlocal passes
        passes += 1
        return losses(measure_cut(target, documents, cut, Reading(32, 12, 0), nothing).figures).mean(1)

    found = search_heads(target, "own text", measure, 1)
    ranked = [(effect.layer, effect.head) for effect in found.heads]
    assert set(ranked[: len(carriers)]) == carriers
    assert all(effect.rise.mean > 2 * (effect.rise.standard_error or 0) for effect in found.heads[: len(carriers)])
    assert all(abs(effect.rise.mean) < 1e-6 for effect in found.heads[len(carriers) :])
    assert {effect.layer for effect in found.layers if abs(effect.rise.mean) > 1e-6} == {layer for layer, _ in carriers}
    assert passes == 2 + 3 + 4 * len({layer for layer, _ in carriers})
