"""lm-eval's tasks by name and their data: what cannot run is refused before a model is loaded, and soon."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from compressor.errors import RequestError
from compressor.evaluation import lm_eval_tasks
from compressor.evaluation.lm_eval_tasks import check_lm_eval_tasks
from tests.evaluation.local_lm_eval_tasks import TASKS, write_local_tasks, write_task

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def task_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    write_local_tasks(folder)
    return folder


def refusal(names: Sequence[str], include_path: Path | None = None) -> str:
    with pytest.raises(RequestError) as caught:
        check_lm_eval_tasks(names, include_path)
    return str(caught.value)


def test_unknown_task_names_the_nearest(task_folder: Path) -> None:
    assert refusal(["local_choise"], task_folder) == (
        'lm-eval has no task, group or tag "local_choise"; did you mean "local_choice"?'
    )


def test_data_that_are_not_cached_are_refused_at_once_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """At once is without a wait for the Hub, and soon: other processes hold up the clock, but neither of the two."""
    sleep, waited = time.sleep, list[float]()

    def sleep_and_tell(seconds: float) -> None:
        waited.append(seconds)
        sleep(seconds)

    monkeypatch.setattr(time, "sleep", sleep_and_tell)
    start = time.process_time()
    message = refusal(["wikitext", "arc_easy"])
    assert time.process_time() - start < 30  # of which the index of lm-eval's tasks takes most
    assert sum(waited) < 1
    assert message.startswith(
        "the data of the lm-eval task wikitext are not in the cache and the Hub is offline (HF_HUB_OFFLINE): "
    )
    assert message.endswith("; go online with HF_HUB_OFFLINE unset, or leave the task out.")


def test_a_hub_that_does_not_answer_is_named_before_any_retry(task_folder: Path) -> None:
    """A task in Python code, a tag, a leaf and a local task; nothing listens on the port."""
    script = (
        "from pathlib import Path\nfrom compressor.errors import RequestError\n"
        "from compressor.evaluation.lm_eval_tasks import check_lm_eval_tasks\n"
        "names = ['squad_completion', 'ai2_arc', 'local_page', 'mmlu_virology']\n"
        f"try:\n    check_lm_eval_tasks(names, Path({str(task_folder)!r}))\n"
        "except RequestError as error:\n    print(error)\n"
    )
    environment = os.environ | {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9"}
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.startswith(
        "the data of the lm-eval tasks squad_completion, ai2_arc, mmlu_virology are on the Hugging Face Hub, "
        "and http://127.0.0.1:9 cannot be reached ("
    )
    assert done.stdout.endswith("); go online, or set HF_HUB_OFFLINE=1 if they are in the cache.\n")
    assert "Retrying" not in done.stderr


def test_a_task_file_that_cannot_be_set_up(tmp_path: Path) -> None:
    write_task(
        tmp_path, "no_data", TASKS["local_choice"][1] | {"dataset_kwargs": {"data_files": {"test": "gone.jsonl"}}}
    )
    assert refusal(["no_data"], tmp_path).startswith("the data of the lm-eval task no_data cannot be read (")
    data = tmp_path / "rows.jsonl"
    data.write_text('{"a": 1}\n')
    write_task(tmp_path, "bad_field", {"dataset_kwargs": {"data_files": {"test": str(data)}}, "no_such_field": 1})
    assert refusal(["bad_field"], tmp_path).startswith("the lm-eval task bad_field cannot be set up (TypeError: ")


def test_no_task_and_no_folder(tmp_path: Path) -> None:
    assert refusal([]) == "no lm-eval task is named; name one, such as lm_eval:wikitext."
    assert refusal(["wikitext"], tmp_path / "none") == (
        f"{tmp_path / 'none'} is no folder; give the folder that holds the YAML files of lm-eval tasks."
    )


def test_a_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lm_eval_tasks, "find_spec", lambda name: None if name == "lm_eval" else object())
    assert refusal(["wikitext"]) == (
        "lm-eval tasks need lm_eval, not installed here; run pip install 'linear-attention-compressor[lm-eval]'."
    )
