"""Result files of runs side by side become one."""

from __future__ import annotations

import json

import pytest

from tests.evaluation.state_tracking.test_trainer import run_command


def test_results_of_runs_side_by_side_become_one_file(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    shape = "--device cpu --hidden-size 16 --num-heads 2 --head-dim 8 --steps 1 --batch-size 4 --test-samples 4"
    shape += " --pruning-samples 4 --test-lengths 70 --family delta_net --num-householder 1"
    for number, words in enumerate(("--task parity", "--task s3 --seed 1", "--task parity")):
        run_command(monkeypatch, *f"{shape} {words} --output {tmp_path / f'{number}.json'}".split())
    first, second, again = (json.loads((tmp_path / f"{number}.json").read_text()) for number in range(3))
    parts = [str(tmp_path / f"{number}.json") for number in (1, 2)]
    merged, figure = tmp_path / "0.json", tmp_path / "all.png"
    run_command(monkeypatch, "--merge", *parts, "--output", str(merged), "--figure", str(figure))
    runs_ = json.loads(merged.read_text())["runs"]
    assert runs_ == [{**part["runs"][0], "environment": part["environment"]} for part in (again, second)]
    assert first["runs"][0]["settings"] == runs_[0]["settings"]
    assert figure.stat().st_size > 10_000
    run_command(monkeypatch, "--merge", *parts, "--output", str(merged))
    assert json.loads(merged.read_text())["runs"] == runs_
    capsys.readouterr()
    (tmp_path / "other.json").write_text('{"model": 1}')
    for words, message in (
        (["--merge", *parts], "--merge needs --output"),
        (["--merge", str(tmp_path / "other.json"), "--output", str(merged)], "other.json holds no runs"),
    ):
        with pytest.raises(SystemExit) as exit_:
            run_command(monkeypatch, *words)
        assert exit_.value.code == 2
        assert message in capsys.readouterr().err
    assert json.loads(merged.read_text())["runs"] == runs_
