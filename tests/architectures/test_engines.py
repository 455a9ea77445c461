"""Commands of serving engines for a kept width."""

from __future__ import annotations

import pytest

from compressor.architectures.engines import ENGINE_RULES, EngineAnswer, EngineRule, engine_answers


def answer(engine: str, width: int) -> EngineAnswer:
    """What the engine makes of a Qwen3-Next with values of 128."""
    (found,) = [found for found in engine_answers("qwen3_next", False, width, 128) if found.engine == engine]
    return found


@pytest.mark.parametrize("width", [128, 96, 64, 48, 32])
@pytest.mark.parametrize(
    "rule", [rule for rule in ENGINE_RULES if rule.covers("qwen3_next", False)], ids=lambda rule: rule.engine
)
def test_a_command_has_the_flag_that_the_width_needs(rule: EngineRule, width: int) -> None:
    found = answer(rule.engine, width)
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


def test_every_rule_that_can_ask_for_a_flag_names_one() -> None:
    asking = [rule for rule in ENGINE_RULES if rule.verdict(64, 128) == "needs a flag"]
    assert asking
    assert all(rule.flag and rule.command for rule in asking)
