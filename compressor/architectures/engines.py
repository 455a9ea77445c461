"""What serving engines take after a cut of the key width, with the evidence for each line.

d_v stays as it was, so most limits concern d_k != d_v.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["runs", "needs a flag", "refused"]


@dataclass(frozen=True)
class EngineRule:
    """One engine's answer for a kept key width. `verdict` takes (head_k_dim, head_v_dim)."""

    engine: str
    families: Literal["fla", "transformers"]
    verdict: Callable[[int, int], Verdict]
    note: str
    evidence: str


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


ENGINE_RULES: tuple[EngineRule, ...] = (
    EngineRule(
        "flash-linear-attention 0.6", "fla", _at_most_256,
        "blocks are padded to a power of two: 64 and 32 are the widths that pay", "source and runs",
    ),
    EngineRule(
        "transformers 5.24", "transformers", _any,
        "no continuous batching of linear attention", "runs at 128, 96, 64, 48, 32",
    ),
    EngineRule("vLLM 0.33 CUDA before Hopper", "transformers", _at_most_256, "Triton kernels", "source"),
    EngineRule(
        "vLLM 0.33 Hopper", "transformers", _only_128_by_default,
        "other widths need --gdn-prefill-backend triton", "source",
    ),
    EngineRule(
        "vLLM 0.27 to 0.32 CPU", "transformers", _square_64_or_128,
        "expects head_dim equal to head_dim_v", "runs",
    ),
    EngineRule(
        "SGLang 0.5.23 CUDA", "transformers", _power_of_two,
        "tl.arange needs a power of two; bf16 state on Blackwell: --linear-attn-decode-backend triton", "source",
    ),
    EngineRule("llama.cpp", "transformers", _square, "one width serves keys and values", "source"),
    EngineRule("MLX", "transformers", _any, "the Metal kernel needs a multiple of 32", "source"),
)  # fmt: skip


@dataclass(frozen=True)
class EngineAnswer:
    """What one engine makes of one width."""

    engine: str
    verdict: Verdict
    note: str
    evidence: str


def engine_answers(needs_fla: bool, head_k_dim: int, head_v_dim: int) -> tuple[EngineAnswer, ...]:
    """One line an engine that knows the family."""
    family = "fla" if needs_fla else "transformers"
    return tuple(
        EngineAnswer(rule.engine, rule.verdict(head_k_dim, head_v_dim), rule.note, rule.evidence)
        for rule in ENGINE_RULES
        if rule.families == family
    )


def engine_warnings(needs_fla: bool, head_k_dim: int, head_v_dim: int) -> tuple[str, ...]:
    """One sentence for each engine that refuses the width or needs a flag for it."""
    return tuple(
        f"{answer.engine}: width {head_k_dim} {'is refused' if answer.verdict == 'refused' else 'needs a flag'} "
        f"({answer.note}; {answer.evidence})"
        for answer in engine_answers(needs_fla, head_k_dim, head_v_dim)
        if answer.verdict != "runs"
    )
