"""The output projection and the block that an adapter names: in the stock model, in the files, in a forward pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.families import SUPPORTED_VARIANTS, TinyCheckpoint, open_tiny, tiny_checkpoint, tiny_tokens
from tests.tiny_models import read_weights, save_tiny


@pytest.mark.parametrize("name", SUPPORTED_VARIANTS)
def test_model_and_files_hold_the_projection(name: str, tmp_path: Path) -> None:
    tiny = tiny_checkpoint(name, tmp_path)
    tensors = read_weights(tmp_path)
    for mixer in tiny.mixers:
        module = tiny.model.get_submodule(tiny.architecture.output_projection(mixer))
        assert isinstance(module, nn.Linear)
        assert module.weight.shape == (32, mixer.num_v_heads * mixer.head_v_dim)
        assert torch.equal(module.weight, tensors[tiny.architecture.output_projection_tensor(mixer)])


def run(tiny: TinyCheckpoint, paths: list[str]) -> dict[str, tuple[Tensor, Tensor]]:
    """The first input, where it is positional, and the output of each module in one pass."""
    seen: dict[str, tuple[Tensor, Tensor]] = {}

    def keep(path: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            seen[path] = (args[0] if args else torch.empty(0), output[0] if isinstance(output, tuple) else output)

        return hook

    for path in paths:
        tiny.model.get_submodule(path).register_forward_hook(keep(path))
    with torch.inference_mode():
        tiny.architecture.decoder(tiny.model)(input_ids=tiny_tokens(70)[None], use_cache=False)
    return seen


@pytest.mark.parametrize("name", SUPPORTED_VARIANTS)
def test_the_block_adds_what_the_projection_returns(name: str, tmp_path: Path) -> None:
    tiny = tiny_checkpoint(name, tmp_path)
    for mixer in tiny.mixers:
        projection = tiny.architecture.output_projection(mixer)
        block = tiny.architecture.residual_block(tiny.config, mixer)
        assert block is not None
        mlp = [path for path, _ in tiny.model.named_modules() if path == f"{block}.mlp"]
        seen = run(tiny, [projection, mixer.module, block, *mlp])
        assert torch.equal(seen[projection][1], seen[mixer.module][1])
        residual, output = seen[block]
        behind_mixer = output - sum(seen[path][1] for path in mlp)
        torch.testing.assert_close(behind_mixer, residual + seen[projection][1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["gated_deltanet", "delta_net"])
def test_attention_over_residuals_has_no_such_block(name: str, tmp_path: Path) -> None:
    tiny = open_tiny(save_tiny(name, tmp_path, overrides={"attnres_block_size": 2}))
    assert [tiny.architecture.residual_block(tiny.config, mixer) for mixer in tiny.mixers] == [None, None]
