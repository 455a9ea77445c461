"""Gram matrices of the activations that reach the recurrence, against ones computed from the weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from compressor.architectures.base import Mixer, RecurrenceTap
from compressor.artifacts import CalibrationProgress, CalibrationStatistics
from compressor.calibration.inputs import InputAccumulator, sum_of_squares
from compressor.calibration.run import calibrate
from compressor.calibration.statistics import GramAccumulator, energy, gram
from compressor.calibration.tokens import TokenBatch, batches, pad_batch
from compressor.errors import RunError
from tests.families import SUPPORTED_VARIANTS, TinyCheckpoint, tiny_checkpoint, tiny_tokens


def collect(tiny: TinyCheckpoint, token_batches: list[TokenBatch]) -> CalibrationStatistics:
    statistics = calibrate(
        tiny.architecture,
        tiny.model,
        tiny.mixers,
        token_batches,
        None,
        lambda progress, tokens: None,
        energy=True,
        input_squares=True,
    )
    assert statistics.tokens == sum(batch.num_tokens for batch in token_batches)
    return statistics


def run(tiny: TinyCheckpoint, token_batches: list[TokenBatch]) -> Tensor:
    statistics = collect(tiny, token_batches)
    return torch.stack([statistics.gram_q, statistics.gram_k])


def sums(statistics: CalibrationStatistics) -> dict[str, Tensor]:
    """All that forward passes give, by name."""
    names = ("gram_q", "gram_k", "energy_q", "energy_k", "input_squares_q", "input_squares_k")
    return {name: getattr(statistics, name) for name in names}


def activations_from_weights(tiny: TinyCheckpoint, hidden: dict[int, Tensor], layer: int) -> tuple[Tensor, Tensor]:
    """Query and key [n, H, d] of one sequence, in float64, from the mixer's input [n, hidden] and its weights."""
    mixer = next(mixer for mixer in tiny.mixers if mixer.layer == layer)
    weights = {name: value.double() for name, value in tiny.model.get_submodule(mixer.module).state_dict().items()}
    width = mixer.num_k_heads * mixer.head_k_dim
    if "in_proj.weight" in weights:
        query, key = mamba2_query_and_key(hidden[layer], weights, width, mixer.num_v_heads)
    elif "conv1d.weight" in weights:
        projected = hidden[layer] @ query_and_key_rows(mixer, weights).T
        convolved = short_convolution(projected, weights["conv1d.weight"][: 2 * width])
        query, key = functional.silu(convolved).split(width, -1)
    else:
        query, key = (hidden[layer] @ weights[f"{letter}_proj.weight"].T for letter in "qk")
        if mixer.convolution_width:
            query, key = (
                short_convolution(x, weights[f"{letter}_conv1d.weight"]) for x, letter in ((query, "q"), (key, "k"))
            )
        activation = {"silu": functional.silu, "relu": functional.relu, "identity": lambda x: x}
        activation["elu"] = lambda x: functional.elu(x) + 1
        name = tiny.raw_config.get("qk_activation", "silu")
        query, key = activation[name](query), activation[name](key)
    keys = key.unflatten(-1, (-1, mixer.num_k_heads, mixer.head_k_dim))  # DeltaProduct has several a token
    return query.unflatten(-1, (mixer.num_k_heads, -1)), keys.flatten(0, 1)


def mamba2_query_and_key(
    hidden: Tensor, weights: dict[str, Tensor], width: int, value_heads: int
) -> tuple[Tensor, Tensor]:
    """C and B: in `in_proj` before the step sizes, in the convolution at the end."""
    zeros = torch.zeros(2 * width + value_heads)
    rows = slice(-2 * width - value_heads, -value_heads)
    projected = hidden @ weights["in_proj.weight"][rows].T + weights.get("in_proj.bias", zeros)[rows]
    convolved = short_convolution(projected, weights["conv1d.weight"][-2 * width :])
    key, query = functional.silu(convolved + weights.get("conv1d.bias", zeros)[-2 * width :]).split(width, -1)
    return query, key


def query_and_key_rows(mixer: Mixer, weights: dict[str, Tensor]) -> Tensor:
    """Of one projection: all query heads, then all key heads, [2 H d, hidden]."""
    width = mixer.num_k_heads * mixer.head_k_dim
    if "in_proj_qkv.weight" in weights:
        return weights["in_proj_qkv.weight"][: 2 * width]
    if "q_proj.weight" in weights:
        return torch.cat([weights["q_proj.weight"], weights["k_proj.weight"]])
    shares = weights["in_proj_qkvz.weight"].chunk(mixer.num_k_heads)  # a key head's query, key, values and gates
    parts = [share.split(mixer.head_k_dim)[:2] for share in shares]
    return torch.cat([query for query, _ in parts] + [key for _, key in parts])


