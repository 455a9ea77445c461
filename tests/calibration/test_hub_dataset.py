"""Data sets of the Hub, without a network: streams of the real library, and the errors it really raises."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
from datasets.exceptions import DatasetNotFoundError
from huggingface_hub import HfApi
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.utils import httpx

from compressor.calibration.documents import TextDocument
from compressor.calibration.text import TextSource, open_documents
from compressor.errors import RequestError, RunError
from compressor.recipe import DEFAULT_DATA_SET

ROOT = Path(__file__).resolve().parents[2]
SOURCE = TextSource("org/name", config="small", split="validation")


def stand_in(monkeypatch: pytest.MonkeyPatch, answer: Callable[[], object]) -> list[tuple[object, ...]]:
    """Let the Hub answer with `answer`; returns the list of what it was asked."""
    asked: list[tuple[object, ...]] = []

    def load_dataset(name: str, config: str | None, *, split: str, streaming: bool) -> object:
        asked.append((name, config, split, streaming))
        return answer()

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return asked


def raising(error: Exception) -> Callable[[], object]:
    def answer() -> object:
        raise error

    return answer


def http_error(kind: type[Any], status: int) -> Exception:
    request = httpx.Request("GET", "https://huggingface.co/api/datasets/org/name")
    error: Exception = kind("the Hub's own words.", response=httpx.Response(status, request=request))
    return error


def refusal(source: TextSource = SOURCE) -> str:
    with pytest.raises(RequestError) as caught:
        open_documents(source)
    return str(caught.value)


def test_rows_are_streamed_with_the_needed_column_only(monkeypatch: pytest.MonkeyPatch) -> None:
    table = datasets.Dataset.from_dict({"text": ["one", None, "two\r\n"], "id": [1, 2, 3]})
    asked = stand_in(monkeypatch, table.to_iterable_dataset)
    stream = open_documents(SOURCE)
    assert list(stream) == [TextDocument(("one",)), TextDocument(("two\n",))]
    assert stream.problems() == ("1 of 3 rows has no text in 'text' (first: row 2)",)
    assert set(asked) == {("org/name", "small", "validation", True)}


def test_a_data_set_without_the_column_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, datasets.Dataset.from_dict({"body": ["one"], "id": [1]}).to_iterable_dataset)
    assert "org/name has no field 'text'; fields found: body, id;" in refusal()


def test_columns_may_be_unknown_before_the_first_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def rows() -> Iterator[dict[str, object]]:
        yield {"text": "one", "id": 1}

    stand_in(monkeypatch, lambda: datasets.IterableDataset.from_generator(rows))
    assert list(open_documents(SOURCE)) == [TextDocument(("one",))]


def test_a_stream_that_breaks_off_is_a_failed_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def rows() -> Iterator[dict[str, object]]:
        yield {"text": "one"}
        raise ConnectionError("Server Disconnected")

    stand_in(monkeypatch, lambda: datasets.IterableDataset.from_generator(rows))
    stream = open_documents(SOURCE)
    with pytest.raises(RunError, match=r'^the Hub data set "org/name" broke off after row 1 \(Server Disconnected\); '):
        list(stream)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            http_error(GatedRepoError, 403),
            'the Hub data set "org/name" is gated: accept its licence at https://huggingface.co/datasets/org/name '
            "and log in with `hf auth login`.",
        ),
        (
            http_error(RepositoryNotFoundError, 404),
            'no file or folder "org/name" exists, and no Hub data set of that name that you may read; '
            "check the name, or log in with `hf auth login`.",
        ),
        (
            DatasetNotFoundError("Dataset 'org/name' doesn't exist on the Hub or cannot be accessed."),
            'no file or folder "org/name" exists, and no Hub data set of that name that you may read; '
            "check the name, or log in with `hf auth login`.",
        ),
        (
            httpx.ConnectError("Name or service not known"),
            '"org/name" is no local file or folder, and the Hub data set of that name cannot be reached '
            '(Name or service not known); go online with HF_HUB_OFFLINE unset, or use a local file or "demo".',
        ),
        (
            ValueError("Bad split: validation. Available splits: ['train']\n"),
            'the Hub data set "org/name" cannot be streamed with config "small" and split "validation" '
            "(Bad split: validation. Available splits: ['train']); choose another config, split or source.",
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_the_hub_refuses_is_one_sentence(monkeypatch: pytest.MonkeyPatch, error: Exception, message: str) -> None:
    stand_in(monkeypatch, raising(error))
    assert refusal() == message


@pytest.mark.parametrize(
    ("kind", "status", "message"),
    [
        (GatedRepoError, 401, "is gated: accept its licence"),
        (GatedRepoError, 403, "is gated: accept its licence"),
        (RepositoryNotFoundError, 404, "check the name, or log in"),
        (RevisionNotFoundError, 404, "check the name, or log in"),
    ],
)
def test_errors_of_the_hub_as_the_library_hands_them_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: type[Any], status: int, message: str
) -> None:
    def hf_hub_download(*_: object, **__: object) -> str:
        raise http_error(kind, status)

    monkeypatch.setattr(HfApi, "hf_hub_download", hf_hub_download)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    assert message in refusal()


def test_offline() -> None:
    name = DEFAULT_DATA_SET
    code = f"from compressor.calibration.text import *; open_documents(TextSource({name!r}))"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    child = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert child.returncode != 0
    assert f'RequestError: "{name}" is no local file or folder, and the Hub data set' in child.stderr
    assert "HF_HUB_OFFLINE unset" in child.stderr


def test_local_sources_need_none_of_the_heavy_libraries() -> None:
    code = (
        "import sys; from compressor.calibration.text import *; open_documents(TextSource('demo')); "
        "print({'torch', 'transformers', 'datasets', 'huggingface_hub'} & sys.modules.keys())"
    )
    child = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert child.stdout == "set()\n"
