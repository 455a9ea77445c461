"""What is Gated DeltaProduct's own: several keys a token in the files, in the taps and in the caches."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from compressor.architectures.base import RecurrenceTap
from compressor.errors import RequestError
from compressor.preparation import convolution_state_bytes, open_model, open_source
from tests.architectures.test_cut import cut
from tests.families import open_tiny, random_selection, tiny_checkpoint, tiny_tokens
from tests.tiny_models import edit_config, read_weights, save_tiny, write_weights


class Recorder(RecurrenceTap):
    """What reaches the taps of one layer, in order."""

    def __init__(self, layer: int) -> None:
        self._layer = layer
        self.seen: list[tuple[str, Tensor]] = []

    def on_query(self, layer: int, query: Tensor) -> Tensor:
        return self._record("query", layer, query)

    def on_key(self, layer: int, key: Tensor) -> Tensor:
        return self._record("key", layer, key)

    def on_output(self, layer: int, output: Tensor) -> Tensor:
        return self._record("output", layer, output)

    def _record(self, name: str, layer: int, activations: Tensor) -> Tensor:
        if layer == self._layer:
            self.seen.append((name, activations.detach().clone()))
        return activations


def test_a_channel_owns_a_row_for_every_key(tmp_path: Path) -> None:
    tiny = tiny_checkpoint("gated_deltaproduct_three_keys", tmp_path)
    rows = {
        m.tensor.removeprefix(tiny.mixers[1].tensors): m.rows for m in tiny.architecture.channel_maps(tiny.mixers[1])
    }
    assert rows[".k_proj.weight"].shape == rows[".k_conv1d.weight"].shape == (2, 16, 3)
    assert rows[".k_proj.weight"][1, 5].tolist() == rows[".k_conv1d.weight"][1, 5].tolist() == [21, 53, 85]
    assert rows[".q_proj.weight"][1, 5].tolist() == rows[".q_conv1d.weight"][1, 5].tolist() == [21]


@pytest.mark.parametrize("name", ["gated_deltaproduct_tied", "gated_deltaproduct_three_keys"])
def test_shards_are_cut_alike_for_all_keys(name: str, tmp_path: Path) -> None:
    tiny = open_tiny(save_tiny(name, tmp_path / "source", torch.bfloat16, max_shard_size="20KB"))
    assert len(list(tiny.folder.glob("model-*.safetensors"))) > 1
    selection = random_selection(tiny.mixers, 5)
    smaller = cut(tiny, tmp_path / "cut", selection, "keep")
    before, after = read_weights(tiny.folder), read_weights(smaller.folder)
    assert before.keys() == after.keys()
    for tensor_name, tensor in before.items():
        parts = tensor_name.split(".")
        expected = tensor
        if parts[-2] in ("q_proj", "k_proj", "q_conv1d", "k_conv1d"):
            heads = [
                tensor.unflatten(0, (-1, 2, 16))[:, head, kept]
                for head, kept in enumerate(selection.kept[int(parts[2])])
            ]
            expected = torch.stack(heads, dim=1).flatten(0, 2)
        assert torch.equal(after[tensor_name].view(torch.uint8), expected.contiguous().view(torch.uint8)), tensor_name


@pytest.mark.parametrize("name", ["gated_deltaproduct_one_key", "gated_deltaproduct", "gated_deltaproduct_three_keys"])
def test_taps_see_one_key_of_every_token_at_a_time(name: str, tmp_path: Path) -> None:
    """The recurrent form, which has a query for every key, shows what the chunked form shows."""
    tiny = tiny_checkpoint(name, tmp_path)
    number = tiny.mixers[1].keys_per_token
    recorders = []
    for gradients in (True, False):  # with gradients fla takes the chunked form at any length
        recorder = Recorder(1)
        with torch.set_grad_enabled(gradients), tiny.architecture.tapped(tiny.model, tiny.mixers, recorder):
            tiny.model(input_ids=tiny_tokens(40)[None], use_cache=False)
        recorders.append(recorder.seen)
    chunked, recurrent = recorders
    assert [name for name, _ in chunked] == ["query", *["key"] * number, "output"]
    value_width = tiny.mixers[1].head_v_dim
    shapes = [(1, 40, 2, 16)] * (1 + number) + [(1, 40, 2, value_width)]
    assert [tuple(activations.shape) for _, activations in chunked] == shapes
    for (name_of_chunked, expected), (name_of_recurrent, actual) in zip(chunked, recurrent, strict=True):
        assert name_of_chunked == name_of_recurrent
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["gated_deltaproduct_three_keys", "gated_deltaproduct_no_short_conv"])
def test_convolution_states_are_those_of_the_cache(name: str, tmp_path: Path) -> None:
    tiny = tiny_checkpoint(name, tmp_path / "source")
    smaller = cut(tiny, tmp_path / "cut", random_selection(tiny.mixers, 5), "keep")
    expected = convolution_state_bytes(tiny.mixers, tiny.raw_config, 5)
    for one, size in ((tiny, expected.before), (smaller, expected.after)):
        with torch.inference_mode():
            cache = one.model(input_ids=tiny_tokens(70)[None], use_cache=True).past_key_values
        states = [state for layer in cache for state in layer["conv_state"] or ()]
        assert sum(state.numel() * state.element_size() for state in states) == size


def test_value_heads_are_those_of_the_stock_class(tmp_path: Path) -> None:
    """Its layer could have more value heads than key heads; its model does not ask for them."""
    folder = edit_config(save_tiny("gated_deltaproduct", tmp_path), {"num_v_heads": 4})
    source = open_source(open_model(str(folder), None))
    assert {mixer.num_v_heads for mixer in source.mixers} == {2}
    tensors = read_weights(folder)
    name = "model.layers.0.attn.v_proj.weight"
    write_weights(folder, tensors | {name: torch.cat([tensors[name]] * 2)})
    with pytest.raises(RequestError, match=r"model\.layers\.0\.attn\.v_proj\.weight"):
        open_source(open_model(str(folder), None))


def test_keys_that_do_not_belong_to_the_config_are_refused(tmp_path: Path) -> None:
    folder = save_tiny("gated_deltaproduct", tmp_path)
    edit_config(folder, {"num_householder": 3})
    with pytest.raises(RequestError, match=r"model\.layers\.0\.attn\.\w+\.weight"):
        open_source(open_model(str(folder), None))
    edit_config(folder, {"num_householder": 0})
    with pytest.raises(RequestError, match="layer 0 keys_per_token = 0; it must be a whole number of at least 1"):
        open_model(str(folder), None)
