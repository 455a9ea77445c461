"""Settings that train nothing, or not what was meant, end in one sentence before any weight is loaded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from compressor.errors import RequestError
from compressor.loading import build_skeleton
from compressor.recovery.student import StudentSettings, check_student_settings, prepare_student
from tests.families import SUPPORTED_VARIANTS, TinyCheckpoint, tiny_checkpoint
from tests.recovery.students import LORA, MIXERS, MODES


def skeleton_of(tiny: TinyCheckpoint) -> PreTrainedModel:
    return build_skeleton(tiny.architecture, tiny.folder, dict(tiny.raw_config))


def refusal(tiny: TinyCheckpoint, settings: StudentSettings) -> str:
    """The message, the same from the skeleton and from the loaded model, which is left as it was."""
    with pytest.raises(RequestError) as early:
        check_student_settings(tiny.architecture, skeleton_of(tiny), tiny.mixers, settings)
    names = list(tiny.model.state_dict())
    with pytest.raises(RequestError) as late:
        prepare_student(tiny.architecture, tiny.model, tiny.mixers, settings)
    assert list(tiny.model.state_dict()) == names
    assert all(parameter.requires_grad for parameter in tiny.model.parameters())
    assert str(late.value) == str(early.value)
    return str(early.value)


FLA_ALLOWED = "a_proj, b_proj, g_proj, k_proj, o_proj, q_proj, v_proj"
QWEN_ALLOWED = "in_proj_a, in_proj_b, in_proj_qkv, in_proj_z, out_proj"
WHOLE = "(the mixers' convolutions and norms are trained without being named)."


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("q35", {"rank": 0}, "a LoRA rank of 0 trains nothing; use a whole number of at least 1."),
        ("q35", {"rank": -3}, "a LoRA rank of -3 trains nothing; use a whole number of at least 1."),
        ("q35", {"alpha": 0.0}, "a LoRA alpha of 0 is not above 0 and finite; twice the rank is usual."),
        ("q35", {"alpha": -1.5}, "a LoRA alpha of -1.5 is not above 0 and finite; twice the rank is usual."),
        ("q35", {"alpha": float("nan")}, "a LoRA alpha of nan is not above 0 and finite; twice the rank is usual."),
        ("q35", {"alpha": float("inf")}, "a LoRA alpha of inf is not above 0 and finite; twice the rank is usual."),
        (
            "gated_deltanet",
            {"rank": 33},
            "a LoRA rank of 33 is over 32, the smaller side of model.layers.0.attn.q_proj; use a rank of at most 32, "
            "other targets, or trainable mixers.",
        ),
        (
            "q35",
            {"rank": 5, "targets": ("out_proj", "in_proj_b")},
            "a LoRA rank of 5 is over 4, the smaller side of model.layers.0.linear_attn.in_proj_b; use a rank of at "
            "most 4, other targets, or trainable mixers.",
        ),
        (
            "q35",
            {"targets": ("q_proj", "in_proj_qkvz")},
            "in_proj_qkvz matches no module of this model; did you mean in_proj_qkv?",
        ),
        (
            "q35",
            {"targets": ("fc1",)},
            f"fc1 matches no module of this model; allowed: {QWEN_ALLOWED}.",
        ),
        (
            "gated_deltanet",
            {"targets": ("model.layers.0.attn.q_proj",)},
            f"model.layers.0.attn.q_proj matches no module of this model; allowed: {FLA_ALLOWED}.",
        ),
        (
            "delta_net",
            {"targets": ("q_proj", "")},
            "an empty name matches no module of this model; allowed: b_proj, k_proj, o_proj, ",
        ),
        (
            "q35",
            {"targets": ("conv1d",)},
            f"recovery cannot train conv1d in qwen3_5_text; allowed: {QWEN_ALLOWED} {WHOLE}",
        ),
        (
            "q35",
            {"targets": ("out_proj", "q_proj")},
            f"recovery cannot train q_proj in qwen3_5_text; allowed: {QWEN_ALLOWED} {WHOLE}",
        ),
        ("qw", {"targets": ("qkv",)}, f"recovery cannot train qkv in qwen3_5; allowed: {QWEN_ALLOWED} {WHOLE}"),
        (
            "gated_deltanet",
            {"targets": ("q_proj", "q_conv1d")},
            f"recovery cannot train q_conv1d in gated_deltanet; allowed: {FLA_ALLOWED} {WHOLE}",
        ),
        (
            "gated_deltanet_tied",
            {"targets": ("lm_head",)},
            f"recovery cannot train lm_head in gated_deltanet; allowed: {FLA_ALLOWED} {WHOLE}",
        ),
        ("delta_net_no_beta", {"targets": ("b_proj",)}, "b_proj matches no module of this model; did you mean "),
        (
            "q35",
            {"targets": ()},
            f"recovery has an empty list of targets; name some of {QWEN_ALLOWED}, or give none.",
        ),
        (
            "q35",
            {"trainable": "mixers", "targets": ("out_proj",)},
            "recovery targets (out_proj) choose modules for LoRA, and trainable mixers trains every parameter of the "
            "mixers; leave one of the two out.",
        ),
    ],
)
def test_what_is_refused(name: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    assert refusal(tiny_checkpoint(name, tmp_path), replace(LORA, **changes)).startswith(message)


@pytest.mark.parametrize("settings", [LORA, MIXERS], ids=["lora", "mixers"])
def test_a_model_without_recurrent_layers_is_refused(settings: StudentSettings, tmp_path: Path) -> None:
    tiny = replace(tiny_checkpoint("q35", tmp_path), mixers=())
    message = "this qwen3_5_text model has no linear-attention layer that recovery could train; run without recovery."
    assert refusal(tiny, settings) == message


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", SUPPORTED_VARIANTS)
def test_the_check_needs_no_weights(name: str, mode: str, tmp_path: Path) -> None:
    tiny = tiny_checkpoint(name, tmp_path)
    skeleton = skeleton_of(tiny)
    check_student_settings(tiny.architecture, skeleton, tiny.mixers, MODES[mode])
    assert {parameter.device for parameter in skeleton.parameters()} == {torch.device("meta")}


@pytest.mark.parametrize(("rank", "adapted"), [(4, True), (5, False)])
def test_a_projection_narrower_than_the_rank_is_trained_whole(rank: int, adapted: bool, tmp_path: Path) -> None:
    """Four value heads: there is no adapter of rank 5 for one number a head, and the whole of it is smaller."""
    tiny = tiny_checkpoint("q35", tmp_path)
    student = prepare_student(tiny.architecture, tiny.model, tiny.mixers, replace(LORA, rank=rank))
    for mixer in tiny.mixers:
        for name in ("in_proj_a", "in_proj_b"):
            path = f"{mixer.module}.{name}"
            assert (path in {adapter.path for adapter in student.adapters}) == adapted
            assert (f"{path}.weight" in student.whole) != adapted


def test_the_largest_rank_that_fits(tmp_path: Path) -> None:
    tiny = tiny_checkpoint("gated_deltanet", tmp_path)
    student = prepare_student(tiny.architecture, tiny.model, tiny.mixers, replace(LORA, rank=32))
    assert {adapter.a.shape[0] for adapter in student.adapters} == {32}


def test_rank_and_alpha_do_not_matter_to_whole_mixers(tmp_path: Path) -> None:
    tiny = tiny_checkpoint("gated_deltanet", tmp_path)
    check_student_settings(tiny.architecture, tiny.model, tiny.mixers, replace(MIXERS, rank=10**6, alpha=-1.0))
