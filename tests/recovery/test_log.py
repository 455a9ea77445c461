"""The log of a run, and the curve drawn from it."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict
from pathlib import Path

import pytest

from compressor.errors import RequestError, RunError
from compressor.recovery.log import StepRecord, TrainingLog, draw_curve, read_log


def record(step: int, kl: float = 0.5) -> StepRecord:
    return StepRecord(step, 1.0 / step, kl, 2.0, 0.0, 1e-3 * step, 0.7, 128 * step, 0.5 * step, 256.0)


def written(path: Path, steps: int = 6, every: int = 2) -> TrainingLog:
    """An evaluation stands before the first step and after every second."""
    log = TrainingLog(path)
    log.begin(0)
    log.append_evaluation(0, {"kl": 1.5, "memory": 0.1})
    for step in range(1, steps + 1):
        log.append(record(step))
        if step % every == 0:
            log.append_evaluation(step, {"kl": 1.5 / step, "memory": 0.2 * step})
    return log


def kinds(path: Path) -> list[tuple[int, bool]]:
    """Step and whether it is an evaluation, of every line."""
    return [(line["step"], "evaluation" in line) for line in map(json.loads, path.read_text().splitlines())]


def test_every_line_is_one_json_object(tmp_path: Path) -> None:
    log = written(tmp_path / "training.jsonl", steps=2)
    lines = [json.loads(line) for line in log.path.read_text().splitlines()]
    assert lines == [
        {"step": 0, "evaluation": {"kl": 1.5, "memory": 0.1}},
        asdict(record(1)),
        asdict(record(2)),
        {"step": 2, "evaluation": {"kl": 0.75, "memory": 0.4}},
    ]
    assert read_log(log.path) == lines
    assert [path.name for path in tmp_path.iterdir()] == ["training.jsonl"]


def test_a_figure_that_is_no_number_is_null(tmp_path: Path) -> None:
    log = TrainingLog(tmp_path / "training.jsonl")
    log.append_evaluation(1, {"perplexity": math.inf, "kl": math.nan, "memory": 0.5})
    assert json.loads(log.path.read_text())["evaluation"] == {"perplexity": None, "kl": None, "memory": 0.5}


@pytest.mark.parametrize("finished", [0, 1, 4, 6])
def test_a_run_that_goes_on_keeps_what_it_does_not_repeat(finished: int, tmp_path: Path) -> None:
    """The evaluation after the last finished step is repeated, since it may not have come to its end."""
    log = written(tmp_path / "training.jsonl")
    before = kinds(log.path)
    log.begin(finished)
    assert kinds(log.path) == [(step, evaluation) for step, evaluation in before if step < finished + 1 - evaluation]
    log.append(record(finished + 1))
    assert kinds(log.path)[-1] == (finished + 1, False)


def test_a_line_cut_short_is_left_out(tmp_path: Path) -> None:
    log = written(tmp_path / "training.jsonl", steps=3)
    log.path.write_bytes(log.path.read_bytes()[:-40] + b"\n[1]\n\xff\xfe\n")
    assert [line["step"] for line in read_log(log.path)] == [0, 1, 2, 2]
    log.begin(3)
    assert [step for step, _ in kinds(log.path)] == [0, 1, 2, 2]


def test_no_file_reads_as_no_lines(tmp_path: Path) -> None:
    assert read_log(tmp_path / "training.jsonl") == []


def test_a_log_that_cannot_be_written(tmp_path: Path) -> None:
    log = TrainingLog(tmp_path / "absent" / "training.jsonl")
    for write in (lambda: log.begin(0), lambda: log.append(record(1)), log.sync):
        with pytest.raises(
            RunError, match="training.jsonl cannot be written .No such file or directory.; the checkpoi"
        ):
            write()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")  # noqa: PTH110
def test_a_full_disk(tmp_path: Path) -> None:
    path = tmp_path / "training.jsonl"
    path.symlink_to("/dev/full")
    with pytest.raises(
        RunError, match="cannot be written .No space left on device.; the checkpoints beside it are kept"
    ):
        TrainingLog(path).append(record(1))


@pytest.mark.parametrize("name", ["curve.png", "curve.svg"])
def test_the_curve(name: str, tmp_path: Path) -> None:
    log = written(tmp_path / "training.jsonl")
    draw_curve(log.path, tmp_path / name)
    data = (tmp_path / name).read_bytes()
    assert len(data) > 5_000
    if name.endswith("svg"):
        text = data.decode()
        for label in ("loss", "kl", "cross entropy", "memory", "learning rate", "held-out evaluation", "nats a token"):
            assert f"<!-- {label} -->" in text
        assert "<!-- matching -->" not in text  # 0 throughout


def test_the_curve_without_evaluations_or_with_one_step(tmp_path: Path) -> None:
    log = TrainingLog(tmp_path / "training.jsonl")
    log.append(record(1, kl=0.0))
    log.append_evaluation(1, {"kl": math.nan})
    draw_curve(log.path, tmp_path / "one.svg")
    assert "<!-- kl -->" not in (tmp_path / "one.svg").read_text()
    log.begin(1)
    draw_curve(log.path, tmp_path / "none.svg")
    assert "held-out" not in (tmp_path / "none.svg").read_text()


def test_what_cannot_be_drawn(tmp_path: Path) -> None:
    log = TrainingLog(tmp_path / "training.jsonl")
    log.append_evaluation(0, {"kl": 1.0})
    with pytest.raises(
        RequestError, match="training.jsonl holds no training steps to draw; give the log of a run that"
    ):
        draw_curve(log.path, tmp_path / "curve.png")
    log.append(record(1))
    with pytest.raises(RequestError, match="curve.png cannot be written: No such file or directory; choose another"):
        draw_curve(log.path, tmp_path / "absent" / "curve.png")
    with pytest.raises(RequestError, match="curve.txt cannot be written: Format 'txt' is not supported"):
        draw_curve(log.path, tmp_path / "curve.txt")
