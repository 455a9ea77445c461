"""The scans of Mamba-2 hybrids as taps see them, layer-by-layer calibration of them, and what recovery may train."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compressor.architectures.base import RecurrenceTap
from compressor.loading import build_skeleton
from compressor.preparation import open_model, open_source
from tests.calibration.test_layerwise import assert_same, in_memory, layerwise
from tests.families import MAMBA2_HYBRIDS, tiny_checkpoint, tiny_tokens
from tests.tiny_models import read_weights, save_tiny, write_weights


class Seen(RecurrenceTap):
    def __init__(self) -> None:
        self.shapes: list[tuple[str, int, tuple[int, ...]]] = []

    def on_query(self, layer: int, query: Tensor) -> Tensor:
        self.shapes.append(("query", layer, tuple(query.shape)))
        return query

    def on_key(self, layer: int, key: Tensor) -> Tensor:
        self.shapes.append(("key", layer, tuple(key.shape)))
        return key

    def on_output(self, layer: int, output: Tensor) -> Tensor:
        self.shapes.append(("output", layer, tuple(output.shape)))
        return output


@pytest.mark.parametrize("name", MAMBA2_HYBRIDS)
def test_every_scan_is_seen_once(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In training too, where mamba_ssm would compute a whole mixer at once, and in single steps behind a cache."""
    tiny, tap = tiny_checkpoint(name, tmp_path), Seen()
    modeling = sys.modules[type(tiny.model).__module__]
    fused = "mamba2_split_conv1d_scan_combined"
    monkeypatch.setattr(modeling, fused, lambda zxbcdt, *_, **__: torch.zeros(*zxbcdt.shape[:2], 32))

    def expected(*passes: int) -> list[tuple[str, int, tuple[int, ...]]]:
        return [
            each
            for tokens in passes
            for layer in (mixer.layer for mixer in tiny.mixers)
            for stream in ((1, tokens, 2, 16),)
            for each in (("query", layer, stream), ("key", layer, stream), ("output", layer, (1, tokens, 4, 16)))
        ]

    with torch.no_grad(), tiny.architecture.tapped(tiny.model, tiny.mixers, tap):
        tiny.model.train()(input_ids=tiny_tokens(70)[None], use_cache=False)
        assert tap.shapes == expected(70)
        tap.shapes.clear()
        tiny.model.eval().generate(
            tiny_tokens(20)[None], max_new_tokens=2, min_new_tokens=2, do_sample=False, pad_token_id=0
        )
        assert tap.shapes == expected(20, 1)


TWO_SHARED_BLOCKS = {
    "num_hidden_layers": 5,
    "layers_block_type": ["linear_attention", "hybrid", "hybrid", "hybrid", "hybrid"],
    "num_mem_blocks": 2,
}


@pytest.mark.parametrize(
    ("name", "overrides"), [*((name, {}) for name in MAMBA2_HYBRIDS), ("zamba2", TWO_SHARED_BLOCKS)]
)
def test_sums_layer_by_layer_are_those_of_the_model_in_memory(
    name: str, overrides: Mapping[str, Any], tmp_path: Path
) -> None:
    """Layers of Zamba2 hold a Mamba-2 layer of their own and a block that others hold too, once in the files."""
    folder = save_tiny(name, tmp_path / "source", max_shard_size="20KB", overrides=overrides)
    source = open_source(open_model(str(folder), None))
    assert_same(layerwise(source, tmp_path)[0], in_memory(source))


def test_files_may_hold_tied_embeddings_as_the_head_alone(tmp_path: Path) -> None:
    folder = save_tiny("granite", tmp_path / "source", overrides={"tie_word_embeddings": True})
    weights = read_weights(folder)
    weights["lm_head.weight"] = weights.pop("model.embed_tokens.weight")
    write_weights(folder, weights)
    source = open_source(open_model(str(folder), None))
    assert_same(layerwise(source, tmp_path)[0], in_memory(source))


@pytest.mark.parametrize("name", MAMBA2_HYBRIDS)
def test_recovery_trains_mixers_and_the_norms_before_them(name: str, tmp_path: Path) -> None:
    tiny = tiny_checkpoint(name, tmp_path)
    files = read_weights(tmp_path)
    targets = tiny.architecture.recovery_targets(tiny.model, tiny.mixers)
    skeleton = build_skeleton(tiny.architecture, tmp_path, dict(tiny.raw_config))
    assert tiny.architecture.recovery_targets(skeleton, tiny.mixers) == targets
    assert targets.projections == tuple(f"{mixer.module}.in_proj" for mixer in tiny.mixers)
    names = [*targets.whole, *(f"{path}.weight" for path in targets.projections)]
    norm = "norm" if name == "nh" else "input_layernorm"
    before = tuple(f"{mixer.module.rpartition('.')[0]}.{norm}." for mixer in tiny.mixers)
    inside = tuple(f"{mixer.module}." for mixer in tiny.mixers)
    assert set(names) == {path for path, _ in tiny.model.named_parameters() if path.startswith(inside + before)}
    for parameter in names:
        stored = files[tiny.architecture.tensor_name(parameter, tiny.mixers)]
        assert torch.equal(tiny.model.get_parameter(parameter), stored)
    for mixer in tiny.mixers:
        weight = tiny.model.get_submodule(tiny.architecture.output_projection(mixer)).get_parameter("weight")
        assert torch.equal(weight, files[tiny.architecture.output_projection_tensor(mixer)])


@pytest.mark.parametrize("name", MAMBA2_HYBRIDS)
def test_the_block_adds_what_the_mixer_returns_or_none_is_named(name: str, tmp_path: Path) -> None:
    """A factor on the residual stream in Granite, softmax attention beside the mixer in Falcon-H1."""
    tiny = tiny_checkpoint(name, tmp_path)
    seen: dict[str, tuple[Any, Any]] = {}
    for path, module in tiny.model.named_modules():
        module.register_forward_hook(lambda _, inputs, output, path=path: seen.update({path: (inputs, output)}))
    with torch.inference_mode():
        tiny.architecture.decoder(tiny.model)(input_ids=tiny_tokens(70)[None], use_cache=False)
    for mixer in tiny.mixers:
        block = tiny.architecture.residual_block(tiny.config, mixer)
        assert (block is None) == (name in ("granite", "falcon_h1"))
        if block is not None:
            (residual, *_), output = seen[block]
            behind = output[0] if isinstance(output, tuple) else output
            behind = behind - seen[f"{block}.feed_forward"][1] if name == "bamba" else behind
            projected = seen[tiny.architecture.output_projection(mixer)][1]
            torch.testing.assert_close(behind, residual + projected, rtol=1e-5, atol=1e-5)