def short_convolution(x: Tensor, weight: Tensor) -> Tensor:
    """Causal, a filter a channel: x [n, C], weight [C, 1, W]."""
    size = weight.shape[-1]
    padded = functional.pad(x, (0, 0, size - 1, 0))
    return sum(padded[shift : shift + len(x)] * weight[:, 0, shift] for shift in range(size))  # type: ignore[return-value]


def mixer_inputs(tiny: TinyCheckpoint, sequence: Tensor) -> dict[int, Tensor]:
    """What each mixer reads, float64 [n, hidden]."""
    seen: dict[int, Tensor] = {}
    handles = []
    for mixer in tiny.mixers:
        module = tiny.model.get_submodule(mixer.module)

        def hook(_: object, args: tuple[Tensor, ...], kwargs: dict[str, Tensor], layer: int = mixer.layer) -> None:
            seen[layer] = (args[0] if args else kwargs["hidden_states"])[0].double()

        handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
    with torch.inference_mode():
        tiny.architecture.decoder(tiny.model)(input_ids=sequence[None], use_cache=False)
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize("length", [40, 150], ids=["recurrent", "chunked"])
@pytest.mark.parametrize("name", SUPPORTED_VARIANTS)
def test_every_layer_is_captured_before_normalisation(name: str, length: int, tmp_path: Path) -> None:
    tiny = tiny_checkpoint(name, tmp_path)
    sequence = tiny_tokens(length)
    statistics = collect(tiny, list(batches([sequence], 1)))
    grams = (statistics.gram_q, statistics.gram_k)
    energies = (statistics.energy_q, statistics.energy_k)
    hidden = mixer_inputs(tiny, sequence)
    assert hidden.keys() == {mixer.layer for mixer in tiny.mixers}
    for position, mixer in enumerate(tiny.mixers):
        for stream, activations in enumerate(activations_from_weights(tiny, hidden, mixer.layer)):
            expected = torch.einsum("nhd,nhe->hde", activations, activations)
            torch.testing.assert_close(grams[stream][position], expected, rtol=1e-4, atol=1e-4 * float(expected.max()))
            unit = activations / activations.norm(dim=-1, keepdim=True)
            torch.testing.assert_close(energies[stream][position], unit.square().sum(0), rtol=1e-4, atol=1e-4)
        for squares in (statistics.input_squares_q, statistics.input_squares_k):
            torch.testing.assert_close(squares[position], hidden[mixer.layer].square().sum(0), rtol=1e-5, atol=0)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(
    "name",
    ["gated_deltanet", "delta_net", "delta_net_sum_norm", "gated_deltanet_hybrid", "gated_deltaproduct", "q35", "qw"],
)
def test_padding_enters_no_statistic(name: str, side: str, tmp_path: Path) -> None:
    tiny = tiny_checkpoint(name, tmp_path)
    sequences = [tiny_tokens(length, seed=length) for length in (90, 35, 70)]
    padded = pad_batch(sequences, pad_token_id=7)
    if side == "left":
        rows = [torch.cat([torch.full((90 - len(s),), 7), s]) for s in sequences]
        assert padded.attention_mask is not None
        padded = TokenBatch(torch.stack(rows), padded.attention_mask.flip(1))
    alone = [batch for sequence in sequences for batch in batches([sequence], 1)]
    torch.testing.assert_close(sums(collect(tiny, [padded])), sums(collect(tiny, alone)), rtol=1e-4, atol=1e-4)


def test_memory_does_not_grow_with_tokens_and_batching_does_not_matter(tmp_path: Path) -> None:
    tiny = tiny_checkpoint("gated_deltanet", tmp_path)
    sequences = [tiny_tokens(64, seed=seed) for seed in range(6)]
    one, three = (run(tiny, list(batches(sequences, size))) for size in (1, 3))
    torch.testing.assert_close(one, three, rtol=1e-6, atol=1e-6)
    assert one.shape == (2, 2, 2, 16, 16)
    assert one.dtype == torch.float64


def test_continued_sums_equal_uninterrupted_ones_to_the_bit(tmp_path: Path) -> None:
    tiny = tiny_checkpoint("delta_net", tmp_path)
    token_batches = list(batches([tiny_tokens(64, seed=seed) for seed in range(4)], 1))
    saved: list[CalibrationProgress] = []

    def keep(progress: CalibrationProgress, tokens: int) -> None:
        saved.append(
            CalibrationProgress(progress.batches, **{name: t.clone() for name, t in progress.tensors().items()})
        )

    every = {"energy": True, "input_squares": True}
    whole = calibrate(tiny.architecture, tiny.model, tiny.mixers, token_batches, None, keep, **every)
    rest = calibrate(
        tiny.architecture, tiny.model, tiny.mixers, token_batches, saved[1], lambda progress, tokens: None, **every
    )
    torch.testing.assert_close(sums(whole), sums(rest), rtol=0, atol=0)
    assert [progress.batches for progress in saved] == [1, 2, 3, 4]


