from __future__ import annotations

import hashlib
import os
import subprocess
import sys

import pytest

from compressor.errors import RequestError
from compressor.prompts.registry import (
    UNSEEN,
    find_task,
    generate_prompts,
    needs_text,
    task_names,
    task_patterns,
)
from tests.prompts.lm_eval_ruler import count_tokens

DIGEST_PROGRAM = """
import hashlib
from compressor.prompts.registry import find_task, generate_prompts, task_names
digest = hashlib.sha256()
for task in task_names():
    for prompt in generate_prompts(find_task(task), 2, 900, lambda text: len(text) // 3, 7, "evaluation"):
        digest.update(repr(prompt).encode())
print(digest.hexdigest())
"""


def test_every_name_is_found() -> None:
    for name in [*task_names(), "niah_keys_1", "niah_keys_32", "vt_2x3", "cwe_2", "recall_1024"]:
        assert find_task(name).name == name
    assert set(task_patterns()) == {"niah_keys_N", "vt_CxH", "cwe_N", "recall_N"}


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("niah_singel_1", "niah_single_1"),
        ("NIAH_MULTIQUERY", "niah_multiquery"),
        ("recal", "recall"),
        ("niah_keys", "niah_keys_N"),
        ("vt_3", "vt"),
        ("niah_keys_03", "niah_keys_3"),
        ("vt_02x\u0663", "vt_2x3"),
        (f"recall_{'9' * 5000}", "recall_N"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(
        RequestError,
        match=f'^unknown task "{name}"; did you mean {nearest}\\? Known are niah_single_1, .*recall_N; '
        "a task of lm-eval is written lm_eval:NAME.",
    ):
        find_task(name)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("niah_keys_0", "task niah_keys_0: 0 is outside 1 to 32; name a form niah_keys_N within these limits"),
        ("niah_keys_33", "33 is outside 1 to 32"),
        ("vt_1x0", "task vt_1x0: 0 is outside 1 to 32; name a form vt_CxH within these limits"),
        ("cwe_11", "11 is outside 2 to 10"),
        ("recall_1", "1 is outside 2 to 1024"),
    ],
)
def test_numbers_outside_their_limits_are_refused(name: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        find_task(name)


def test_no_prompts_are_refused() -> None:
    with pytest.raises(RequestError, match="0 prompts of vt: at least 1 is needed; raise their number"):
        generate_prompts(find_task("vt"), 0, 900, count_tokens, 0, "evaluation")


@pytest.mark.parametrize("task", sorted(UNSEEN & set(task_names())))
def test_calibration_never_gets_an_unseen_form(task: str) -> None:
    with pytest.raises(RequestError, match=f"task {task} for calibration: .* choose another of niah_single_1, "):
        generate_prompts(find_task(task), 1, 900, count_tokens, 0, "calibration")
    assert generate_prompts(find_task(task), 1, 900, count_tokens, 0, "evaluation")


@pytest.mark.parametrize("constant", [0, 1])
def test_a_tokenizer_without_tokens_is_refused(constant: int) -> None:
    with pytest.raises(RequestError, match="the tokenizer gives 0 tokens for a sentence; name a model folder"):
        generate_prompts(find_task("vt"), 1, 900, lambda text: constant, 0, "evaluation")


def test_a_short_haystack_is_refused() -> None:
    with pytest.raises(
        RequestError,
        match="haystack text of 199 words in 995 characters: .* 100 words each; hand in a longer text",
    ):
        find_task("niah_single_2", "word " * 199)


def test_words_of_a_haystack_are_what_white_space_splits() -> None:
    with pytest.raises(
        RequestError, match="text of 1 words in 900 characters: .* white space between words, where it is"
    ):
        find_task("niah_single_2", "\u6587\u5b57\u3002" * 300)


@pytest.mark.parametrize(("name", "needs"), [("niah_single_2", True), ("niah_multikey_2", False), ("vt", False)])
def test_forms_that_read_a_haystack_text(name: str, needs: bool) -> None:
    assert needs_text(find_task(name)) is needs


def test_the_same_seed_gives_the_same_prompts_in_every_process() -> None:
    digests = [
        subprocess.run(
            [sys.executable, "-c", DIGEST_PROGRAM],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    ]
    assert digests[0] == digests[1]
    assert len(digests[0].strip()) == hashlib.sha256().digest_size * 2


def test_more_prompts_begin_with_the_same_ones() -> None:
    form = find_task("recall")
    few = generate_prompts(form, 3, 900, count_tokens, 0, "evaluation")
    assert generate_prompts(form, 6, 900, count_tokens, 0, "evaluation")[:3] == few
