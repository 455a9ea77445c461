"""What a recipe shows by itself to be impossible: `compress validate` says all of it, as the run itself would."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from compressor.cli import main
from compressor.flat_settings import names_of_flat
from compressor.naming import key_of, names_of, option_of
from tests.test_advised_options import options_in

RATIO = "selection: {ratio: 0.5}\n"


def written(folder: Path, text: str) -> Path:
    recipe = folder / "recipe.yaml"
    recipe.write_text(text if "selection:" in text else RATIO + text, encoding="utf-8")
    return recipe


def refusal(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err.removeprefix("compress: error: ")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("evaluation: {tasks: [recall, vt, recall]}", "evaluation.tasks: recall is named twice; leave one out."),
        ("evaluation: {tasks: [vt, lm_eval:piqa, piqa]}", "evaluation.tasks: piqa is named twice"),
        ("evaluation: {lengths: [512, 512]}", "evaluation.lengths: 512 is named twice"),
        ("calibration: demo", 'calibration: "demo" is no section; write its settings below it, each as NAME: VALUE'),
        ("calibration: [1]", 'calibration: "[1]" is no section'),
        ("calibration: {column: ''}", 'calibration.column: "" is empty'),
        ("recovery: {split: ''}", 'recovery.split: "" is empty'),
        (
            "calibration: {samples: 10000000000}",
            "calibration.samples: Input should be less than or equal to 1000000000",
        ),
        ("recovery: {sequence_length: 99999999}", "recovery.sequence_length: Input should be less than or equal to"),
        ("selection: {ratio: 0.5, method: drrq}", "selection.method: Unknown method 'drrq': did you mean drrqr?"),
        ("selection: {ratio: 0.5, f: .inf}", "selection.f: Input should be a finite number"),
        ("selection: {ratio: 0.5, target_dim: 8}", "exactly one of selection.ratio (share removed), selection.target_"),
        (
            "recovery: {train: true, save_adapter: ~nobody-there/x}",
            "this machine knows no home folder of ~nobody-there",
        ),
        ("evaluation: {texts: [demo, demo]}", "evaluation.texts: demo is named twice"),
        ("recovery: {targets: [o_proj, o_proj]}", "recovery.targets: o_proj is named twice"),
        ("recovery: {targets: []}", "recovery.targets: name at least one"),
        ("recovery: {alpha: .inf}", "recovery.alpha: Input should be a finite number"),
        ("evaluation: {tasks: [recal]}", 'evaluation.tasks: unknown task "recal"; did you mean recall?'),
        ("evaluation: {tasks: [niah_keys_99]}", "evaluation.tasks: task niah_keys_99: 99 is outside 1 to 32"),
        ("evaluation: {tasks: ['lm_eval:']}", "evaluation.tasks: no name stands after lm_eval: where one is needed"),
        ("evaluation: {windows: 4}", "would change nothing here; add a text to evaluation.texts, or leave it out."),
        ("evaluation: {haystack: x.txt}", "evaluation.haystack would change nothing here; add a task"),
        (
            "evaluation: {texts: [demo], windowing: sliding, stride: 512}",
            "a stride of 512 does not fit windows of 512 tokens",
        ),
        ("revision: main", "revision: main belongs to a Hub model; name one, or leave it out"),
        ("calibration: {samples: 1}", "calibration.samples: 1 leaves none to choose the ridge of the refit by; give"),
        ("recovery: {train: true, sequences: 8}", "recovery.sequences is 8 and must be at least the 16 of a step"),
        ("recovery: {train: true, final_learning_rate: 0.1}", "recovery.final_learning_rate is 0.1 and must be at"),
        (
            "recovery: {train: true, batch_size: 4, micro_batch_size: 8}",
            "recovery.micro_batch_size is 8 and must be at most the recovery.batch_size of 4; lower it.",
        ),
        (
            "recovery: {train: true, kl_weight: 0}",
            "recovery.kl_weight, recovery.cross_entropy_weight and recovery.matching_weight are all 0, and one must",
        ),
        ("recovery: {gradient_norm: .inf}", "recovery.gradient_norm: Input should be a finite number"),
        (
            "recovery: {train: true, evaluate_every: 5}\nexport: {evaluate: false}",
            "recovery.evaluate_every: 5 has nothing to measure with export.evaluate: false; leave one of the two out.",
        ),
        (
            "recovery: {train: true, trainable: mixers, targets: [o_proj, k_proj]}",
            "recovery.targets: o_proj,k_proj chooses modules for LoRA, and recovery.trainable: mixers trains every",
        ),
        ("recovery: {save_adapter: x}", "recovery.save_adapter: x: this run trains nothing; add recovery.train: true"),
        (
            "selection: {ratio: 0}\nrecovery: {train: true, save_adapter: x}",
            "this run trains nothing; add recovery.train: true and cut at least one channel",
        ),
        ("recovery: {train: true, save_adapter: x, trainable: mixers}", "recovery.trainable: mixers trains no adapter"),
        ("output_dir: out\nrecovery: {train: true, save_adapter: out/x}", "recovery.save_adapter: out/x is in the"),
        (
            "calibration: {low_memory: true}\nexport: {verify: false}",
            "calibration.low_memory: true has one layer in memory, and these need whole models: refit, evaluation; add "
            "recovery.refit: false, export.evaluate: false, and",
        ),
        (
            "selection: {ratio: 0.5, method: fisher}\nexport: {verify: false}\n"
            "runtime: {device_map: auto, device: cpu}",
            "runtime.device_map: auto runs no backward passes, and the method fisher needs them through the whole "
            "model; use selection.method: drrqr or energy.",
        ),
    ],
)
def test_what_a_run_refuses_of_a_recipe_alone(
    text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = str(written(tmp_path, text))
    said = refusal(["validate", recipe], capsys)
    assert all(line.startswith(f"{recipe}: ") for line in said.splitlines())
    assert message in said
    assert options_in(said) == set()
    run = refusal(["--recipe", recipe], capsys)
    assert run.replace(f"{recipe}: ", "") == said.replace(f"{recipe}: ", "")
    assert list(tmp_path.iterdir()) == [tmp_path / "recipe.yaml"]


@pytest.mark.parametrize(
    "text",
    [
        "evaluation: {tasks: [vt, lm_eval:vt]}",
        "evaluation: {haystack: x.txt, windows: 4}\nexport: {evaluate: false}",
        "evaluation: {texts: [demo], windows: 4, windowing: sliding, stride: 511}",
        "recovery: {sequences: 8, evaluate_every: 5}\nexport: {evaluate: false}",
        "selection: {ratio: 0}\nrecovery: {train: true, sequences: 8}\ncalibration: {samples: 1}",
        "recovery: {train: true, batch_size: 4, micro_batch_size: 4}",
        "runtime: {device_map: auto}\nexport: {verify: false}",
        "calibration: {low_memory: true}\nrecovery: {refit: false}\nexport: {evaluate: false, verify: false}",
    ],
)
def test_what_some_machine_can_run_is_valid(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = written(tmp_path, text)
    assert main(["validate", str(recipe)]) == 0
    assert capsys.readouterr().out == f"{recipe} is valid\n"


def test_all_is_said_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = written(tmp_path, "revision: v1\nevaluation: {windows: 4}\nrecovery: {train: true, sequences: 8}")
    assert len(refusal(["validate", str(recipe)], capsys).splitlines()) == 3


def test_options_over_a_recipe_are_called_as_they_were_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = str(written(tmp_path, "calibration: {low_memory: true}\nruntime: {dtype: float8}"))
    said = refusal(["--recipe", recipe, "--scoring", "v"], capsys).splitlines()
    assert [line.removeprefix(f"{recipe}: ").partition(": ")[0] for line in said] == ["--scoring", "runtime.dtype"]
    said = refusal(["--recipe", recipe, "--dtype", "float32", "--no-evaluate", "--norm-epsilon", "auto"], capsys)
    assert "calibration.low_memory: true has one layer in memory" in said
    assert "refit, verification; add recovery.refit: false, export.verify: false, and" in said
    assert "and --norm-epsilon auto looks at passes" in said


def test_recover_calls_a_setting_as_it_was_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = str(written(tmp_path, "recovery: {rank: 0, batch_size: 0}\nruntime: {dtype: float8}"))
    said = refusal(["recover", "absent", "--recipe", recipe, "--batch-size", "-1", "--seed", "-1"], capsys).splitlines()
    names = [line.partition(": ")[0] for line in said]
    assert sorted(names) == ["--batch-size", "--seed", "recovery.rank", "runtime.dtype"]
    said = refusal(["recover", "absent", "--targets", "a,b,a", "--text", ""], capsys).splitlines()
    assert said[1:] == ["--targets: a is named twice; leave one out."]
    assert said[0].startswith('--text: "" is empty')
    idle = ["recover", "absent", "--evaluate-every", "3", "--no-evaluate"]
    assert refusal(idle, capsys).startswith("--evaluate-every 3 has nothing to measure with --no-evaluate; leave one")
    recipe = str(written(tmp_path, "recovery: {targets: [o_proj]}"))
    said = refusal(["recover", "absent", "--recipe", recipe, "--trainable", "mixers"], capsys)
    assert said.startswith("recovery.targets: o_proj chooses modules for LoRA, and --trainable mixers trains every")


def test_lengths_of_a_recipe_are_called_by_their_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = str(written(tmp_path, "calibration: {sequence_length: 4096}"))
    said = refusal(["--recipe", recipe, "--output-dir", str(tmp_path / "out"), "--device", "cpu"], capsys)
    assert said.startswith("calibration.sequence_length: 4096 is over the model's 2048 positions")
    recipe = str(written(tmp_path, "evaluation: {tasks: [vt], lengths: [4096]}"))
    said = refusal(["--recipe", recipe, "--output-dir", str(tmp_path / "out"), "--device", "cpu"], capsys)
    assert said.startswith("evaluation.lengths: 4096 is over the 2048 tokens of context")
    assert "or add evaluation.allow_extrapolation: true." in said


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("selection: {target_dim: 99}", "selection.target_dim: 99 is more than the 64 key channels a head has"),
        (
            "selection: {ratio: 0.5, round_to: 999}",
            "which selection.round_to: 999 rounds to 0; use a smaller ratio or s",
        ),
        (
            "selection: {target_state_bytes: '1'}",
            "selection.target_state_bytes asks for 1 bytes a sequence and 16 of 64",
        ),
        ("runtime: {device: 'cuda:99'}", "runtime.device: cuda:99: torch sees"),
        (
            "calibration: {sequence_length: 8, retrieval_share: 1}",
            "raise calibration.sequence_length to 231 or more, or give calibration.retrieval_share: 0.",
        ),
        (
            "recovery: {train: true, sequence_length: 8}",
            "recovery.sequence_length: 8 is too short for retrieval prompts: the shortest form needs 231 tokens",
        ),
        ("recovery: {train: true, source: absent.txt}", 'the training source "absent.txt" does not exist'),
        ("calibration: {samples: 2, sequence_length: 8}", "raise calibration.samples, or give recovery.refit: false."),
        (
            "calibration: {samples: 2, sequence_length: 8}\nrecovery: {refit: false}",
            "640 are needed; raise calibration.samples or calibration.sequence_length.",
        ),
        (
            "selection: {ratio: 0.5, method: gradient}\ncalibration: {samples: 100000000, batch_size: 100000000}",
            "GB free; lower calibration.batch_size or calibration.sequence_length, or choose a method without",
        ),
        ("output_dir: ~nobody-there/x", "this machine knows no home folder of ~nobody-there; write the path out."),
    ],
)
def test_a_plan_calls_the_settings_of_a_recipe_by_their_keys(
    text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    if "evaluate" not in text:
        text += "\nexport: {evaluate: false, verify: false}"
    said = refusal(["--recipe", str(written(tmp_path, text)), "--dry-run"], capsys)
    assert message in said
    assert options_in(said) == set()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("selection: {target_dim: " + "9" * 5000 + "}", "has a number or a date that cannot be (Exceeds the limit"),
        (
            "model: 2020-13-01",
            "has a number or a date that cannot be (month must be in 1..12); correct it, or write it",
        ),
        ('output_dir: "a\\0b"', "is not valid YAML: a word has a zero byte"),
    ],
)
def test_values_that_yaml_cannot_give(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refusal(["validate", str(written(tmp_path, text))], capsys)
    assert message in said
    assert "sys.set_int_max_str_digits" not in said


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("recovery: abc", 'recovery: "abc" is no section; write its settings below it.'),
        ("recovry: {rank: 8}", "recovry is no part of a recipe; did you mean recovery? Known here: model, revision"),
    ],
)
def test_recover_refuses_what_is_no_section(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = str(written(tmp_path, text))
    assert refusal(["recover", "absent", "--recipe", recipe], capsys).startswith(f"{recipe}: {message}")


def test_an_unknown_home_is_refused_by_recover(capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal(["recover", "~nobody-there/x"], capsys).startswith("~nobody-there/x: this machine knows no home")


def test_settings_that_no_option_gives_are_called_by_their_keys() -> None:
    name = names_of_flat({"train": True}, recipe=False)
    assert (name("recovery.train", True), name("recovery.sequence_length", 8)) == (
        "--recover",
        "recovery.sequence_length: 8",
    )
    assert name("calibration.sequence_length", 8) == "--sequence-length 8"


def test_names_of_settings() -> None:
    name = names_of({"calibration.samples", "recovery.train"}, True, {"calibration.samples": "calibration_samples"}, ())
    assert name("calibration.samples", 3) == "--calibration-samples 3"
    assert name("recovery.train", True) == "--recover"
    assert name("export.verify", False) == "export.verify: false"
    assert (option_of("search_rank"), option_of("export.verify", False), option_of("")) == (
        "--search-rank",
        "--no-verify",
        "",
    )
    assert key_of("selection.ratio", 0.5) == "selection.ratio: 0.5"


def test_a_recipe_is_checked_without_torch(tmp_path: Path) -> None:
    """Half a second instead of several."""
    words = ["validate", str(written(tmp_path, "evaluation: {tasks: [vt]}"))]
    code = f"import sys; from compressor.cli import main; print(main({words!r}), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 False", done.stderr
