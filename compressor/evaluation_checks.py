"""What the settings of an evaluation show by themselves to be impossible or idle. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from compressor.errors import RequestError
from compressor.evaluation.stride import require_stride
from compressor.evaluation.suites import choose_suite
from compressor.evaluation_section import EvaluationSection
from compressor.naming import Naming
from compressor.prompts.completion import NAME as COMPLETION
from compressor.prompts.registry import find_task, needs_text


def refuse_impossible_evaluation(section: EvaluationSection, texts: Sequence[str], name: Naming) -> None:
    """Refuse what no model could be measured by; `texts` are those that are read, `name` names a field.

    Raises:
        RequestError: a setting would change nothing, so that its user expects other figures, or the stride does not
            fit the windows.
    """
    suite, of_lm_eval = choose_suite(
        section.suite, section.tasks, section.lengths, section.samples, section.windows, section.window_length,
        section.mode,
    )  # fmt: skip
    cutting = (section.windows, section.window_length, section.stride)
    tasks, windows = name("tasks"), [name(field) for field in ("windows", "window_length", "stride", "windowing")]
    unused = (
        (
            name("completion"),
            section.completion is not None and COMPLETION not in suite.tasks,
            f"the task completion to {tasks}",
        ),
        (
            name("haystack"),
            section.haystack is not None and not any(needs_text(find_task(task)) for task in suite.tasks),
            f"a task that hides needles in text, such as niah_single_2, to {tasks}",
        ),
        (
            name("lm_eval_tasks"),
            section.lm_eval_tasks is not None and not of_lm_eval,
            f"lm_eval:NAME to {tasks}",
        ),
        (
            name("stride"),
            section.stride is not None and section.windowing != "sliding",
            name("windowing", "sliding"),
        ),
        (
            f"{', '.join(windows[:-1])} or {windows[-1]}",
            not texts and (section.windowing != "disjoint" or any(value is not None for value in cutting)),
            f"a text to {name('texts')}",
        ),
    )
    for setting, ignored, remedy in unused:
        if ignored:
            raise RequestError(f"{setting} would change nothing here; add {remedy}, or leave it out.")
    if texts and section.stride is not None:
        require_stride(section.stride, suite.window_length)
