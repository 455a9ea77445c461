"""What a suite asks: tasks, lengths and numbers of prompts and windows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from compressor.errors import RequestError
from compressor.evaluation.results import Mode

SuiteName = Literal["quick", "full"]
LM_EVAL_PREFIX = "lm_eval:"


@dataclass(frozen=True, slots=True)
class Suite:
    """`lengths` are tokens of prompt and output; a text is read in at most `windows` windows of `window_length`."""

    name: str
    tasks: tuple[str, ...]
    lengths: tuple[int, ...]
    samples: int
    windows: int
    window_length: int
    mode: Mode


SUITES: Mapping[SuiteName, Suite] = {
    "quick": Suite("quick", ("niah_single_1", "vt", "recall", "fwe"), (512,), 24, 16, 512, "teacher-forced"),
    "full": Suite(
        "full",
        (
            "niah_single_1",
            "niah_single_2",
            "niah_single_3",
            "niah_multikey_1",
            "niah_multikey_2",
            "niah_multikey_3",
            "niah_multivalue",
            "niah_multiquery",
            "vt",
            "cwe",
            "fwe",
            "recall",
            "completion",
        ),
        (2048,),
        256,
        64,
        2048,
        "generation",
    ),
}


def choose_suite(
    name: SuiteName,
    tasks: Sequence[str] | None,
    lengths: Sequence[int] | None,
    samples: int | None,
    windows: int | None,
    window_length: int | None,
    mode: Mode | None,
) -> tuple[Suite, tuple[str, ...]]:
    """The suite with what is given in place of its own, and the lm-eval tasks that were among `tasks`.

    The name that begins with `lm_eval:` and all after it are lm-eval's: `vt,lm_eval:wikitext,piqa`.

    Raises:
        RequestError: a task or a length is named twice, or nothing stands after `lm_eval:`.
    """
    suite = SUITES[name]
    own, others = _split_tasks(suite.tasks if tasks is None else tasks)
    for option, values in (("--tasks", own), ("--tasks", others), ("--lengths", lengths or ())):
        refuse_doubles(option, values)
    suite = replace(
        suite,
        tasks=own,
        lengths=suite.lengths if lengths is None else tuple(lengths),
        samples=suite.samples if samples is None else samples,
        windows=suite.windows if windows is None else windows,
        window_length=suite.window_length if window_length is None else window_length,
        mode=mode or suite.mode,
    )
    return suite, others


def _split_tasks(names: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    first = next((at for at, name in enumerate(names) if name.startswith(LM_EVAL_PREFIX)), len(names))
    others = [name.removeprefix(LM_EVAL_PREFIX) for name in names[first:]]
    if "" in others:
        raise RequestError(
            f"--tasks has no name after {LM_EVAL_PREFIX} where one is needed; write {LM_EVAL_PREFIX}NAME, such as "
            f"{LM_EVAL_PREFIX}wikitext, or leave it out."
        )
    return tuple(names[:first]), tuple(others)


def refuse_doubles(option: str, values: Sequence[str] | Sequence[int]) -> None:
    """Raises RequestError where a value that was given stands there twice, of which one would be measured."""
    for value, count in Counter(values).items():
        if count > 1:
            raise RequestError(f"{option} names {value} twice; leave one out.")
