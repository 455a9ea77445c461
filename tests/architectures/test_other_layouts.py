"""Members of a family whose files are laid out otherwise: refused by the tensor's name, never cut by guess."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from compressor.errors import RequestError
from compressor.preparation import open_model, open_source
from tests.tiny_models import read_weights, save_tiny, tiny_model, write_weights

Tensors = dict[str, Tensor]
MIXER = "model.layers.1.linear_attn"
EXPERTS = "model.layers.0.mlp.experts"


def without(name: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {key: value for key, value in tensors.items() if key != name}


def with_more(name: str, *shape: int) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {name: torch.zeros(shape)}


def with_fewer_rows(name: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {name: tensors[name][:-1]}


def without_last_expert(tensors: Tensors) -> Tensors:
    return {key: value for key, value in tensors.items() if ".experts.3." not in key}


@pytest.mark.parametrize(
    ("name", "edit", "fragments"),
    [
        ("qn", without(f"{MIXER}.in_proj_ba.weight"), [f"missing {MIXER}.in_proj_ba.weight"]),
        ("qn", with_more(f"{MIXER}.in_proj_g.weight", 4, 32), [f"unexpected {MIXER}.in_proj_g.weight"]),
        ("qn", with_more(f"{MIXER}.in_proj_qkvz.bias", 192), [f"unexpected {MIXER}.in_proj_qkvz.bias"]),
        ("qn", with_fewer_rows(f"{MIXER}.in_proj_qkvz.weight"), [f"(192, 32) for {MIXER}.in_proj_qkvz.weight", "191"]),
        ("qn", with_fewer_rows(f"{MIXER}.conv1d.weight"), [f"(128, 1, 4) for {MIXER}.conv1d.weight", "127"]),
        ("q35_experts", with_fewer_rows(f"{MIXER}.in_proj_qkv.weight"), [f"{MIXER}.in_proj_qkv.weight", "127"]),
        ("oh", without(f"{MIXER}.conv1d.weight"), [f"missing {MIXER}.conv1d.weight"]),
        ("oh", with_fewer_rows(f"{MIXER}.k_proj.weight"), [f"(32, 32) for {MIXER}.k_proj.weight", "(31, 32)"]),
        (
            "oh_parts",
            without(f"{MIXER}.k_conv1d.weight"),
            [f"for {MIXER}.conv1d.weight, which the files hold in parts: missing {MIXER}.k_conv1d.weight"],
        ),
        (
            "oh_parts",
            with_fewer_rows(f"{MIXER}.v_conv1d.weight"),
            [f"for {MIXER}.conv1d.weight, 384 elements", f"have 380: {MIXER}.v_conv1d.weight is (31, 1, 4)"],
        ),
        (
            "qn_experts",
            without(f"{EXPERTS}.2.up_proj.weight"),
            [f"(4, 16, 32) for {EXPERTS}.gate_up_proj", f"missing {EXPERTS}.2.up_proj.weight"],
        ),
        ("qn_experts", without_last_expert, [f"missing {EXPERTS}.3."]),
        ("q35_experts", with_more(f"{EXPERTS}.4.up_proj.weight", 8, 32), [f"unexpected {EXPERTS}.4.up_proj.weight"]),
        (
            "q35_experts",
            with_fewer_rows(f"{EXPERTS}.1.down_proj.weight"),
            [f"for {EXPERTS}.down_proj, 1024 elements", f"{EXPERTS}.1.down_proj.weight is (31, 8)"],
        ),
    ],
)
def test_refused_by_name(name: str, edit: Callable[[Tensors], Tensors], fragments: list[str], tmp_path: Path) -> None:
    folder = save_tiny(name, tmp_path)
    open_source(open_model(str(folder), None))
    write_weights(folder, edit(read_weights(folder)))
    with pytest.raises(RequestError) as caught:
        open_source(open_model(str(folder), None))
    for fragment in fragments:
        assert fragment in str(caught.value)


def test_a_convolution_in_three_equal_parts_is_refused(tmp_path: Path) -> None:
    """What transformers' `save_pretrained` writes of a model whose values are wider than its keys."""
    model = tiny_model("oh")
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    assert read_weights(tmp_path)["model.layers.0.linear_attn.q_conv1d.weight"].shape[0] == 54
    message = (
        r"^model\.layers\.0\.linear_attn\.q_conv1d\.weight has 54 slices along dimension 0 where the query channels "
        r"alone are 32; write the checkpoint again with save_pretrained\(\.\.\., save_original_format=False\)\.$"
    )
    with pytest.raises(RequestError, match=message):
        open_source(open_model(str(tmp_path), None))
    model.save_pretrained(tmp_path / "again", save_original_format=False)  # type: ignore[operator]
    open_source(open_model(str(tmp_path / "again"), None))