def test_what_is_not_asked_for_is_not_collected(tmp_path: Path) -> None:
    tiny = tiny_checkpoint("delta_net", tmp_path)
    token_batches = list(batches([tiny_tokens(64)], 1))
    saved: list[CalibrationProgress] = []

    def keep(progress: CalibrationProgress, tokens: int) -> None:
        saved.append(progress)

    plain = calibrate(tiny.architecture, tiny.model, tiny.mixers, token_batches, None, keep)
    whole = collect(tiny, token_batches)
    assert saved[0].tensors().keys() == {"grams", "tokens"}
    assert (plain.energy_q, plain.energy_k, plain.input_squares_q, plain.input_squares_k) == (None,) * 4
    assert torch.equal(plain.gram_q, whole.gram_q)
    with pytest.raises(ValueError, match="the sums to continue from have no energies"):
        calibrate(tiny.architecture, tiny.model, tiny.mixers, token_batches, saved[0], keep, energy=True)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["gated_deltanet", "q35"])
def test_activations_that_are_not_finite_name_layer_and_head(name: str, value: float, tmp_path: Path) -> None:
    tiny = tiny_checkpoint(name, tmp_path)
    last = tiny.mixers[-1]
    channel_map = next(m for m in tiny.architecture.channel_maps(last) if m.is_projection and m.stream == "key")
    module, parameter = channel_map.tensor.removeprefix(f"{last.tensors}.").rsplit(".", 1)
    with torch.no_grad():
        weights = tiny.model.get_submodule(f"{last.module}.{module}").get_parameter(parameter)
        weights[int(channel_map.rows[1, 3, 0])] = value
    said = rf"^layer {last.layer}, head 1: key activations are NaN or infinite; look for such weights in this layer"
    with pytest.raises(RunError, match=said):
        run(tiny, list(batches([tiny_tokens()], 1)))


def test_a_layer_that_is_not_captured_is_an_error(tmp_path: Path) -> None:
    tiny = tiny_checkpoint("gated_deltanet", tmp_path)
    accumulator = GramAccumulator(tiny.mixers, torch.device("cpu"))
    accumulator.on_query(0, torch.zeros(1, 5, 2, 16))
    with pytest.raises(RunError, match="layer 1: 0 of 5 query activations were captured"):
        accumulator.end_batch(5)


def test_inputs_that_are_not_captured_are_an_error(tmp_path: Path) -> None:
    tiny = tiny_checkpoint("q35", tmp_path)
    accumulator = InputAccumulator(tiny.architecture, tiny.model, tiny.mixers, torch.device("cpu"))
    accumulator.begin_batch(None)
    with pytest.raises(RunError, match="layer 0: 0 of 5 inputs of the query projection were captured"):
        accumulator.end_batch(5)


def test_energy_by_hand() -> None:
    """Two tokens of one head of two channels, and a silent one: 9/25 + 0 and 16/25 + 1."""
    block = torch.tensor([[[3.0, 4.0], [0.0, 0.1], [0.0, 0.0]]])
    torch.testing.assert_close(energy(block), torch.tensor([[0.36, 1.64]], dtype=torch.float64), rtol=1e-7, atol=0)


def test_energy_of_half_precision_is_summed_in_float64() -> None:
    block = torch.randn(3, 5000, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    wide = block.double()
    expected = (wide.square() / wide.square().sum(-1, keepdim=True)).sum(1)
    assert energy(block).dtype == torch.float64
    torch.testing.assert_close(energy(block), expected, rtol=1e-8, atol=0)


def test_sum_of_squares_is_taken_in_float64() -> None:
    inputs = torch.randn(40_000, 3, generator=torch.Generator().manual_seed(0)).half()
    torch.testing.assert_close(sum_of_squares(inputs), inputs.double().square().sum(0), rtol=1e-9, atol=0)


def test_gram_of_half_precision_is_summed_in_float64() -> None:
    block = torch.randn(3, 300, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = torch.einsum("hnd,hne->hde", block.double(), block.double())
    assert gram(block).dtype == torch.float64
    torch.testing.assert_close(gram(block), expected, rtol=1e-14, atol=0)


def test_a_tap_that_changes_nothing_changes_nothing(tmp_path: Path) -> None:
    tiny = tiny_checkpoint("q35", tmp_path)
    ids = tiny_tokens()[None]
    with torch.inference_mode():
        plain = tiny.model(input_ids=ids, use_cache=False).logits
        with tiny.architecture.tapped(tiny.model, tiny.mixers, RecurrenceTap()):
            tapped = tiny.model(input_ids=ids, use_cache=False).logits
    assert torch.equal(plain, tapped)
