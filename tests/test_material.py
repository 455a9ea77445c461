"""What an evaluation plans and what it refuses, before a model is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from compressor.calibration.tokenizer import load_tokenizer
from compressor.errors import RequestError
from compressor.evaluation.measure import Material
from compressor.evaluation_section import EvaluationSection
from compressor.material import EvaluationPlan, make_material, plan_evaluation
from compressor.naming import keys_in

IDLE = "would change nothing here; add"


@pytest.fixture(scope="module")
def tokenizer(demo_model: Path) -> PreTrainedTokenizerBase:
    return load_tokenizer(demo_model, trust_remote_code=False)


def config(context: Any) -> PretrainedConfig:
    return PretrainedConfig(vocab_size=8192, max_position_embeddings=context)


def plan(
    tokenizer: PreTrainedTokenizerBase, context: Any = 2048, baseline: Any = 2048, **settings: Any
) -> EvaluationPlan:
    section = EvaluationSection(**{"texts": ["demo"], **settings})
    name = keys_in("evaluation")
    return plan_evaluation(section, config(context), tokenizer, 0, section.texts, config(baseline), name)


def material(found: EvaluationPlan) -> Material:
    return make_material(found, (), "", lambda prompts: None)


@pytest.mark.parametrize(
    ("context", "baseline", "owner"),
    [(128, 2048, "the model"), (2048, 128, "the baseline"), (None, 128, "the baseline")],
)
def test_windows_of_the_suite_are_no_longer_than_the_smaller_context(
    context: int | None, baseline: int, owner: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    found = plan(tokenizer, context, baseline)
    assert found.suite.window_length == 128
    assert {len(window.tokens) for window in material(found).texts[0].windows} == {128}
    assert any(f"windows of 128 tokens instead of 512: {owner}'s config" in note for note in found.notes)
    beyond = f"is over the 128 tokens of context that {owner}'s config .*, or add evaluation.allow_extrapolation: true"
    with pytest.raises(RequestError, match=f"^evaluation.window_length: 256 {beyond}"):
        plan(tokenizer, context, baseline, window_length=256)
    with pytest.raises(RequestError, match=f"^evaluation.lengths: 512 {beyond}"):
        plan(tokenizer, context, baseline, lengths=[512])
    assert plan(tokenizer, context, baseline, allow_extrapolation=True).suite.window_length == 512


@pytest.mark.parametrize("value", [0, -1, 512.0, "2048", True])
def test_a_context_that_is_no_number_of_tokens(value: object, tokenizer: PreTrainedTokenizerBase) -> None:
    for contexts, owner in (((value, 2048), "the model"), ((2048, value), "the baseline")):
        with pytest.raises(RequestError, match=f"{owner}'s config.json gives max_position_embeddings = .*at least 1"):
            plan(tokenizer, *contexts)


def test_fewer_prompts_than_asked_for_are_said(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"text": "word " * size, "value": "x"} for size in (10, 20, 800)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8-sig")
    made = material(plan(tokenizer, tasks=["completion", "recall"], samples=3, completion=str(path)))
    assert made.notes == ("completion at 512 tokens: 2 of 3 prompts, as no more fit",)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"completion": "{file}"}, f"completion {IDLE} the task completion to evaluation.tasks, or leave it out"),
        ({"haystack": "{file}"}, f"haystack {IDLE} a task that hides needles in text"),
        ({"haystack": "/dev/zero", "tasks": ["niah_single_2"]}, "the haystack /dev/zero is a device, not a file; give"),
        ({"lm_eval_tasks": "{file}"}, f"lm_eval_tasks {IDLE} lm_eval:NAME to evaluation.tasks"),
        ({"stride": 8}, f"stride {IDLE} evaluation.windowing: sliding, or"),
        ({"windowing": "sliding", "stride": 512}, "a stride of 512 does not fit windows of 512 tokens"),
        ({"texts": [], "windowing": "rolling"}, f"evaluation.stride or evaluation.windowing {IDLE} a text to"),
        (
            {"tasks": ["vt"], "lengths": [64]},
            "length 64 is too short; .*; raise evaluation.lengths or leave them out of evaluation.tasks",
        ),
    ],
)
def test_requests_that_are_refused(
    settings: dict[str, Any], message: str, tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    file = tmp_path / "file.txt"
    file.write_text("word " * 500)
    named = {key: str(file) if value == "{file}" else value for key, value in settings.items()}
    with pytest.raises(RequestError, match=message):
        plan(tokenizer, **named)


def test_texts_beside_the_section_are_named_once(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(RequestError, match="^texts: demo is named twice; leave one out.$"):
        plan_evaluation(EvaluationSection(), config(2048), tokenizer, 0, ["demo", "demo"])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("absent.txt", None, 'the text ".*absent.txt" does not exist'),
        ("n" * 300, None, "does not exist"),
        ("~nobody-of-that-name/a.txt", None, "does not exist"),
        ("a.csv", "a", r'the text .*a.csv ends in "\.csv"'),
        ("a.jsonl", '{"content": "a"}', "has no field 'text'; .*; rename the field that holds text to 'text'"),
        ("a.txt", "", r"the text .*a\.txt is empty"),
    ],
)
def test_texts_are_not_called_calibration(
    name: str, content: str | None, message: str, tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(RequestError, match=message) as error:
        plan(tokenizer, texts=[name if name.startswith("~") else str(tmp_path / name)])
    assert "calibration" not in str(error.value)
