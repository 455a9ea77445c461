from __future__ import annotations

import json
import time
import tracemalloc
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fla.models import Mamba2Config as FlaMamba2Config
from fla.models import Mamba2ForCausalLM as FlaMamba2ForCausalLM
from transformers import PreTrainedModel, Qwen3_5ForCausalLM, Qwen3_5TextConfig

from compressor.checkpoint.headers import read_headers
from compressor.checkpoint.validation import compare_with_skeleton, meta_model
from compressor.errors import RequestError
from tests.tiny_models import VARIANTS, read_weights, save_tiny, stock_model_class, write_weights

Tensors = dict[str, torch.Tensor]
# Names that published files have and the stock class has not.
PUBLISHED: defaultdict[str, Callable[[str], bool]] = defaultdict(lambda: lambda key: False)
PUBLISHED |= {name: lambda key: ".experts." in key for name in VARIANTS if name.endswith("_experts")}
PUBLISHED["oh_parts"] = lambda key: "_conv1d." in key or "_layer_norm." in key
FAMILIES = ["gated_deltanet", "gated_deltanet_tied", "delta_net", "delta_net_gate", "q35", "qw", "m2"]
BUILT_WITHOUT_CONVOLUTION = "ignore:ShortConvolution is crucial:UserWarning"
pytestmark = pytest.mark.filterwarnings(BUILT_WITHOUT_CONVOLUTION)


def skeleton(name: str, folder: Path) -> PreTrainedModel:
    model_class = stock_model_class(name)
    return meta_model(model_class.config_class.from_pretrained(folder), model_class)


def compare(name: str, folder: Path) -> dict[str, str]:
    return compare_with_skeleton(read_headers(folder), skeleton(name, folder))


def refusal(name: str, folder: Path) -> str:
    with pytest.raises(RequestError) as caught:
        compare(name, folder)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("name", [name for name in VARIANTS if not name.endswith("hybrid")])
def test_what_stock_saved_fits(tmp_path: Path, name: str) -> None:
    names = compare(name, save_tiny(name, tmp_path))
    assert names.keys() == read_weights(tmp_path).keys()
    if name != "nh":  # its checkpoints call the decoder `backbone`, transformers calls it `model`
        assert {key for key, value in names.items() if key != value} == {key for key in names if PUBLISHED[name](key)}


def drop_last(tensors: Tensors) -> Tensors:
    return dict(list(tensors.items())[:-1])


def drop_embedding(tensors: Tensors) -> Tensors:
    return {key: value for key, value in tensors.items() if "embed" not in key}


def drop_norms(tensors: Tensors) -> Tensors:
    return {key: value for key, value in tensors.items() if not key.endswith("norm.weight")}


def add_decoder_tensor(tensors: Tensors) -> Tensors:
    return tensors | {"model.layers.0.extra.weight": torch.zeros(2)}


def add_mtp(tensors: Tensors) -> Tensors:
    return tensors | {"mtp.layers.0.input_layernorm.weight": torch.zeros(32)}


def add_old_buffers(tensors: Tensors) -> Tensors:
    return tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}


def reshape_first(tensors: Tensors) -> Tensors:
    name = next(name for name, tensor in tensors.items() if tensor.ndim == 2)
    return tensors | {name: tensors[name][:-1]}


def transpose_head(tensors: Tensors) -> Tensors:
    return {key: value.T if key == "lm_head.weight" else value for key, value in tensors.items()}


def without_prefix(tensors: Tensors) -> Tensors:
    return {key.removeprefix("model.").removeprefix("backbone."): value for key, value in tensors.items()}


def add_head(tensors: Tensors) -> Tensors:
    return {"lm_head.weight": torch.zeros(64, 32)} | tensors


EDITS = [
    *(dict, drop_last, drop_embedding, drop_norms, add_decoder_tensor, add_mtp, add_old_buffers),
    *(reshape_first, transpose_head, without_prefix, add_head),
]


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
@pytest.mark.parametrize("name", FAMILIES)
def test_refuses_exactly_what_stock_reports(tmp_path: Path, name: str, edit: Callable[[Tensors], Tensors]) -> None:
    folder = save_tiny(name, tmp_path)
    write_weights(folder, edit(read_weights(folder)))
    _, info = stock_model_class(name).from_pretrained(
        folder, output_loading_info=True, ignore_mismatched_sizes=True, dtype=torch.float32
    )
    reported = {kind: info[f"{kind}_keys"] for kind in ("missing", "unexpected", "mismatched") if info[f"{kind}_keys"]}
    if not reported:
        names = compare(name, folder)
        loaded = set(skeleton(name, folder).state_dict())
        assert set(names.values()) <= loaded
        return
    message = refusal(name, folder)
    if "mismatched" in reported:
        assert "config says" in message
        return
    for kind, keys in reported.items():
        more = f" (and {len(keys) - 1} more)" if len(keys) > 1 else ""
        assert any(f"{kind} {key}{more}" in message for key in keys), (keys, message)
    assert all(kind in reported for kind in ("missing", "unexpected") if f"{kind} " in message.partition(";")[0])


