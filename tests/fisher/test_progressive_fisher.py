"""Whole selections of tiny models: what they promise, and that they are better than chance."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from compressor.calibration.tokenizer import load_tokenizer
from compressor.demo import calibration_text_path
from compressor.errors import RequestError
from compressor.fisher.memory import (
    Sizes,
    estimated_bytes,
    fitting_checkpointing,
    free_bytes,
    sequences_at_once,
    sizes_of,
)
from compressor.fisher.progressive import FisherSelection, alone, progressive_fisher
from compressor.fisher.settings import FisherSettings
from compressor.fisher.statistics import MaskedModel, Sampling, mask_statistics, masked_divergence
from compressor.selection.base import HeadStatistics
from compressor.selection.fisher import kept_indices, mask_model, removed
from tests.families import open_tiny, tiny_checkpoint

FEW = FisherSettings(stages=2, segment=32)
CPU = torch.device("cpu")


def tiny(name: str, folder: Path) -> MaskedModel:
    checkpoint = tiny_checkpoint(name, folder)
    return MaskedModel(checkpoint.architecture, checkpoint.model, checkpoint.mixers)


def batches() -> list[Tensor]:
    return list(torch.randint(0, 64, (4, 70), generator=torch.Generator().manual_seed(5)).split(2))


def select(
    masked: MaskedModel,
    keep: int = 5,
    settings: FisherSettings = FEW,
    epsilon_scaled: bool = True,
    start: Tensor | None = None,
    seen: list[float] | None = None,
) -> FisherSelection:
    progress = [] if seen is None else seen
    generator = torch.Generator().manual_seed(0)
    return progressive_fisher(
        masked.architecture, masked.model, masked.mixers, batches(), keep, settings, generator, progress.append,
        epsilon_scaled=epsilon_scaled, start=start,
    )  # fmt: skip


def masks_of(indices: Tensor, masked: MaskedModel) -> Tensor:
    layers, heads, width = masked.shape
    return torch.zeros(layers * heads, width, dtype=torch.bool).scatter_(1, indices, True).view(masked.shape)


def divergence_of(masked: MaskedModel, indices: Tensor, scale: float = 1.0) -> float:
    return masked_divergence(masked, batches(), masks_of(indices, masked), scale, alone)


def random_masks(masked: MaskedModel, keep: int, seed: int) -> Tensor:
    return torch.rand(masked.shape, generator=torch.Generator().manual_seed(seed)).argsort(-1) < keep


@pytest.mark.parametrize(
    ("name", "scope"),
    [("gated_deltanet", "head"), ("gated_deltanet_grouped", "layer"), ("delta_net", "layer"), ("q35", "head")],
)
def test_selections_diverge_less_than_random_ones(name: str, scope: str, tmp_path: Path) -> None:
    masked = tiny(name, tmp_path)
    layers, heads, _ = masked.shape
    settings = FisherSettings(stages=3, segment=4, scope="layer" if scope == "layer" else "head")
    selection = select(masked, 12, settings)
    assert selection.indices.shape == (layers * heads, 12)
    chance = [divergence_of(masked, kept_indices(random_masks(masked, 12, seed))) for seed in range(4)]
    assert divergence_of(masked, selection.indices) < 0.9 * min(chance)


@pytest.mark.parametrize("epsilon_scaled", [True, False])
def test_each_stage_is_the_greedy_choice_of_its_own_statistics(epsilon_scaled: bool, tmp_path: Path) -> None:
    masked = tiny("gated_deltanet", tmp_path)
    selection = select(masked, keep=4, settings=replace(FEW, shrinkage=0.0), epsilon_scaled=epsilon_scaled)
    generator = torch.Generator().manual_seed(0)
    scale = 1.0 if epsilon_scaled else 2.0  # the root of 16 / 4, at every stage
    kept = torch.ones(masked.shape, dtype=torch.bool)
    for position, width in enumerate((8, 4)):
        sampling = Sampling(32, 0.0, "head", True, removal=FEW.removal)
        statistics = mask_statistics(masked, batches(), kept, scale, sampling, generator, alone, lambda passes: None)
        gradient = 0.5 * statistics.gradient
        after = removed(mask_model(gradient, statistics.fisher, kept.view(gradient.shape)), width)
        stage = selection.stages[position]
        assert stage.width == width
        assert stage.kl == pytest.approx(statistics.kl)
        assert stage.predicted == pytest.approx(float(after.change.sum()))
        kept = after.kept.view(masked.shape)
    assert torch.equal(selection.indices, kept_indices(kept))


def test_scales_are_those_of_the_export_or_of_the_stage() -> None:
    exported, stage = FisherSettings(), FisherSettings(scale_schedule="stage")
    assert exported.scale_width(32, 64) == 32
    assert stage.scale_width(32, 64) == 64


def test_the_same_arguments_give_the_same_choice_and_leave_the_model(tmp_path: Path) -> None:
    masked = tiny("delta_net", tmp_path)
    before = {name: tensor.clone() for name, tensor in masked.model.state_dict().items()}
    state = torch.random.get_rng_state()
    first, second = select(masked), select(masked)
    assert torch.equal(first.indices, second.indices)
    assert first.stages == second.stages
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in masked.model.state_dict().items())
    assert all(parameter.requires_grad for parameter in masked.model.parameters())


def test_the_cost_is_what_progress_was_told(tmp_path: Path) -> None:
    masked = tiny("gated_deltanet", tmp_path)
    seen: list[float] = []
    selection = select(masked, settings=replace(FEW, gradient_checkpointing=True), seen=seen)
    assert selection.passes == pytest.approx(4 + 8)  # the dense point needs one backward pass and no other model
    assert sum(seen) == pytest.approx(selection.passes)
    assert select(masked, settings=replace(FEW, gradient_checkpointing=False)).passes == pytest.approx(3 + 6)
    assert select(masked, settings=replace(FEW, gradient_checkpointing=False), epsilon_scaled=False).passes == 12


def test_stages_take_turns_with_the_batches(tmp_path: Path) -> None:
    masked = tiny("gated_deltanet", tmp_path)
    seen: list[float] = []
    settings = replace(FEW, stages=3, stage_share=0.5, gradient_checkpointing=False)
    selection = select(masked, settings=settings, seen=seen, epsilon_scaled=False)
    assert selection.passes == pytest.approx(3 * 6 / 2)
    assert sum(seen) == pytest.approx(selection.passes)
    scale = math.sqrt(16 / 5)
    dense = torch.ones(masked.shape, dtype=torch.bool)
    first = masked_divergence(masked, batches()[:1], dense, scale, alone)
    other = masked_divergence(masked, batches()[1:], dense, scale, alone)
    assert selection.stages[0].kl == pytest.approx(first)
    assert abs(first - other) > 1e-4

    twice = progressive_fisher(
        masked.architecture, masked.model, masked.mixers, [*batches(), *batches()], 5, settings,
        torch.Generator().manual_seed(0), lambda passes: None, epsilon_scaled=False,
    )  # fmt: skip
    assert twice.stages[0].kl == pytest.approx((first + other) / 2)  # half of four batches is both of the two


def test_measured_exchanges_only_lower_the_divergence(demo_model: Path) -> None:
    checkpoint = open_tiny(demo_model)
    masked = MaskedModel(checkpoint.architecture, checkpoint.model, checkpoint.mixers)
    tokenizer = load_tokenizer(demo_model, trust_remote_code=False)
    ids = tokenizer(calibration_text_path().read_text(encoding="utf-8")[:3000])["input_ids"]
    texts = [torch.tensor(ids[:512]).view(4, 128)]
    start = random_masks(masked, 32, seed=3)
    settings = FisherSettings(segment=32, measured_rounds=2)
    selection = progressive_fisher(
        masked.architecture, masked.model, masked.mixers, texts, 32, settings, torch.Generator().manual_seed(0),
        lambda passes: None, epsilon_scaled=True, start=start.flatten(0, 1),
    )  # fmt: skip

    def measured(kept: Tensor) -> float:
        return masked_divergence(masked, texts, kept, 1.0, alone)

    assert selection.stages == ()
    first = selection.rounds[0]
    assert first.exchanges > 0
    assert first.kl == pytest.approx(measured(start))
    assert first.kl_after < 0.9 * first.kl
    for before, after in pairwise(selection.rounds):
        assert after.kl == pytest.approx(before.kl_after)
    last = selection.rounds[-1]
    assert measured(masks_of(selection.indices, masked)) == pytest.approx(last.kl_after)
    assert int(selection.swaps.sum()) == sum(done.exchanges for done in selection.rounds)


def test_exchanges_within_stages_are_counted(tmp_path: Path) -> None:
    masked = tiny("gated_deltanet", tmp_path)
    selection = select(masked, settings=replace(FEW, swaps=10, stages=3))
    assert int(selection.swaps.sum()) == sum(stage.exchanges for stage in selection.stages) > 0
    assert selection.indices.shape[1] == 5


def test_the_choice_carries_the_diagnostics_of_every_method(tmp_path: Path) -> None:
    masked = tiny("gated_deltanet", tmp_path)
    selection = select(masked)
    samples = torch.randn(4, 50, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    gram, ones = samples.mT @ samples, torch.ones(4, 16, dtype=torch.float64)
    choice = selection.choice(HeadStatistics(gram, gram, ones, ones, 50).gram("qk"))
    assert torch.equal(choice.indices, selection.indices)
    assert choice.diagnostics.numerical_rank.tolist() == [5] * 4
    kept = gram.diagonal(dim1=1, dim2=2).gather(1, choice.indices).sum(1) / gram.diagonal(dim1=1, dim2=2).sum(1)
    torch.testing.assert_close(choice.diagnostics.retained_energy, kept)


def test_impossible_requests_are_refused(tmp_path: Path) -> None:
    masked = tiny("gated_deltanet", tmp_path)
    with pytest.raises(RequestError, match="Cannot keep 17 of 16 key channels"):
        select(masked, keep=17)
    with pytest.raises(RequestError, match="Cannot keep 6 of 5 key channels"):
        select(masked, keep=6, start=random_masks(masked, 5, seed=0))
    with pytest.raises(RequestError, match="was given 0 tokens and needs at least 1"):
        progressive_fisher(
            masked.architecture, masked.model, masked.mixers, [], 5, FEW, torch.Generator(), lambda passes: None,
            epsilon_scaled=True,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"stages": 0}, "stages is 0 and must be at least 1"),
        ({"segment": -1}, "segment is -1 and must be at least 0"),
        ({"shrinkage": 1.5}, r"shrinkage is 1.5 and must lie in \[0, 1\]"),
        ({"sequence_share": -0.1}, r"sequence_share is -0.1 and must lie in \[0, 1\]"),
        ({"stage_share": 0.0}, r"stage_share is 0.0 and must lie in \(0, 1\]"),
        ({"linear_weight": math.inf}, "linear_weight is inf and must be finite"),
        ({"measured_tries": 0}, "measured_tries is 0 and must be at least 1"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings: dict[str, float], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        FisherSettings(**settings)  # type: ignore[arg-type]


SIZES = Sizes(24, 16, 128, 24, 2048, 32000, 8, 2048, 2)


def test_without_memory_the_remedies_are_named() -> None:
    message = (
        r"needs about .* GB beside the model for a batch of 8 x 2048 tokens and cpu has 0\.1 GB free; lower the batch "
        "size or the sequence length, or use the method drrqr, which needs no gradients"
    )
    with pytest.raises(RequestError, match=message):
        fitting_checkpointing(SIZES, FisherSettings(), 10**8, CPU)
    with pytest.raises(RequestError, match="choose the scope head, or turn gradient checkpointing on, or lower"):
        fitting_checkpointing(SIZES, FisherSettings(scope="layer", gradient_checkpointing=False), 2**20, CPU)


def test_batches_go_by_tokens_where_no_gpu_computes() -> None:
    assert [sequences_at_once(100, 60, length, CPU) for length in (16, 64, 2048, 8192)] == [60, 60, 2, 1]
    assert sequences_at_once(8, 60, 8192, torch.device("cuda")) == 8
    assert sequences_at_once(8, 0, 64, CPU) == 1


def test_layers_are_recomputed_where_memory_asks_for_it() -> None:
    kept = estimated_bytes(SIZES, FisherSettings(), False)
    recomputed = estimated_bytes(SIZES, FisherSettings(), True)
    assert recomputed < kept / 5
    assert fitting_checkpointing(SIZES, FisherSettings(), 2 * kept, CPU) is False
    assert fitting_checkpointing(SIZES, FisherSettings(), 2 * kept - 2, CPU) is True
    assert fitting_checkpointing(SIZES, FisherSettings(gradient_checkpointing=False), kept, CPU) is False
    assert fitting_checkpointing(SIZES, FisherSettings(gradient_checkpointing=True), 100 * kept, CPU) is True
    assert fitting_checkpointing(SIZES, FisherSettings(), None, CPU) is True


def test_memory_of_the_fisher_matrices_is_counted() -> None:
    head, layer = (estimated_bytes(SIZES, FisherSettings(scope=scope), True) for scope in ("head", "layer"))
    assert layer - head == 2 * 8 * 24 * (16 * 128) ** 2 * 15 // 16
    longer = estimated_bytes(replace(SIZES, batch=16), FisherSettings(), True)
    assert longer > estimated_bytes(SIZES, FisherSettings(), True)


def test_sizes_are_read_from_the_model(tmp_path: Path) -> None:
    masked = tiny("qw", tmp_path)
    sizes = sizes_of(masked.model, masked.shape, batches()[0])
    assert sizes == Sizes(3, 2, 16, 4, 32, 64, 2, 70, 4)
    free = free_bytes(CPU)
    assert free is None or free > 2**20
