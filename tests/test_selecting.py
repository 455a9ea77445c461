"""From calibration sums and checkpoint files to what selectors read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from compressor.architectures.base import Stream
from compressor.architectures.projections import sum_by_channel
from compressor.artifacts import CalibrationStatistics
from compressor.calibration.run import calibrate
from compressor.calibration.tokens import batches
from compressor.errors import RequestError
from compressor.preparation import Source, open_model, open_source
from compressor.recipe import SelectionSection
from compressor.selecting import projection_scores, select_channels, stacked_heads
from tests.families import TinyCheckpoint, tiny_checkpoint, tiny_tokens

FAMILIES = [
    "gated_deltanet",
    "gated_deltanet_hybrid",
    "gated_deltaproduct_three_keys",
    "kda",
    "delta_net",
    "delta_net_no_short_conv",
    "q35",
    "qw",
    "qn",
]


def projection_outputs(tiny: TinyCheckpoint, sequence: Tensor) -> dict[int, tuple[list[Tensor], list[Tensor]]]:
    """By layer: the two projections' weights [copies, H_k, d_k, inputs], query first, and what each reads [n, inputs],
    seen by hooks on the stock modules. All float64."""
    seen: dict[str, Tensor] = {}
    handles = []
    for path, module in tiny.model.named_modules():
        if path.endswith(("q_proj", "k_proj", "in_proj_qkv", "in_proj_qkvz")):

            def hook(_: object, arguments: tuple[Tensor, ...], name: str = path) -> None:
                seen[name] = arguments[0].flatten(0, -2).double()

            handles.append(module.register_forward_pre_hook(hook))
    with torch.no_grad():
        tiny.model(input_ids=sequence[None], use_cache=False)
    for handle in handles:
        handle.remove()
    found = {}
    for mixer in tiny.mixers:
        width, shape = mixer.num_k_heads * mixer.head_k_dim, (-1, mixer.num_k_heads, mixer.head_k_dim)
        if f"{mixer.module}.in_proj_qkv" in seen:
            path = f"{mixer.module}.in_proj_qkv"
            weight = tiny.model.get_submodule(path).get_parameter("weight").detach().double()
            weights, inputs = [weight[:width], weight[width : 2 * width]], [seen[path]] * 2
        elif f"{mixer.module}.in_proj_qkvz" in seen:
            path = f"{mixer.module}.in_proj_qkvz"
            weight = tiny.model.get_submodule(path).get_parameter("weight").detach().double()
            shares = [share.split(mixer.head_k_dim) for share in weight.chunk(mixer.num_k_heads)]
            weights, inputs = [torch.cat([share[stream] for share in shares]) for stream in (0, 1)], [seen[path]] * 2
        else:
            paths = [f"{mixer.module}.{letter}_proj" for letter in "qk"]
            weights = [tiny.model.get_submodule(path).get_parameter("weight").detach().double() for path in paths]
            inputs = [seen[path] for path in paths]
        found[mixer.layer] = ([weight.unflatten(0, shape) for weight in weights], inputs)
    return found


def open_folder(folder: Path) -> Source:
    return open_source(open_model(str(folder), None))


def collected(tiny: TinyCheckpoint, sequence: Tensor) -> CalibrationStatistics:
    return calibrate(
        tiny.architecture,
        tiny.model,
        tiny.mixers,
        list(batches([sequence], 1)),
        None,
        lambda progress, tokens: None,
        energy=True,
        input_squares=True,
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_weight_statistics_are_those_of_the_stock_modules(name: str, tmp_path: Path) -> None:
    tiny = tiny_checkpoint(name, tmp_path)
    sequence = tiny_tokens(90)
    statistics = collected(tiny, sequence)
    heads = stacked_heads(open_folder(tmp_path), statistics)
    expected: dict[str, list[Tensor]] = {"weight_l1_q": [], "weight_l1_k": [], "wanda_q": [], "wanda_k": []}
    for weights, inputs in projection_outputs(tiny, sequence).values():
        for suffix, weight, read in zip("qk", weights, inputs, strict=True):
            expected[f"weight_l1_{suffix}"].append(weight.abs().sum((0, -1)))
            norms = read.square().sum(0).sqrt()
            expected[f"wanda_{suffix}"].append((weight.abs() * norms).sum((0, -1)))
    for field, by_layer in expected.items():
        torch.testing.assert_close(getattr(heads, field), torch.cat(by_layer), rtol=1e-6, atol=0)
    assert heads.gradient_q is None
    assert heads.gradient_k is None


def test_wanda_by_hand(tmp_path: Path) -> None:
    """A channel's score is |W| times the norms of the inputs: inputs of norm 0 do not count, those of norm 2 twice."""
    tiny = tiny_checkpoint("gated_deltanet", tmp_path)
    source = open_folder(tmp_path)
    squares = torch.zeros(2, 32, dtype=torch.float64)
    squares[:, 3], squares[:, 7] = 4.0, 9.0
    stream: Stream = "key"
    _, wanda = projection_scores(source, stream, squares)
    weight = tiny.model.get_submodule("model.layers.1.attn.k_proj").get_parameter("weight").detach().double()
    assert float(wanda[2, 5]) == pytest.approx(float(2 * weight[5, 3].abs() + 3 * weight[5, 7].abs()), rel=1e-12)


def test_a_channel_sums_all_its_rows() -> None:
    rows = torch.tensor([[[0, 3], [1, 2]]])
    assert sum_by_channel(torch.tensor([1.0, 10.0, 100.0, 1000.0]), rows).tolist() == [[1001.0, 110.0]]


def test_gradient_without_gradients_is_refused(tmp_path: Path) -> None:
    tiny = tiny_checkpoint("delta_net", tmp_path)
    statistics = collected(tiny, tiny_tokens())
    request = SelectionSection(method="gradient", ratio=0.5)
    with pytest.raises(RequestError, match="The statistics hold no gradient of the channels"):
        select_channels(open_folder(tmp_path), statistics, request, 8, 0)
    selection, layers = select_channels(
        open_folder(tmp_path), statistics, SelectionSection(method="energy", ratio=0.5), 8, 0
    )
    assert [layer.layer for layer in layers] == [0, 1]
    assert selection.kept[1].tolist() == [
        sorted((statistics.energy_q[1, head] + statistics.energy_k[1, head]).argsort(descending=True)[:8].tolist())
        for head in range(2)
    ]
