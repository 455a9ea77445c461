"""Activations of a pass that stops, against those of whole passes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compressor.calibration.tokens import TokenBatch, batches, pad_batch
from compressor.errors import RunError
from compressor.evaluation.language_modelling import next_token_logits
from compressor.recovery.capture import Point, activations_at
from compressor.verification.oracle import relative_error
from tests.families import TinyCheckpoint, tiny_checkpoint, tiny_tokens
from tests.recovery.pairs import count_hooks

LENGTHS = (40, 110, 75)


def whole_pass(tiny: TinyCheckpoint, points: list[Point], sequence: Tensor) -> list[Tensor]:
    """The activations [T, C] at each point in a pass of one sequence through the whole decoder."""
    seen: dict[Point, Tensor] = {}

    def hook(point: Point) -> Any:
        def keep(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            seen[point] = args[0][0] if point.side == "input" else output[0]

        return keep

    handles = [tiny.model.get_submodule(point.path).register_forward_hook(hook(point)) for point in points]
    with torch.inference_mode():
        tiny.architecture.decoder(tiny.model)(input_ids=sequence[None], use_cache=False)
    for handle in handles:
        handle.remove()
    return [seen[point] for point in points]


@pytest.mark.parametrize("padding", ["none", "right", "left"])
@pytest.mark.parametrize("name", ["gated_deltanet_grouped", "gated_deltanet_hybrid", "delta_net", "q35", "qw"])
def test_stopped_passes_see_the_same(name: str, padding: str, tmp_path: Path) -> None:
    tiny = tiny_checkpoint(name, tmp_path)
    sequences = [tiny_tokens(75 if padding == "none" else length, seed=length) for length in LENGTHS]
    batch = next(batches(sequences, 3)) if padding == "none" else pad_batch(sequences, pad_token_id=7)
    if padding == "left" and batch.attention_mask is not None:
        rows = [torch.cat([torch.full((110 - len(s),), 7), s]) for s in sequences]
        batch = TokenBatch(torch.stack(rows), batch.attention_mask.flip(1))
    decoder = tiny.architecture.decoder(tiny.model)
    before = next_token_logits(tiny.model, sequences[0])
    for mixer in tiny.mixers:
        path = tiny.architecture.output_projection(mixer)
        block = Point(mixer.module.rpartition(".")[0], "input")
        for last in (Point(path, "input"), Point(path, "output")):
            found = activations_at(tiny.model, decoder, [block, last], batch)
            expected = zip(*(whole_pass(tiny, [block, last], sequence) for sequence in sequences), strict=True)
            for one, parts in zip(found, expected, strict=True):
                assert relative_error(one, torch.cat(parts)) < 1e-5
    assert count_hooks(tiny.model) == 0
    assert torch.equal(next_token_logits(tiny.model, sequences[0]), before)


def test_a_pass_stops_at_the_module(tmp_path: Path) -> None:
    tiny = tiny_checkpoint("gated_deltanet", tmp_path)
    first, second = (tiny.architecture.output_projection(mixer) for mixer in tiny.mixers)
    ran: list[str] = []
    for path in (first, second):
        tiny.model.get_submodule(path).register_forward_hook(lambda *_, path=path: ran.append(path))
    batch = next(batches([tiny_tokens(70)], 1))
    decoder = tiny.architecture.decoder(tiny.model)
    for point, expected in (
        (Point(first, "input"), []),
        (Point(first, "output"), [first]),
        (Point(second, "input"), [first]),
        (Point(second, "output"), [first, second]),
    ):
        ran.clear()
        activations_at(tiny.model, decoder, [point], batch)
        assert ran == expected


def test_a_module_that_does_not_run_is_an_error(tmp_path: Path) -> None:
    tiny = tiny_checkpoint("gated_deltanet", tmp_path)
    batch = next(batches([tiny_tokens(70)], 1))
    points = [Point(tiny.architecture.output_projection(tiny.mixers[0]), "output"), Point("lm_head", "output")]
    with pytest.raises(RunError, match="^lm_head was not run in a forward pass"):
        activations_at(tiny.model, tiny.architecture.decoder(tiny.model), points, batch)
    assert count_hooks(tiny.model) == 0
