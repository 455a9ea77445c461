from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from compressor.checkpoint.checkpoint import open_checkpoint, open_config
from compressor.checkpoint.source import resolve_model
from compressor.errors import RequestError
from tests.tiny_models import VARIANTS, edit_config, read_weights, save_tiny, write_weights


def refusal(folder: Path) -> str:
    with pytest.raises(RequestError) as caught:
        open_checkpoint(resolve_model(str(folder), None))
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("name", VARIANTS)
def test_every_family_opens(tmp_path: Path, name: str) -> None:
    folder = resolve_model(str(save_tiny(name, tmp_path / name)), None)
    checkpoint = open_checkpoint(folder)
    assert checkpoint.folder == folder
    assert checkpoint.raw_config["model_type"] == checkpoint.model_type
    assert checkpoint.index.entries.keys() == read_weights(folder.path).keys()
    assert checkpoint.notes == ()


def test_the_bundled_model_opens(demo_model: Path) -> None:
    checkpoint = open_checkpoint(resolve_model(str(demo_model), None))
    assert checkpoint.model_type == "gated_deltanet"
    assert checkpoint.notes == ()


def test_notes_of_the_headers_are_passed_on(tmp_path: Path) -> None:
    folder = save_tiny("q35", tmp_path)
    write_weights(folder, {"w": torch.zeros(1)}, "extra.safetensors")
    assert "extra.safetensors is ignored" in open_checkpoint(resolve_model(str(folder), None)).notes[0]


class TestQuantised:
    @pytest.mark.parametrize(
        ("changes", "fact"),
        [
            ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantization_config (gptq)"),
            ({"quantization_config": {"load_in_4bit": True}}, "quantization_config (method not named)"),
            ({"compression_config": {"quant_method": "compressed-tensors"}}, "compression_config (compressed-tensors)"),
            ({"quantization": {"group_size": 64, "bits": 4}}, "quantization (method not named)"),
            ({"text_config": {"quantization_config": {"quant_method": "fp8"}}}, "quantization_config (fp8)"),
        ],
    )
    def test_config(self, tmp_path: Path, changes: dict[str, Any], fact: str) -> None:
        folder = edit_config(save_tiny("q35", tmp_path), changes)
        message = refusal(folder)
        assert f"the checkpoint is quantised: config.json has {fact}; dequantise first" in message

    def test_is_refused_before_weights_are_there(self, tmp_path: Path) -> None:
        folder = edit_config(save_tiny("q35", tmp_path), {"quantization_config": {"quant_method": "awq"}})
        (folder / "model.safetensors").unlink()
        with pytest.raises(RequestError, match=r"awq.*dequantise first"):
            open_config(resolve_model(str(folder), None))

    def test_an_empty_field_is_no_quantisation(self, tmp_path: Path) -> None:
        folder = edit_config(save_tiny("q35", tmp_path), {"quantization_config": None, "quantization": {}})
        open_checkpoint(resolve_model(str(folder), None))

    @pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8, torch.int32])
    def test_dtype_of_a_weight(self, tmp_path: Path, dtype: torch.dtype) -> None:
        folder = save_tiny("q35", tmp_path)
        name = "model.layers.0.mlp.up_proj.weight"
        tensors = read_weights(folder)
        write_weights(folder, tensors | {name: tensors[name].to(dtype)})
        assert f"{name} is stored as " in refusal(folder)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
    def test_dtypes_that_are_no_quantisation(self, tmp_path: Path, dtype: torch.dtype) -> None:
        folder = save_tiny("q35", tmp_path, dtype=dtype)
        write_weights(folder, read_weights(folder) | {"model.rotary.position_ids": torch.arange(4)})
        open_checkpoint(resolve_model(str(folder), None))

    @pytest.mark.parametrize(
        "suffix",
        [
            *("qweight", "qzeros", "g_idx"),  # GPTQ, AWQ
            *("weight_scale_inv", "weight_scale", "weight_packed", "weight_zero_point", "input_scale"),
            *("weight.absmax", "weight.quant_map", "weight.quant_state.bitsandbytes__nf4", "SCB", "weight_format"),
            *("weight:qdata", "weight:scale", "_weight_qdata"),  # torchao
        ],
    )
    def test_names_that_quantisers_write(self, tmp_path: Path, suffix: str) -> None:
        folder = save_tiny("q35", tmp_path)
        name = f"model.layers.0.mlp.up_proj.{suffix}"
        write_weights(folder, read_weights(folder) | {name: torch.ones(4)})
        assert f"the checkpoint is quantised: {name} (F32) is a tensor that a quantiser writes" in refusal(folder)


