"""Result files of runs side by side become one."""

from __future__ import annotations

import json

import pytest

from benchmarks.state_tracking.merging import merge, run_key
from tests.evaluation.state_tracking.test_trainer import run_command
from tests.test_interruption import file_size_limit


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


MODEL = {"family": "delta_net", "hidden_size": 16, "initial_beta": None}
TRAINING = {"steps": 1, "batch_size": 4, "shortest": 3, "longest": 8, "learning_rate": 0.001, "weight_decay": 0.0}
SETTINGS = {
    "task": "parity", "model": MODEL, "training": TRAINING, "test_lengths": [8], "test_shortest": 8,
    "first_position": 8, "test_samples": 4, "pruning_samples": 4, "test_batch_size": 4, "seed": 0,
}  # fmt: skip
TRAINED = {"settings": SETTINGS, "test": {}, "chance": 0.5}
INSPECTED = {**TRAINED, "betas": [], "heads": [], "solving_head": {}}
WHOLE = {**INSPECTED, "pruning": []}


@pytest.mark.parametrize("first", [TRAINED, INSPECTED, WHOLE])
@pytest.mark.parametrize("second", [TRAINED, INSPECTED, WHOLE])
def test_an_interrupted_run_takes_the_place_of_a_shorter_one_alone(first, second, tmp_path):
    """A whole run replaces all, as the newest one."""
    files = [tmp_path / "first.json", tmp_path / "second.json"]
    for file, run in zip(files, (first, second), strict=True):
        file.write_text(json.dumps({"runs": [run], "environment": file.name}))
    expected = files[second is WHOLE or len(second) > len(first)].name
    for output, parts in ((files[0], files[1:]), (tmp_path / "new.json", files)):
        (found,) = merge(parts, output)
        assert found["environment"] == expected
        assert len(found) == 1 + max(len(first), len(second))
        assert json.loads(output.read_text()) == {"runs": [found]}


def test_settings_that_came_later_have_their_defaults(tmp_path, monkeypatch):
    """A run that was written before them is replaced, and is not made again."""
    older = {**SETTINGS, "model": {name: value for name, value in MODEL.items() if name != "initial_beta"}}
    assert run_key(older) == run_key({**SETTINGS, "training": {**TRAINING, "curriculum": []}})
    for changed in ({"initial_beta": 1.5}, {"depth": 2}):
        assert run_key(older) != run_key({**SETTINGS, "model": {**MODEL, **changed}})
    output = tmp_path / "runs.json"
    command = f"""--output {output} --device cpu --task parity --family delta_net --num-householder 1 --hidden-size 16
        --num-heads 2 --head-dim 8 --steps 1 --batch-size 4 --train-lengths 3 8 --test-lengths 8 --test-samples 4
        --pruning-samples 4""".split()
    run_command(monkeypatch, *command)
    content = json.loads(output.read_text())
    for name in ("initial_beta", "output_gate"):
        del content["runs"][0]["settings"]["model"][name]
    for name in ("curriculum", "cooldown", "time_limit_s"):
        del content["runs"][0]["settings"]["training"][name]
    output.write_text(json.dumps(content))
    run_command(monkeypatch, *command)
    assert json.loads(output.read_text()) == content


WRONG = [
    ({"runs": ["settings"]}, "part.json holds no runs of state tracking (no list of runs)"),
    ({"runs": None}, "(no list of runs)"),
    ([], "(no list of runs)"),
    ({"rows": []}, "(no 'runs')"),
    ({"runs": [{**TRAINED, "settings": {}}]}, "(no 'model')"),
    ({"runs": [{**TRAINED, "settings": {**SETTINGS, "model": 1}}]}, "holds no runs of state tracking ("),
    ({"runs": [{**TRAINED, "settings": {**SETTINGS, "model": {**MODEL, "width": 1}}}]}, "argument 'width'"),
    ({"runs": [{**TRAINED, "settings": {**SETTINGS, "model": {**MODEL, "depth": 99}}}]}, "at depth 99 are not"),
    ({"runs": [{"settings": SETTINGS}]}, "holds a run of which nothing was measured"),
    ({"runs": [{"settings": SETTINGS, "pruning": []}]}, "holds a run of which nothing was measured"),
    ("", "part.json holds no runs of state tracking (Expecting value"),
]


@pytest.mark.parametrize(("content", "message"), WRONG)
def test_a_wrong_part_is_refused_in_a_sentence(content, message, tmp_path, monkeypatch, capsys):
    part, output = tmp_path / "part.json", tmp_path / "output.json"
    part.write_text(content if isinstance(content, str) else json.dumps(content))
    assert message in refused(monkeypatch, capsys, "--merge", str(part), "--output", str(output))
    assert not output.exists()


def test_what_cannot_be_written_is_refused_in_a_sentence(tmp_path, monkeypatch, capsys):
    part, output = tmp_path / "part.json", tmp_path / "output.json"
    part.write_text(json.dumps({"runs": [TRAINED]}))
    merging = ["--merge", str(part), "--output", str(output)]
    assert '".foo" is not drawn' in refused(monkeypatch, capsys, *merging, "--figure", str(tmp_path / "a.foo"))
    with file_size_limit(50):
        assert "output.json cannot be written (File too large)" in refused(monkeypatch, capsys, *merging)
    assert "is a folder or a device" in refused(monkeypatch, capsys, "--merge", str(part), "--output", str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["part.json"]
    figure = tmp_path / "a.png"
    assert "no run is whole" in refused(monkeypatch, capsys, *merging, "--figure", str(figure))
    assert "no run is whole" in refused(monkeypatch, capsys, "--only-figure", "--figure", str(figure))
    new = tmp_path / "new" / "output.json"
    run_command(monkeypatch, "--merge", str(part), "--output", str(new))
    assert json.loads(new.read_text())["runs"] == [{"environment": None, **TRAINED}]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "output.json", "part.json"]


def refused(monkeypatch, capsys, *words):
    """What the command says."""
    with pytest.raises(SystemExit) as exit_:
        run_command(monkeypatch, *words)
    assert exit_.value.code == 2
    told = capsys.readouterr().err
    assert len(told.splitlines()) == 1
    return told
