"""The trainer learns what theory says it can, and its inspection sees what was put there."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest
import torch

from benchmarks.state_tracking import pace, runs
from benchmarks.state_tracking.__main__ import main
from benchmarks.state_tracking.inspection import (
    HeadSilenced,
    beta_distributions,
    choose_channels,
    masked,
    record_activations,
)
from benchmarks.state_tracking.models import ModelSettings, build_model, mixer_modules, tapped
from benchmarks.state_tracking.pace import Pace, TrainingSettings
from benchmarks.state_tracking.runs import RunSettings
from benchmarks.state_tracking.training import train
from compressor.errors import RequestError
from compressor.evaluation.state_tracking.accuracy import accuracy_by_position
from compressor.evaluation.state_tracking.parity import Parity
from compressor.progress import StageReporter

CPU = torch.device("cpu")
TRAINING = TrainingSettings(150, 32, 16, 16, learning_rate=1e-2, weight_decay=0.0)


def tiny(**changes: object) -> ModelSettings:
    fields = {"family": "delta_net", "hidden_size": 32, "num_heads": 2, "head_dim": 16}
    return ModelSettings(**{**fields, **changes})


def draw_tokens() -> torch.Tensor:
    return Parity().draw(4, 20, 20, torch.Generator().manual_seed(3)).tokens


@pytest.mark.parametrize("negative_eigenvalues", [True, False])
def test_parity_needs_negative_eigenvalues(negative_eigenvalues):
    """Grazzi et al., arXiv:2411.12537, theorem 1."""
    settings = tiny(negative_eigenvalues=negative_eigenvalues)
    model = build_model(settings, 2, seed=0, device=CPU)
    train(model, Parity(), TRAINING, torch.Generator().manual_seed(0), StageReporter(None))
    counts = accuracy_by_position(model, Parity(), 100, 100, 64, 64, torch.Generator().manual_seed(1))
    if negative_eigenvalues:
        assert counts.accuracy(1, 16) > 0.95
        assert counts.accuracy(61, 100) > 0.95
    else:
        assert abs(counts.accuracy(61, 100) - 0.5) < 0.05


@pytest.mark.parametrize("changes", [{}, {"family": "gated_deltaproduct", "num_householder": 2}])
def test_masked_channels_are_those_of_zeroed_rows(changes):
    settings = tiny(**changes)
    model = build_model(settings, 4, seed=0, device=CPU)
    tokens = draw_tokens()
    kept = {0: torch.tensor([[0, 3, 7, 15], [1, 2, 3, 9]])}
    with torch.no_grad():
        with masked(model, settings, kept):
            actual = model(input_ids=tokens, use_cache=False).logits
        mask = torch.zeros(2, 16).scatter_(1, kept[0], 1.0).flatten()
        (mixer,) = mixer_modules(model, settings)
        mixer.q_proj.weight.mul_(mask[:, None])
        mixer.k_proj.weight.mul_(mask.repeat(settings.num_householder)[:, None])
        expected = model(input_ids=tokens, use_cache=False).logits
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("others", [False, True])
def test_a_silenced_head_is_one_whose_output_rows_are_zero(others):
    settings = tiny()
    model = build_model(settings, 4, seed=0, device=CPU)
    with torch.no_grad():
        with tapped(model, settings, HeadSilenced(0, 1, others)):
            actual = model(input_ids=draw_tokens(), use_cache=False).logits
        (mixer,) = mixer_modules(model, settings)
        mixer.o_proj.weight[:, slice(0, 16) if others else slice(16, 32)] = 0
        expected = model(input_ids=draw_tokens(), use_cache=False).logits
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)


def test_principal_components_of_keys_of_known_rank():
    settings = tiny(family="gated_deltaproduct", num_householder=2, num_heads=1)
    model = build_model(settings, 8, seed=0, device=CPU)
    (mixer,) = mixer_modules(model, settings)
    with torch.no_grad():
        rows = mixer.k_proj.weight.unflatten(0, (2, 16))
        rows[:, 3:] = 0
    recorder = record_activations(
        model, settings, torch.randint(8, (8, 20), generator=torch.Generator().manual_seed(0))
    )
    components = recorder.principal_components(layer=0, head=0)
    assert recorder.keys == 8 * 20 * 2
    for name in ("variance_share", "energy_share"):
        assert len(components[name]) == 16
        assert sum(components[name][:3]) == pytest.approx(1, abs=1e-4)
        assert components[name] == sorted(components[name], reverse=True)
    assert components["energy_share"][2] > 0
    for method in ("rrqr", "energy", "random"):
        kept = choose_channels(recorder, method, 3, seed=0)[0]
        assert kept.shape == (1, 3)
        assert kept.tolist() == [[0, 1, 2]] or method == "random"


def test_betas_of_a_head_that_is_set_by_hand():
    settings = tiny(family="gated_deltaproduct", num_householder=2)
    model = build_model(settings, 8, seed=0, device=CPU)
    (mixer,) = mixer_modules(model, settings)
    logits = torch.tensor([-20.0, 0.0, 20.0, 0.0])  # step 0 of heads 0 and 1, then step 1
    with torch.no_grad():
        mixer.b_proj.weight.zero_()
        mixer.b_proj.bias = torch.nn.Parameter(logits)
    found = {(b.step, b.head): b for b in beta_distributions(model, settings, draw_tokens())}
    near = {key: (betas.near_zero, betas.near_one, betas.near_two) for key, betas in found.items()}
    assert near == {(0, 0): (1, 0, 0), (0, 1): (0, 1, 0), (1, 0): (0, 0, 1), (1, 1): (0, 1, 0)}
    assert found[1, 0].histogram[-1] == 1
    assert found[1, 1].quantiles == [1.0] * 7


def test_learning_rate_rises_and_falls():
    cosine = Pace(replace(TRAINING, steps=100))
    factors = [cosine.learning_rate_factor(step) for step in range(100)]
    assert factors[:5] == [0.2, 0.4, 0.6, 0.8, 1.0]
    assert factors[4:] == sorted(factors[4:], reverse=True)
    assert factors[52] > 0.5 > factors[53]
    assert factors[-1] < 0.01


def test_curriculum_goes_on_when_a_length_is_learned_and_ends_when_the_last_is():
    given = Pace(TrainingSettings(200, 4, 16, 16, 1e-2, 0.0, curriculum=(2, 8), cooldown=20))
    seen = []
    step = 0
    while not given.is_over(step):
        seen.append((given.shortest, given.longest, given.batch_size, given.learning_rate_factor(step)))
        # Length 2 is passed at its second look, 8 at its first, 16 at 0.95 not and at 0.99 so.
        given.record(step, torch.tensor(0.89 if step < 10 else 0.91 if step < 30 else 0.95 if step < 40 else 0.99), 0.0)
        step += 1
    assert given.stages == [(2, 0), (8, 20), (16, 30)]
    assert [row[:3] for row in seen[::10]] == [*2 * [(2, 2, 32)], (8, 8, 8), *4 * [(16, 16, 4)]]
    assert [row[3] for row in seen[9:50]] == [1.0] * 41
    assert [row[3] for row in seen[50:]] == pytest.approx([1 - step / 20 for step in range(20)])
    # Nothing learned: every length has its share, and the rate falls in the last 20 of 200 steps.
    stuck = Pace(TrainingSettings(200, 4, 16, 16, 1e-2, 0.0, curriculum=(8,), cooldown=20))
    for step in range(200):
        assert not stuck.is_over(step)
        stuck.record(step, torch.tensor(0.5), 1e6)
    assert stuck.is_over(200)
    assert stuck.stages == [(8, 0), (16, 100)]
    assert (stuck.learning_rate_factor(180), stuck.learning_rate_factor(190)) == (1.0, 0.5)
    late = Pace(TrainingSettings(200, 4, 16, 16, 1e-2, 0.0, cooldown=20, time_limit_s=30.0))
    for step in range(60):
        late.record(step, torch.tensor(0.5), float(step))
    assert [late.is_over(step) for step in (59, 60)] == [False, True]
    # A cosine ends with its steps, however early the task is solved.
    cosine = Pace(TrainingSettings(200, 4, 16, 16, 1e-2, 0.0))
    for step in range(200):
        assert not cosine.is_over(step)
        cosine.record(step, torch.tensor(1.0), 0.0)
    assert cosine.is_over(200)


def test_training_follows_its_pace(monkeypatch):
    monkeypatch.setattr(pace, "PASSED", 0.0)
    monkeypatch.setattr(pace, "SOLVED", 0.0)
    settings = TrainingSettings(60, 2, 4, 4, 1e-2, 0.0, curriculum=(2,), cooldown=5)
    model = build_model(tiny(), 2, seed=0, device=CPU)
    record = train(model, Parity(), settings, torch.Generator().manual_seed(0), StageReporter(None))
    assert record.stages == [(2, 0), (4, 10)]
    assert [step for step, _, _ in record.history][-2:] == [24, 25]


def test_impossible_models_are_refused():
    with pytest.raises(RequestError, match="delta_net has one Householder step a token and no forget gate"):
        tiny(num_householder=2)
    with pytest.raises(RequestError, match="5 Householder steps at depth 1 are not supported; give 1 to 4 and 1 to 10"):
        tiny(family="gated_deltaproduct", num_householder=5)


def run_command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["state_tracking", *arguments])
    main()


def test_command_keeps_finished_runs(tmp_path, monkeypatch, capsys):
    output = tmp_path / "tracking.json"
    command = f"""--output {output} --device cpu --task s3 --negative-eigenvalues on off --hidden-size 16 --num-heads 2
        --head-dim 8 --steps 2 --batch-size 4 --train-lengths 70 70 --test-lengths 70 80 --test-samples 4
        --pruning-samples 4 --checkpoints {tmp_path / "models"}""".split()
    run_command(monkeypatch, *command)
    report = json.loads(output.read_text())
    assert report["environment"].keys() >= {"cpu", "gpu", "versions", "commit"}
    first, second = report["runs"]
    assert [run["settings"]["model"]["negative_eigenvalues"] for run in (first, second)] == [True, False]
    assert first["test"]["accuracy"].keys() == {"70", "80"}
    assert len(first["test"]["accuracy_by_bucket"]) == 5
    assert [(cell["method"], cell["keep"]) for cell in first["pruning"][:4]] == [
        *(("rrqr", 8), ("energy", 8), ("random", 8)),
        ("rrqr", 6),
    ]
    # All channels kept is no change: the same sequences, the same answers.
    assert {tuple(cell["accuracy_by_bucket"]) for cell in first["pruning"][:3]} == {
        tuple(first["test"]["accuracy_by_bucket"])
    }
    assert [(betas["step"], betas["head"]) for betas in first["betas"]] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert all(betas["quantiles"][-1] <= 1 for betas in second["betas"])
    assert len(list((tmp_path / "models").glob("*/model.safetensors"))) == 2
    capsys.readouterr()
    run_command(monkeypatch, *command)
    assert capsys.readouterr().err.count("already measured") == 2
    assert json.loads(output.read_text())["runs"] == report["runs"]


def test_an_interrupted_run_is_kept_and_measured_again(tmp_path, monkeypatch):
    output = tmp_path / "tracking.json"
    command = f"""--output {output} --device cpu --task parity --family delta_net --num-householder 1 --hidden-size 16
        --num-heads 2 --head-dim 8 --steps 1 --batch-size 4 --test-lengths 70 --test-samples 4
        --pruning-samples 4""".split()
    with monkeypatch.context() as interrupted:
        interrupted.setattr(runs, "search_heads", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            run_command(interrupted, *command)
    (partial,) = json.loads(output.read_text())["runs"]
    assert partial["test"]["accuracy"].keys() == {"70"}
    assert "pruning" not in partial
    run_command(monkeypatch, *command)
    (whole,) = json.loads(output.read_text())["runs"]
    assert whole["test"] == partial["test"]
    assert "pruning" in whole


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_command_answers_a_wrong_request_in_one_sentence(monkeypatch, capsys):
    for arguments, message in (
        (["--task", "s7"], "error: Unknown state-tracking task 's7'"),
        (
            ["--test-lengths", "256", "128"],
            "error: test lengths [256, 128], 2048 test and 256 pruning samples: give asc",
        ),
        (["--curriculum", "64", "128"], "error: curriculum [64, 128]: give ascending lengths above 1 and below 128,"),
        (["--time-limit", "10"], "error: --time-limit 10 needs --cooldown"),
        (["--steps", "10", "--cooldown", "11"], "error: 10 steps, cooldown 11: give at least 1 step and a cooldown"),
    ):
        with pytest.raises(SystemExit) as exit_:
            run_command(monkeypatch, *arguments)
        assert exit_.value.code == 2
        assert message in capsys.readouterr().err


def test_figure_has_a_row_a_run(tmp_path):
    pytest.importorskip("matplotlib")
    from benchmarks.state_tracking.figure import draw

    settings = RunSettings("s3", tiny(family="gated_deltaproduct"), TrainingSettings(1, 2, 8, 8, 1e-3, 0.0),
                           (8, 20), 20, 1, 2, 2, 2, seed=0)  # fmt: skip
    *_, result = runs.run(settings, CPU, StageReporter(None), None)
    result = json.loads(json.dumps(result))
    draw([result, {"settings": result["settings"]}], tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000