class TestTie:
    def test_only_text_config_ties(self, tmp_path: Path) -> None:
        folder = save_tiny("qw", tmp_path)
        expected = (
            "text_config ties the embeddings, the top level does not, and lm_head.weight is missing: stock "
            "transformers would draw a random output head. Set tie_word_embeddings to true at the top level."
        )
        assert refusal(edit_config(folder, {"tie_word_embeddings": False})) == expected
        assert refusal(edit_config(folder, remove=["tie_word_embeddings"])) == expected

    def test_stock_draws_the_head_of_that_folder(self, tmp_path: Path) -> None:
        from transformers import Qwen3_5ForConditionalGeneration

        folder = edit_config(save_tiny("qw", tmp_path), remove=["tie_word_embeddings"])
        model, info = Qwen3_5ForConditionalGeneration.from_pretrained(folder, output_loading_info=True)
        assert info["missing_keys"] == {"lm_head.weight"}
        head = model.state_dict()["lm_head.weight"]
        assert not torch.equal(head, model.state_dict()["model.language_model.embed_tokens.weight"])

    def test_a_stored_head_needs_no_tie(self, tmp_path: Path) -> None:
        folder = edit_config(save_tiny("qw", tmp_path), {"tie_word_embeddings": False})
        tensors = read_weights(folder)
        write_weights(folder, tensors | {"lm_head.weight": tensors["model.language_model.embed_tokens.weight"]})
        open_checkpoint(resolve_model(str(folder), None))

    @pytest.mark.parametrize("name", ["gated_deltanet_tied", "delta_net_tied", "qw"])
    def test_nothing_ties_and_the_head_is_missing(self, tmp_path: Path, name: str) -> None:
        changes: dict[str, Any] = {"tie_word_embeddings": False}
        if name == "qw":
            changes["text_config"] = {"tie_word_embeddings": False}
        message = refusal(edit_config(save_tiny(name, tmp_path), changes))
        assert "tie_word_embeddings is false and lm_head.weight is missing" in message

    def test_only_the_top_level_ties(self, tmp_path: Path) -> None:
        from transformers import Qwen3_5ForConditionalGeneration

        folder = edit_config(save_tiny("qw", tmp_path), {"text_config": {"tie_word_embeddings": False}})
        open_checkpoint(resolve_model(str(folder), None))
        _, info = Qwen3_5ForConditionalGeneration.from_pretrained(folder, output_loading_info=True)
        assert info["missing_keys"] == set()


class TestOtherWeights:
    def test_an_adapter(self, tmp_path: Path) -> None:
        folder = save_tiny("q35", tmp_path)
        (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "/nowhere"}')
        message = refusal(folder)
        assert "holds a LoRA adapter (adapter_config.json) that stock transformers would apply" in message
        assert "merge it first or move it away" in message

    def test_a_weight_file_named_in_the_config(self, tmp_path: Path) -> None:
        folder = edit_config(save_tiny("q35", tmp_path), {"transformers_weights": "ema.safetensors"})
        assert "transformers_weights ('ema.safetensors')" in refusal(folder)

    def test_the_original_state_spaces_layout(self, tmp_path: Path) -> None:
        folder = save_tiny("m2", tmp_path)
        (folder / "config.json").write_text('{"d_model":32,"n_layer":2,"vocab_size":64,"ssm_cfg":{"layer":"Mamba2"}}')
        assert "original state-spaces layout" in refusal(folder)
