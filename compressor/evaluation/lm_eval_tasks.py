"""Tasks of lm-eval by name, with their data, before any model is loaded: what cannot run is refused here, and soon."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compressor.errors import RequestError

if TYPE_CHECKING:
    from lm_eval.api.group import Group
    from lm_eval.api.task import Task
    from lm_eval.tasks import TaskManager
    from lm_eval.tasks._index import Entry

HUB_TIMEOUT_S = 5.0
"""How long the Hub may take to answer at all. Its client would try again for 23 s a data set before it gives up."""

# Values of `dataset_path` that are a file format; the files stand under `data_files`.
_FILE_FORMATS = frozenset({"arrow", "csv", "json", "pandas", "parquet", "text", "xml"})


@dataclass(frozen=True)
class LmEvalTasks:
    """Tasks and groups as lm-eval built them, data sets loaded; a run does not change them."""

    names: tuple[str, ...]
    loaded: tuple[Task | Group, ...]
    include_path: Path | None


def check_lm_eval_tasks(tasks: Sequence[str], include_path: Path | None = None) -> LmEvalTasks:
    """Find the tasks, groups or tags of these names and load their data sets, from the cache or from the Hub.

    `include_path` is a folder of further task YAML files, which win over lm-eval's own of the same name.

    Raises:
        RequestError: lm-eval is not installed; there is no task of that name; the Hub cannot be
            reached, or a data set cannot be had from it or from the cache; a task cannot be set up.
    """
    require_lm_eval()
    if not tasks:
        raise RequestError("no lm-eval task is named; name one, such as lm_eval:wikitext.")
    # pathlib raises for a name that is too long.
    if include_path is not None and not os.path.isdir(include_path):  # noqa: PTH112
        raise RequestError(f"{include_path} is no folder; give the folder that holds the YAML files of lm-eval tasks.")
    names = tuple(dict.fromkeys(tasks))
    manager = _task_manager(names, include_path)
    known = set(manager.all_tasks)
    for name in names:
        if name not in known:
            raise RequestError(_unknown(name, manager.all_tasks))
    _require_hub([name for name in names if _reads_hub(manager, name)])
    return LmEvalTasks(names, tuple(item for name in names for item in _load(manager, name)), include_path)


def require_lm_eval() -> None:
    """Raises:
    RequestError: lm-eval, or a library that its wrapper of transformers models needs, is not installed.
    """
    missing = [name for name in ("lm_eval", "accelerate") if find_spec(name) is None]
    if missing:
        raise RequestError(
            f"lm-eval tasks need {' and '.join(missing)}, not installed here; "
            "run pip install 'linear-attention-compressor[lm-eval]'."
        )


def _task_manager(names: Sequence[str], include_path: Path | None) -> TaskManager:
    """Tasks of `include_path` alone where they suffice: lm-eval's own take four seconds to list."""
    from lm_eval.tasks import TaskManager

    if include_path is not None:
        manager = TaskManager(include_path=include_path, include_defaults=False)
        if all(name in manager.task_index and _is_leaf(manager.task_index[name]) for name in names):
            return manager
    return TaskManager(include_path=include_path)


def _is_leaf(entry: Entry) -> bool:
    return entry.yaml_path is not None and isinstance((entry.cfg or {}).get("task"), str)


def _unknown(name: str, known: Sequence[str]) -> str:
    nearest = get_close_matches(name, known, n=1)
    hint = f'did you mean "{nearest[0]}"?' if nearest else "`lm-eval ls tasks` lists them."
    return f'lm-eval has no task, group or tag "{name}"; {hint}'


def _reads_hub(manager: TaskManager, name: str) -> bool:
    """Whether any leaf of the task, group or tag reads a data set that is not on this machine as a file."""
    return any(
        path is None or not (path in _FILE_FORMATS or Path(path).exists())
        for path in _data_paths(manager, name, frozenset())
    )


def _data_paths(manager: TaskManager, name: str, above: frozenset[str]) -> Iterator[str | None]:
    """`dataset_path` of every leaf; None where Python code of the task holds it."""
    entry = manager.task_index.get(name)
    if entry is None or name in above:
        yield None
        return
    config: dict[str, Any] = entry.cfg or {}
    if _is_leaf(entry):
        yield None if "custom_dataset" in config else config.get("dataset_path")
        return
    children: list[Any] = sorted(entry.tags) if entry.yaml_path is None else config.get("task", [])
    for child in children:
        if isinstance(child, str):
            yield from _data_paths(manager, child, above | {name})
        else:
            yield child.get("dataset_path")


def _require_hub(names: Sequence[str]) -> None:
    """Ask the Hub for a sign of life, unless the user said that there is none."""
    from huggingface_hub import constants
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]
    from huggingface_hub.utils import get_session  # type: ignore[attr-defined]

    if not names or constants.HF_HUB_OFFLINE:
        return
    try:
        get_session().head(constants.ENDPOINT, timeout=HUB_TIMEOUT_S)
    # HTTPError is the base class of the HTTP library, which differs between versions of the client.
    except (OSError, HTTPError) as error:
        raise RequestError(
            f"the data of the lm-eval tasks {', '.join(names)} are on the Hugging Face Hub, and {constants.ENDPOINT} "
            f"cannot be reached ({_reason(error)}); go online, or set HF_HUB_OFFLINE=1 if they are in the cache."
        ) from error


def _load(manager: TaskManager, name: str) -> list[Task | Group]:
    with _task_errors(name):
        loaded = manager.load([name])
        groups = loaded.get("groups", {})
        if unsafe := [leaf for leaf, task in loaded["tasks"].items() if task.get_config("unsafe_code")]:
            raise RequestError(
                f"the lm-eval task {unsafe[0]} runs code that the model wrote, which this product does not do; "
                "leave it out."
            )
        return [groups[name]] if name in groups else list(loaded["tasks"].values())


@contextmanager
def _task_errors(name: str) -> Iterator[None]:
    """Turn what task files, their code, `datasets` and the Hub's client raise into one sentence each."""
    from datasets.exceptions import DatasetsError
    from huggingface_hub import constants
    from huggingface_hub.errors import HTTPError, OfflineModeIsEnabled  # type: ignore[attr-defined]
    from jinja2 import TemplateError

    code_errors = (ImportError, TypeError, AttributeError, LookupError, RuntimeError, ValueError, TemplateError)
    try:
        yield
    except ImportError as error:
        raise RequestError(
            f"the lm-eval task {name} needs a package that is not installed ({_reason(error)}); install it."
        ) from error
    except (ConnectionError, OfflineModeIsEnabled, HTTPError) as error:
        state = "the Hub is offline (HF_HUB_OFFLINE)" if constants.HF_HUB_OFFLINE else "the Hub could not be reached"
        raise RequestError(
            f"the data of the lm-eval task {name} are not in the cache and {state}: {_reason(error)}; "
            "go online with HF_HUB_OFFLINE unset, or leave the task out."
        ) from error
    except (OSError, DatasetsError) as error:
        raise RequestError(
            f"the data of the lm-eval task {name} cannot be read ({_reason(error)}); "
            "check the data set and your access to it."
        ) from error
    except code_errors as error:
        raise RequestError(
            f"the lm-eval task {name} cannot be set up ({type(error).__name__}: {_reason(error)}); "
            "check its YAML file, or leave it out."
        ) from error


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__
