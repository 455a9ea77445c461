"""What a suite asks: tasks, lengths and numbers of prompts and windows. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from compressor.evaluation.task_names import split_task_names

if TYPE_CHECKING:
    from compressor.evaluation.results import Mode

SuiteName = Literal["quick", "full"]


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
    """
    suite = SUITES[name]
    own, others = split_task_names(suite.tasks if tasks is None else tasks)
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
