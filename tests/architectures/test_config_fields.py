"""config.json with values that no model can have: one sentence before a stock class reads them or runs with them."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from compressor.architectures.base import Mixer, RecurrenceTap
from compressor.architectures.config_fields import Interval, Number, Numbers, refuse_fields
from compressor.architectures.registry import architecture_of, known_model_types
from compressor.cli import main
from compressor.errors import CompressorError, RequestError
from compressor.inspection import inspect_model
from compressor.loading import load_model
from compressor.preparation import choose_width, convolution_state_bytes, open_model, open_source
from compressor.recipe import SelectionSection
from tests.tiny_models import edit_config, save_tiny, tiny_config

CPU = torch.device("cpu")
HUGE = 10**12
CHUNKED = {
    "m2": "chunk_size",
    "m2_fla": "chunk_size",
    "bamba": "mamba_chunk_size",
    "granite": "mamba_chunk_size",
    "falcon_h1": "mamba_chunk_size",
    "nh": "chunk_size",
    "zamba2": "chunk_size",
}


def refusal(name: str, changes: Mapping[str, Any], folder: Path) -> str:
    edit_config(save_tiny(name, folder), changes)
    with pytest.raises(RequestError) as caught:
        inspect_model(str(folder))
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("name", "changes", "field"),
    [
        *((name, {"num_hidden_layers": HUGE}, "num_hidden_layers") for name in ("bamba", "m2", "m2_fla", "falcon_h1")),
        *((name, {"num_hidden_layers": 100_001}, "num_hidden_layers") for name in ("kda", "granite", "q35", "oh")),
        ("gated_deltanet", {"num_hidden_layers": 1e12}, "num_hidden_layers"),
        ("qw", {"text_config": {"num_hidden_layers": HUGE}}, "text_config.num_hidden_layers"),
        ("qw_experts", {"vision_config": {"depth": HUGE}}, "vision_config.depth"),
        ("nh", {"layers_block_type": ["mlp"] * 100_001}, "layers_block_type"),
    ],
)
def test_more_layers_than_any_model_has(name: str, changes: dict[str, Any], field: str, tmp_path: Path) -> None:
    start = time.process_time()
    message = refusal(name, changes, tmp_path)
    assert "layers, more than 100000; correct " in message
    assert message.endswith(f"correct {field}.")
    assert time.process_time() - start < 30


@pytest.mark.parametrize("name", CHUNKED)
@pytest.mark.parametrize("value", [0, -1, 65_537, None, "16", 1.5, True])
def test_chunks_are_positive_whole_numbers(name: str, value: Any, tmp_path: Path) -> None:
    message = refusal(name, {CHUNKED[name]: value}, tmp_path)
    assert CHUNKED[name] in message
    if type(value) is int:
        assert (
            f"config.json has {CHUNKED[name]} = {value}; it must be a whole number of at least 1 and at most 65536"
            in (message)
        )


@pytest.mark.parametrize("name", CHUNKED)
@pytest.mark.parametrize("value", [1, 65_536])
def test_chunks_that_are_taken(name: str, value: int) -> None:
    config = tiny_config(name, {CHUNKED[name]: value})
    refuse_fields(config, architecture_of(config.to_dict()).field_rules(config))


@pytest.mark.parametrize(
    ("name", "changes", "fragment"),
    [
        ("qw_experts", {"text_config": {"num_experts_per_tok": 5}}, "text_config.num_experts_per_tok = 5; it must be a "
         "whole number of at least 1 and at most num_experts, which is 4."),
        ("q35_experts", {"num_experts_per_tok": -1}, "num_experts_per_tok = -1; it must be"),
        ("qn_experts", {"num_experts_per_tok": HUGE}, "at most num_experts, which is 4"),
        ("granite", {"num_local_experts": 2, "num_experts_per_tok": 3}, "at most num_local_experts, which is 2"),
        ("nh", {"layers_block_type": ["linear_attention", "moe"], "n_group": 3, "topk_group": 4}, "topk_group = 4"),
        ("nh", {"layers_block_type": ["linear_attention", "moe"], "n_group": 0}, "n_group = 0"),
        ("kda", {"lower_bound": "16"}, "lower_bound = '16'; it must be a number below 0, or left out."),
        ("kda", {"lower_bound": 5.0}, "lower_bound = 5.0; it must be a number below 0, or left out."),
        ("m2_fla", {"dt_limit": 1.5}, "dt_limit = 1.5; it must be two numbers, the least and the largest."),
        ("m2", {"time_step_limit": [1.0, 0.5]}, "time_step_limit = [1.0, 0.5]; it must be two numbers"),
        ("m2", {"time_step_limit": []}, "time_step_limit = []; it must be two numbers"),
        *((name, {"time_step_limit": None}, "it must be two numbers") for name in ("bamba", "granite", "falcon_h1")),
        ("granite", {"logits_scaling": 0}, "logits_scaling = 0; it must be a number over 0."),
        ("granite", {"residual_multiplier": None}, "residual_multiplier = None; it must be a number."),
        *(
            ("falcon_h1", {f"{place}_multiplier": None}, f"{place}_multiplier = None; it must be a number.")
            for place in ("embedding", "lm_head", "key", "attention_in", "attention_out", "ssm_in", "ssm_out")
        ),
        ("falcon_h1", {"ssm_multipliers": [1.0]}, "ssm_multipliers = [1.0]; it must be a list of 5 numbers."),
        ("zamba2", {"num_mem_blocks": 0}, "num_mem_blocks = 0; it must be a whole number of at least 1."),
        ("zamba2", {"num_mem_blocks": -1}, "num_mem_blocks = -1; it must be a whole number of at least 1."),
        ("zamba2", {"hybrid_layer_ids": [0]}, "hybrid_layer_ids = [0]; it must be [1, 3], which follows from"),
        ("gated_deltaproduct_hybrid", {"max_position_embeddings": "16"}, "max_position_embeddings = '16'; it must be"),
    ],
)  # fmt: skip
def test_values_that_the_stock_classes_take_and_cannot_run_with(
    name: str, changes: dict[str, Any], fragment: str, tmp_path: Path
) -> None:
    assert fragment in refusal(name, changes, tmp_path)


@pytest.mark.parametrize(
    ("name", "changes", "fragment"),
    [
        ("zamba2", {"time_step_min": 1e308}, "time_step_min = 1e+308; it must be a number of at most 3.403e+38."),
        ("oh", {"linear_a_log_max": math.nan}, "linear_a_log_max = nan; it must be a number of at most 3.403e+38."),
        (
            "granite",
            {"attention_multiplier": 10**400},
            "attention_multiplier = a number of about 401 digits; it must",
        ),
        ("gated_deltaproduct_hybrid", {"attn": {"window_size": 10**19}}, f"attn.window_size = {10**19}; it must be a"),
        ("kda", {"pad_token_id": True}, "pad_token_id = True; it must be a whole number, or left out."),
    ],
)
def test_numbers_that_no_tensor_holds(name: str, changes: dict[str, Any], fragment: str, tmp_path: Path) -> None:
    assert fragment in refusal(name, changes, tmp_path)


def test_what_training_scripts_leave_in_a_config(tmp_path: Path) -> None:
    """Of a tokenizer without a limit, of steps without one, and an experiment's own settings."""
    changes = {"model_max_length": int(1e30), "time_step_limit": [0.0, math.inf], "run": {"lr": 1e-3, "stop": math.inf}}
    assert inspect_model(str(edit_config(save_tiny("m2", tmp_path), changes))).layers


