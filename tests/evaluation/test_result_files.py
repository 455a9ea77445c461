"""Files that `compress compare` reads: the one it was given, or one sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from compressor.errors import RequestError
from compressor.evaluation.result_files import SCHEMA, read_models
from compressor.evaluation.results import ModelFigures
from tests.evaluation.hand_made_figures import model, task, text

Change = Callable[[dict[str, Any]], object]


def record() -> dict[str, Any]:
    figures = model("m", task("vt", 1, 0, 1), texts=(text("t", [[1.0, 2.0], [3.0]]),), given="a/m")
    data: dict[str, Any] = TypeAdapter(ModelFigures).dump_python(figures, mode="json")
    return {"schema": SCHEMA, "baseline": None, "model": data}


def written(folder: Path, content: dict[str, Any], encoding: str = "utf-8") -> Path:
    path = folder / "result.json"
    path.write_text(json.dumps(content), encoding=encoding)
    return path


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_a_record_comes_back(encoding: str, tmp_path: Path) -> None:
    (figures,) = read_models(written(tmp_path, record(), encoding))
    assert TypeAdapter(ModelFigures).dump_python(figures, mode="json") == record()["model"]


def test_files_from_before_models_were_identified_are_read(tmp_path: Path) -> None:
    content = record()
    del content["model"]["source"]
    assert read_models(written(tmp_path, content))[0].source is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content.pop("schema"), "has schema None and this version reads 1; .*measure again"),
        (lambda content: content.update(schema=2), "has schema 2 and this version reads 1"),
        (lambda content: content.update(schema=True), "has schema True"),
        (lambda content: content["model"].update(key_dim=0), "a key width of 0"),
        (lambda content: content["model"]["tasks"].append(content["model"]["tasks"][0]), "stands there twice"),
    ],
)
def test_records_that_are_not_read(change: Change, message: str, tmp_path: Path) -> None:
    content = record()
    change(content)
    with pytest.raises(RequestError, match=message):
        read_models(written(tmp_path, content))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda task: task.update(scores=[1, float("nan"), 1]), "no figure is NaN or infinite: measure again"),
        (lambda task: task["score"].update(mean=float("inf")), "no figure is NaN or infinite"),
        (lambda task: task.update(scores=[1, 0, 2]), "vt at 512: a score of 2.0, outside 0 to 1; .*measure again"),
        (lambda task: task["token_accuracy"].update(mean=-0.5), "a score of -0.5, outside 0 to 1"),
        (lambda task: task.update(scores=[1, 0]), "2 scores for 3 prompts"),
        (lambda task: task.update(scores=[], samples=0), "0 scores for 0 prompts"),
        (lambda task: task["score"].update(mean=0.5), "a mean of 0.5 that its scores do not have"),
    ],
)
def test_scores_that_do_not_fit(change: Change, message: str, tmp_path: Path) -> None:
    content = record()
    change(content["model"]["tasks"][0])
    with pytest.raises(RequestError, match=message):
        read_models(written(tmp_path, content))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda figures: figures["window_losses"].pop(), "losses of 1 windows and 2 tokens for 2 and 3"),
        (lambda figures: figures["window_losses"][0].update(tokens=5), "losses of 2 windows and 6 tokens"),
        (lambda figures: figures["loss"].update(mean=None), "no loss"),
        (lambda figures: figures["loss"].update(mean=9.0), "a loss of 9.0 that its windows do not have"),
    ],
)
def test_losses_that_do_not_fit(change: Change, message: str, tmp_path: Path) -> None:
    content = record()
    change(content["model"]["texts"][0]["figures"])
    with pytest.raises(RequestError, match=message):
        read_models(written(tmp_path, content))


def test_a_model_folder_is_told_from_a_result(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(RequestError, match="is a model folder without compression.json; run compress evaluate"):
        read_models(tmp_path)
