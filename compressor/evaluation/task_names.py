"""Names of tasks: the forms of prompts, and those of lm-eval behind them. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

LM_EVAL_PREFIX = "lm_eval:"
SIX_TASKS = {
    "arc_easy": "acc_norm",
    "arc_challenge": "acc_norm",
    "hellaswag": "acc_norm",
    "piqa": "acc_norm",
    "winogrande": "acc",
    "lambada_openai": "acc",
}
"""Task -> the metric of it that the paper averages."""

LM_EVAL_EXAMPLES = (*SIX_TASKS, "wikitext", "lambada", "mmlu", "gsm8k", "boolq", "swde", "fda", "squad_completion")
"""Tasks of lm-eval that are often written without the prefix; listing all of its own takes seconds."""


def split_task_names(names: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Forms of prompts, and tasks of lm-eval: the name that begins with `lm_eval:`, without it, and all after it."""
    first = next((at for at, name in enumerate(names) if name.startswith(LM_EVAL_PREFIX)), len(names))
    return tuple(names[:first]), tuple(name.removeprefix(LM_EVAL_PREFIX) for name in names[first:])