@pytest.mark.parametrize("value", [{}, [], 16, 1.5, True])
@pytest.mark.parametrize("field", ["dtype", "torch_dtype", "text_config.dtype", "text_config.model_type"])
def test_names_are_strings(field: str, value: Any, tmp_path: Path) -> None:
    parent, _, key = field.rpartition(".")
    path = save_tiny("qw_experts", tmp_path) / "config.json"
    config = json.loads(path.read_text())
    (config[parent] if parent else config)[key] = value
    path.write_text(json.dumps(config))
    message = refusal_of(tmp_path)
    assert message == f"config.json has {field} = {value!r}; it must be a string, or left out."


@pytest.mark.parametrize("value", [[], "x", 3, False])
@pytest.mark.parametrize(
    ("name", "part"), [("qw_experts", "text_config"), ("qw", "vision_config"), ("m2", "text_config")]
)
def test_parts_are_objects(name: str, part: str, value: Any, tmp_path: Path) -> None:
    path = save_tiny(name, tmp_path) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {part: value}))
    assert refusal_of(tmp_path) == f"config.json has {part} = {value!r}; it must be an object, or left out."


@pytest.mark.parametrize("given", [True, False])
def test_a_part_of_defaults(given: bool, tmp_path: Path) -> None:
    """The stock class fills it in; the weights are of another width."""
    path = save_tiny("qw", tmp_path) / "config.json"
    config = json.loads(path.read_text()) | {"text_config": None}
    path.write_text(json.dumps(config if given else {key: config[key] for key in config if key != "text_config"}))
    with pytest.raises(RequestError, match="use weights and config of one model"):
        open_source(open_model(str(tmp_path), None))
    assert choose_width(open_model(str(tmp_path), None), SelectionSection(ratio=0.5)) == 64