def test_a_text_model_reads_the_wrappers_names(tmp_path: Path) -> None:
    folder = save_tiny("qw", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    model = meta_model(Qwen3_5TextConfig(**config["text_config"]), Qwen3_5ForCausalLM)
    index = read_headers(folder)
    names = compare_with_skeleton(index, model)
    assert names["model.language_model.layers.0.linear_attn.norm.weight"] == "model.layers.0.linear_attn.norm.weight"
    assert not [name for name in names if "visual" in name]
    assert set(names.values()) | {"lm_head.weight"} == set(model.state_dict())


def test_two_names_for_one_parameter(tmp_path: Path) -> None:
    folder = save_tiny("q35", tmp_path)
    tensors = read_weights(folder)
    write_weights(folder, tensors | {"model.language_model.norm.weight": tensors["model.norm.weight"]})
    assert "would both be loaded as model.norm.weight" in refusal("q35", folder)


def test_the_older_layout_of_delta_net(tmp_path: Path) -> None:
    folder = save_tiny("delta_net", tmp_path)
    tensors = {name.replace("attn.o_norm", "attn.norm"): value for name, value in read_weights(folder).items()}
    write_weights(folder, tensors)
    message = refusal("delta_net", folder)
    assert (
        "missing model.layers.0.attn.o_norm.weight (and 1 more), "
        "unexpected model.layers.0.attn.norm.weight (and 1 more): older fla layout; rename norm to o_norm" in message
    )


def test_a_config_that_fell_back_to_default_sizes(tmp_path: Path) -> None:
    folder = save_tiny("m2", tmp_path)
    (folder / "config.json").write_text(
        '{"d_model":32,"n_layer":2,"vocab_size":64,"ssm_cfg":{"layer":"Mamba2"},"rms_norm":true,"model_type":"mamba2"}'
    )
    # After `import fla` the Auto classes find fla's class for this model type, whose defaults these are.
    model = meta_model(FlaMamba2Config.from_pretrained(folder), FlaMamba2ForCausalLM)
    assert model.config.num_hidden_layers == 48
    with pytest.raises(RequestError, match=r"^config says hidden size 2048, backbone\.embeddings\.weight has 32 "):
        compare_with_skeleton(read_headers(folder), model)


def test_shapes_are_named(tmp_path: Path) -> None:
    folder = save_tiny("gated_deltanet", tmp_path)
    tensors = read_weights(folder)
    name = "model.layers.1.attn.k_proj.weight"
    write_weights(folder, tensors | {name: tensors[name][:24]})
    message = refusal("gated_deltanet", folder)
    assert message.startswith(f"config says (32, 32) for {name}, the file has (24, 32); use the config.json")
    write_weights(folder, tensors | {"model.embeddings.weight": torch.zeros(48, 32)})
    message = refusal("gated_deltanet", folder)
    assert "config says (64, 32) for model.embeddings.weight, the file has (48, 32)" in message


def test_a_large_skeleton_is_quick_and_empty() -> None:
    config = Qwen3_5TextConfig(num_hidden_layers=64, hidden_size=5120)
    state = torch.get_rng_state()
    tracemalloc.start()
    start = time.process_time()
    model = meta_model(config, Qwen3_5ForCausalLM)
    seconds = time.process_time() - start
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    tensors = [*model.parameters(), *model.buffers()]
    assert sum(tensor.numel() for tensor in tensors) > 15e9
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert seconds < 10
    assert peak < 50e6
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    "name", ["gated_deltanet", "kda", "q35", "qn", "oh", "qw_experts", "m2_biases", "m2_fla", "nh"]
)
def test_parameters_of_floating_point_are_stored_so(tmp_path: Path, name: str) -> None:
    """Decays, biases and step sizes as much as what is called a weight."""
    tensors = read_weights(save_tiny(name, tmp_path))
    names = [key for key in tensors if not key.endswith(".weight")]
    assert {"A_log", "dt_bias"} <= {key.rpartition(".")[2] for key in names}
    for key in names:
        write_weights(tmp_path, tensors | {key: tensors[key].to(torch.int32)})
        assert f"{key} is stored as I32; dequantise first" in refusal(name, tmp_path)


def test_a_buffer_of_whole_numbers_that_the_model_has_is_taken(tmp_path: Path) -> None:
    tensors = read_weights(save_tiny("q35", tmp_path))
    model = skeleton("q35", tmp_path)
    for dtype in (torch.int64, torch.bool):
        model.register_buffer("seen", torch.zeros(3, dtype=dtype, device="meta"))
        write_weights(tmp_path, tensors | {"seen": torch.zeros(3, dtype=dtype)})
        assert "seen" in compare_with_skeleton(read_headers(tmp_path), model)
    model.register_buffer("seen", torch.zeros(3, device="meta"))
    with pytest.raises(RequestError, match="seen is stored as BOOL"):
        compare_with_skeleton(read_headers(tmp_path), model)
