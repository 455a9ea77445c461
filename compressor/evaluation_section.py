"""What an evaluation can be asked, with its defaults. Imports no torch."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from compressor.errors import RequestError
from compressor.evaluation.task_names import LM_EVAL_EXAMPLES, LM_EVAL_PREFIX, split_task_names
from compressor.prompts.registry import find_task
from compressor.section import Section, Word, once

MOST_TOKENS, MOST_SAMPLES = 2**24, 10**6
"""Of one prompt or window, and of prompts or windows: beyond any model, and below what memory ends at."""

_Length = Annotated[int, Field(ge=1, le=MOST_TOKENS)]


def _known_tasks(names: list[str]) -> list[str]:
    """The names, none of them twice among its kind, and of forms that there are."""
    own, of_lm_eval = split_task_names(names)
    once(list(own))
    once(list(of_lm_eval))
    if "" in of_lm_eval:
        raise ValueError(
            f"no name stands after {LM_EVAL_PREFIX} where one is needed; write {LM_EVAL_PREFIX}NAME, such as "
            f"{LM_EVAL_PREFIX}wikitext, or leave it out."
        )
    for name in own:
        _refuse_unknown_form(name)
    return names


def _refuse_unknown_form(name: str) -> None:
    try:
        find_task(name)
    except RequestError as error:
        nearest = get_close_matches(name.lower(), LM_EVAL_EXAMPLES, n=1, cutoff=0.8)
        if not nearest:
            raise ValueError(str(error)) from None
        raise ValueError(
            f'unknown task "{name}"; did you mean {LM_EVAL_PREFIX}{nearest[0]}? Tasks of lm-eval come last, the first '
            f"of them with {LM_EVAL_PREFIX} before it."
        ) from None


class EvaluationSection(Section):
    """What is measured of a model. None takes the suite's own value."""

    suite: Literal["quick", "full"] = "quick"
    tasks: Annotated[list[Word], Field(min_length=1), AfterValidator(_known_tasks)] | None = None
    """Prompt forms by name; `lm_eval:NAME` and all after it are tasks of lm-eval."""
    lengths: Annotated[list[_Length], Field(min_length=1), AfterValidator(once)] | None = None
    """Tokens of prompt and output together."""
    samples: int | None = Field(default=None, ge=1, le=MOST_SAMPLES)
    """Prompts of each task at each length."""
    mode: Literal["teacher-forced", "generation"] | None = None
    texts: Annotated[list[Word], AfterValidator(once)] = Field(default=[])
    """Held-out text: .txt/.jsonl/.parquet files, folders, Hub data sets, or demo."""
    windows: int | None = Field(default=None, ge=1, le=MOST_SAMPLES)
    """Most windows read of each text."""
    window_length: int | None = Field(default=None, ge=2, le=MOST_TOKENS)
    windowing: Literal["disjoint", "sliding", "rolling"] = "disjoint"
    """sliding: overlapping windows; rolling: as lm-eval's loglikelihood_rolling."""
    stride: int | None = Field(default=None, ge=1, le=MOST_TOKENS)
    """New tokens of each sliding window; half the window by default."""
    batch_size: int = Field(default=32, ge=1, le=MOST_SAMPLES)
    haystack: Word | None = None
    """Text file that text haystacks are cut from; the bundled text by default."""
    completion: Word | None = None
    """JSON or JSONL file with the fields text and value; the bundled passages by default."""
    lm_eval_tasks: Word | None = None
    """Folder of further task YAML files for lm-eval."""
    allow_extrapolation: bool = False
    """Ask beyond the context length that the config names."""