def refusal_of(folder: Path) -> str:
    with pytest.raises(RequestError) as caught:
        inspect_model(str(folder))
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("m2", "state_size"),
        ("m2_fla", "state_size"),
        ("bamba", "mamba_d_state"),
        ("nh", "ssm_state_size"),
        ("kda", "head_dim"),
        ("kda", "num_v_heads"),
        ("gated_deltanet", "num_heads"),
        ("gated_deltaproduct", "num_householder"),
        ("delta_net", "expand_k"),
        ("q35", "linear_key_head_dim"),
    ],
)
def test_widths_that_no_memory_holds(name: str, field: str, tmp_path: Path) -> None:
    message = refusal(name, {field: HUGE}, tmp_path)
    assert "channels of all its heads" in message
    assert "more than 1000000; use the config.json that belongs to these weights." in message


@pytest.mark.parametrize(("name", "field"), [("m2", "state_size"), ("kda", "head_dim"), ("q35", "linear_key_head_dim")])
def test_other_widths_are_held_against_the_weights(name: str, field: str, tmp_path: Path) -> None:
    assert "config says (" in refusal(name, {field: 8192}, tmp_path)


def test_the_widest_mixer_that_is_taken() -> None:
    wide = Mixer(0, "m", "t", 1000, 1000, 1000, 1000, 0, 0)
    assert wide.state_elements == 10**9
    for changes in ((1000, 1000, 1001, 1), (1000, 1000, 1, 1001), (1, 1001, 1000, 1)):
        with pytest.raises(RequestError, match="more than 1000000; use"):
            Mixer(0, "m", "t", *changes, 0, 0)
    with pytest.raises(RequestError, match="keys_per_token = 2.*more than 1000000; use"):
        Mixer(0, "m", "t", 1000, 1000, 1000, 1, 0, 0, keys_per_token=2)


def test_the_name_of_a_variant_is_no_model_type(tmp_path: Path) -> None:
    folder = edit_config(save_tiny("m2_fla", tmp_path), {"model_type": "mamba2 (fla)"})
    message = refusal_of(folder)
    assert message.startswith("model_type 'mamba2 (fla)' is not a family that can be cut (known: bamba, ")
    assert message.count("mamba2 (fla)") == 1
    assert message.endswith("did you mean mamba2?")
    assert "mamba2 (fla)" not in known_model_types()


def test_the_command_refuses_before_anything_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = edit_config(save_tiny("bamba", tmp_path / "model"), {"mamba_chunk_size": 0})
    assert main([str(folder), "--ratio", "0.5", "--dry-run", "--output-dir", str(tmp_path / "out")]) == 2
    assert "mamba_chunk_size = 0; it must be a whole number of at least 1" in capsys.readouterr().err


def test_what_rules_take() -> None:
    config = tiny_config("m2")
    for value in ([0.0, math.inf], (0, 0)):
        assert Interval("x").wanted(value, config) is None
    for value in ([math.nan, 1.0], [True, 2.0], [0.0], [0.0, 1.0, 2.0], "01"):
        assert Interval("x").wanted(value, config) == "two numbers, the least and the largest"
    for value in (math.inf, math.nan, True, "1", None):
        assert Number("x").wanted(value, config) == "a number"
    assert Number("x").wanted(-3, config) is None
    assert Numbers("x", 2).wanted([1, 2.5], config) is None


def fields(config: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in config.items():
        yield (*path, key)
        if key in ("text_config", "vision_config", "attn") and isinstance(value, dict):
            yield from fields(value, (*path, key))


def run(folder: Path) -> None:
    """All that reads the config before and in calibration."""
    source = open_source(open_model(str(folder), None))
    architecture, raw_config = source.architecture, source.checkpoint.raw_config
    convolution_state_bytes(source.mixers, raw_config, 7)
    architecture.logit_factor(source.config)
    model = load_model(architecture, folder, raw_config, torch.float32, CPU)
    tokens = torch.arange(2, 14).reshape(2, 6)
    with torch.inference_mode(), architecture.tapped(model, source.mixers, RecurrenceTap()):
        architecture.decoder(model)(input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=False)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors is a no-op:UserWarning")
@pytest.mark.parametrize(
    "name",
    [
        *("bamba", "delta_net_sum_norm", "falcon_h1", "gated_deltanet", "gated_deltaproduct_hybrid", "granite", "kda"),
        *("m2", "m2_fla", "nh", "oh", "qn_experts", "qw_experts", "zamba2"),
    ],
)
def test_every_field_is_refused_or_run_with(name: str, tmp_path: Path) -> None:
    """Whatever stands in a field: a refusal, or calibration runs; never another exception."""
    path = save_tiny(name, tmp_path) / "config.json"
    text = path.read_text()
    run(tmp_path)
    refused = 0
    for *parents, key in fields(json.loads(text)):
        for value in ("16", -1, 0, None, {}, True, HUGE, 1e308):
            config = json.loads(text)
            holder = config
            for parent in parents:
                holder = holder[parent]
            holder[key] = value
            path.write_text(json.dumps(config))
            try:
                run(tmp_path)
            except CompressorError:
                refused += 1
    assert refused > 50
