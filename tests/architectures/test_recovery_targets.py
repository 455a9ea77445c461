"""What an adapter says recovery may train: all of the mixers and the norm before them, by names of model and files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from compressor.architectures.base import RecoveryTargets
from compressor.errors import RunError
from compressor.loading import build_skeleton
from tests.families import SUPPORTED_VARIANTS, TinyCheckpoint, tiny_checkpoint, tiny_tokens
from tests.tiny_models import read_weights, tiny_config

BLOCK_NORMS = {"attn": "attn_norm", "linear_attn": "input_layernorm", "mixer": "norm"}
PER_HEAD = {"a_proj", "b_proj", "in_proj_a", "in_proj_b", "in_proj_ba"}

READ_BY_A_KERNEL = "mixer.out_proj"
"""Mamba-2's, in training with mamba_ssm: an adapter there would be passed by, so it is trained whole."""


def targets_of(tiny: TinyCheckpoint) -> RecoveryTargets:
    return tiny.architecture.recovery_targets(tiny.model, tiny.mixers)


class Opaque(nn.Module):
    """A linear module without a weight to read."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.hidden = [linear]

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.hidden[0](x)
        return result


@pytest.mark.parametrize("name", SUPPORTED_VARIANTS)
def test_targets_are_the_mixers_and_their_block_norms(name: str, tmp_path: Path) -> None:
    tiny = tiny_checkpoint(name, tmp_path)
    targets = targets_of(tiny)
    linear, named = set(), set()
    for mixer in tiny.mixers:
        block, _, child = mixer.module.rpartition(".")
        prefixes = (f"{mixer.module}.", f"{block}.{BLOCK_NORMS[child]}.")
        named |= {path for path, _ in tiny.model.named_parameters() if path.startswith(prefixes)}
        linear |= {
            path
            for path, module in tiny.model.named_modules()
            if path.startswith(prefixes) and isinstance(module, nn.Linear) and not path.endswith(READ_BY_A_KERNEL)
        }
    weights = {f"{path}.weight" for path in targets.projections}
    if name == "oh_parts":  # the files hold convolutions in parts
        named = {path for path in named if not path.endswith(".conv1d.weight")}
    assert set(targets.projections) == linear
    assert len(targets.projections) == len(linear)
    assert set(targets.whole) == named - weights
    assert len(targets.whole) == len(named) - len(weights)
    assert all(any(path.startswith(mixer.module) for path in targets.projections) for mixer in tiny.mixers)


@pytest.mark.parametrize("name", SUPPORTED_VARIANTS)
def test_projections_to_one_or_two_numbers_a_head(name: str, tmp_path: Path) -> None:
    tiny = tiny_checkpoint(name, tmp_path)
    targets = targets_of(tiny)
    by_name = {path for path in targets.projections if path.rpartition(".")[2] in PER_HEAD}
    heads, keys_per_token = tiny.mixers[0].num_v_heads, tiny.mixers[0].keys_per_token
    rows = (heads, 2 * heads, keys_per_token * heads)  # a step or a decay; both at once; a step size for each key
    by_shape = {path for path in targets.projections if tiny.model.get_parameter(f"{path}.weight").shape[0] in rows}
    assert set(targets.per_head) == by_name == by_shape


@pytest.mark.parametrize("name", SUPPORTED_VARIANTS)
@pytest.mark.parametrize("gradients", [False, True])
def test_every_projection_is_called_and_its_weight_read_by_nobody(name: str, gradients: bool, tmp_path: Path) -> None:
    tiny = tiny_checkpoint(name, tmp_path)
    sequences = [tiny_tokens(length) for length in (20, 100)]
    with torch.set_grad_enabled(gradients):
        before = [tiny.model(input_ids=sequence[None], use_cache=False).logits for sequence in sequences]
        for path in targets_of(tiny).projections:
            parent, _, child = path.rpartition(".")
            setattr(tiny.model.get_submodule(parent), child, Opaque(tiny.model.get_submodule(path)))
        after = [tiny.model(input_ids=sequence[None], use_cache=False).logits for sequence in sequences]
    for one, other in zip(before, after, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", SUPPORTED_VARIANTS)
def test_file_names_lead_to_the_same_values(name: str, tmp_path: Path) -> None:
    tiny = tiny_checkpoint(name, tmp_path)
    tensors = read_weights(tmp_path)
    targets = targets_of(tiny)
    names = (*targets.whole, *(f"{path}.weight" for path in targets.projections))
    files = [tiny.architecture.tensor_name(parameter, tiny.mixers) for parameter in names]
    assert len(set(files)) == len(names)
    for parameter, file_name in zip(names, files, strict=True):
        assert torch.equal(tiny.model.get_parameter(parameter), tensors[file_name])


def test_a_text_model_may_read_the_wrappers_files(tmp_path: Path) -> None:
    tiny = tiny_checkpoint("q35", tmp_path)
    wrapped = [name.replace("model.", "model.language_model.", 1) for name in read_weights(tmp_path)]
    mixers = tiny.architecture.mixers(tiny.config, wrapped)
    targets = tiny.architecture.recovery_targets(tiny.model, mixers)
    for parameter in (*targets.whole, *(f"{path}.weight" for path in targets.projections)):
        name = tiny.architecture.tensor_name(parameter, mixers)
        assert name == parameter.replace("model.", "model.language_model.", 1)
        assert name in wrapped
    assert targets == targets_of(tiny)


@pytest.mark.parametrize("name", ["gated_deltanet", "delta_net"])
def test_layers_of_two_digits_are_told_apart(name: str, tmp_path: Path) -> None:
    architecture = tiny_checkpoint(name, tmp_path).architecture
    mixers = architecture.mixers(tiny_config(name, {"num_hidden_layers": 12}), ())
    for layer in (1, 11):
        parameter = f"model.layers.{layer}.attn_norm.weight"
        assert architecture.tensor_name(parameter, mixers) == parameter


@pytest.mark.parametrize(
    ("name", "parameter"),
    [
        ("gated_deltanet", "lm_head.weight"),
        ("gated_deltanet", "model.embeddings.weight"),
        ("gated_deltanet_hybrid", "model.layers.1.attn_norm.weight"),
        ("q35", "model.layers.3.input_layernorm.weight"),
        ("qw", "model.visual.blocks.0.norm1.weight"),
    ],
)
def test_other_parameters_have_no_place(name: str, parameter: str, tmp_path: Path) -> None:
    tiny = tiny_checkpoint(name, tmp_path)
    tiny.model.get_parameter(parameter)
    with pytest.raises(ValueError, match=f"^{parameter} lies in no block of a linear-attention layer$"):
        tiny.architecture.tensor_name(parameter, tiny.mixers)


@pytest.mark.parametrize("name", SUPPORTED_VARIANTS)
def test_a_model_without_weights_has_the_same_targets(name: str, tmp_path: Path) -> None:
    tiny = tiny_checkpoint(name, tmp_path)
    skeleton = build_skeleton(tiny.architecture, tmp_path, dict(tiny.raw_config))
    assert next(skeleton.parameters()).device.type == "meta"
    assert tiny.architecture.recovery_targets(skeleton, tiny.mixers) == targets_of(tiny)


def test_biases_belong_to_what_is_trained_whole(tmp_path: Path) -> None:
    tiny = tiny_checkpoint("q35", tmp_path)
    path = tiny.architecture.output_projection(tiny.mixers[1])
    tiny.model.get_submodule(path).bias = nn.Parameter(torch.zeros(32))
    assert f"{path}.bias" in targets_of(tiny).whole


def test_a_projection_that_is_not_linear_is_refused(tmp_path: Path) -> None:
    tiny = tiny_checkpoint("q35", tmp_path)
    path = tiny.architecture.output_projection(tiny.mixers[1])
    parent, _, child = path.rpartition(".")
    setattr(tiny.model.get_submodule(parent), child, Opaque(tiny.model.get_submodule(path)))
    message = f"^{path} is a Opaque and not a linear module; load the checkpoint without quantisation or adapters.$"
    with pytest.raises(RunError, match=message):
        targets_of(tiny)
