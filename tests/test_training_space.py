"""Room for the checkpoints of a training and for its result: asked before the work, and lost during it."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from compressor.cli import main
from compressor.errors import RequestError
from compressor.planning import RunOptions
from compressor.recovery.checkpoints import KEPT
from compressor.sweeping import SweepRequest, plan_sweep
from compressor.training_space import TrainingSpace
from tests.test_interruption import file_size_limit
from tests.test_pipeline import compress, make_source, make_text
from tests.tiny_models import read_weights

TRAIN = ["--sequences", "8", "--batch-size", "2", "--sequence-length", "64", "--trainable", "mixers"]
TRAIN += ["--learning-rate", "0.01", "--retrieval-share", "0", "--no-evaluate", "--no-verify", "--device", "cpu"]


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In bfloat16, so that a file of a checkpoint is larger than all that is written into the output."""
    folder = tmp_path_factory.mktemp("cut")
    source = make_source("gated_deltanet", folder / "source", torch.bfloat16)
    assert compress(source, folder / "half", make_text(folder), "--no-refit", "--no-verify", "--no-evaluate") == 0
    return folder / "half"


def most_at_once(present: list[int], steps: int, every: int) -> int:
    """By doing what a run does: write, then remove the oldest of more than are kept."""
    there, most = list(present), len(present)
    for step in range(max(present, default=0) + 1, steps + 1):
        if step % every == 0 or step == steps:
            there.append(step)
            most = max(most, len(there))
            there = there[-KEPT:]
    return most


@pytest.mark.parametrize("every", [1, 2, 3, 7, 10, 99])
@pytest.mark.parametrize("present", [[], [3], [5], [3, 6], [4, 7], [9, 10]])
def test_room_is_asked_for_what_a_run_will_add(present: list[int], every: int, tmp_path: Path) -> None:
    for step in present:
        (tmp_path / f"checkpoint-{step}").mkdir()
    space = TrainingSpace(trained_parameters=10**14, output_bytes=10**17)
    added = most_at_once(present, 10, every) - len(present)
    needed = 100 + added * 1.2
    with pytest.raises(RequestError, match=rf"needs {needed * 1000:.2f} TB and its file system has .* free;"):
        space.refuse_too_little(tmp_path, 10, every)


def test_a_small_disk_is_refused_before_the_training(
    cut: Path, small_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = read_weights(cut)
    mixers = 12 * sum(tensor.numel() for name, tensor in weights.items() if ".attn" in name)
    output = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
    (small_disk / "other").write_bytes(bytes(shutil.disk_usage(small_disk).free - (output + 3 * mixers) + 8_192))
    words = ["recover", str(cut), *TRAIN, "--output-dir", str(small_disk / "out")]
    assert main([*words, "--checkpoint-every", "1"]) == 2
    message = " ".join(capsys.readouterr().err.split())
    expected = rf"room for 3 further checkpoints of {mixers / 1000:.2f} kB each and for the output of "
    assert re.search(
        expected + rf"{output / 1000:.2f} kB: writing .* needs {(output + 3 * mixers) / 1000:.2f} kB", message
    )
    assert not (small_disk / "out").exists()
    assert not list(small_disk.rglob("checkpoint-*"))
    # One checkpoint has room.
    assert main([*words, "--checkpoint-every", "4"]) == 0


def sweep_that_trains(
    cut: Path, output: Path, ratios: tuple[float, ...], table_only: bool = False, **recovery: Any
) -> SweepRequest:
    training = {"train": True, "sequences": 8, "batch_size": 2, "sequence_length": 64, "checkpoint_every": 1}
    settings = {
        "model": str(cut.parent / "source"),
        "selection": {"round_to": 1},
        "calibration": {"source": str(cut.parent / "text.txt"), "samples": 6, "sequence_length": 80},
        "recovery": {**training, "retrieval_share": 0.0, **recovery},
        "export": {"verify": False, "evaluate": False},
        "runtime": {"device": "cpu"},
    }
    return SweepRequest(settings, ratios, ("drrqr",), output, table_only, RunOptions())


def leave_free(disk: Path, room: int) -> None:
    (disk / "other").unlink(missing_ok=True)
    (disk / "other").write_bytes(bytes(shutil.disk_usage(disk).free - room))


def test_a_sweep_that_trains_asks_for_its_checkpoints_beside_all_cuts(
    cut: Path, small_disk: Path, tmp_path: Path
) -> None:
    def request(folder: Path, ratios: tuple[float, ...], table_only: bool = False) -> SweepRequest:
        return sweep_that_trains(cut, folder / "out", ratios, table_only, trainable="mixers")

    cuts = [plan.cut.output_bytes for plan in plan_sweep(request(tmp_path, (0.5, 0.75))).cuts]
    mixers = 12 * sum(tensor.numel() for name, tensor in read_weights(cut).items() if ".attn" in name)
    leave_free(small_disk, sum(cuts) + 3 * mixers - 8_192)
    # The wider of the two has the larger checkpoints, wherever it stands.
    for ratios in ((0.5, 0.75), (0.75, 0.5)):
        with pytest.raises(RequestError, match=r"^ratio 0.5, method drrqr: .* room for 3 further check") as refusal:
            plan_sweep(request(small_disk, ratios))
        assert f"needs {(sum(cuts) + 3 * mixers) / 1000:.2f} kB" in str(refusal.value)
    assert len(plan_sweep(request(small_disk, (0.75, 0.7))).cuts) == 2
    # Cuts of which the figures alone are kept are there one at a time.
    assert len(plan_sweep(request(small_disk, (0.5, 0.75), table_only=True)).cuts) == 2


@pytest.mark.parametrize("ratios", [(0.5, 0.75), (0.75, 0.5), (0.75,)])
def test_a_rank_that_one_cut_of_a_sweep_cannot_have(ratios: tuple[float, ...], cut: Path, tmp_path: Path) -> None:
    """Two heads of 4 channels are 8, where the 8 of the other cut are 16."""
    message = r"^ratio 0.75, method drrqr: a LoRA rank of 16 is over 8, the smaller side of .*; use a rank of at most 8"
    with pytest.raises(RequestError, match=message):
        plan_sweep(sweep_that_trains(cut, tmp_path / "out", ratios, rank=16))
    plans = plan_sweep(sweep_that_trains(cut, tmp_path / "out", ratios, rank=8)).cuts
    assert all(plan.training is not None and plan.training.student.rank == 8 for plan in plans)


def test_a_last_checkpoint_that_cannot_be_written_costs_no_result(
    cut: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["recover", str(cut), *TRAIN]
    assert main([*words, "--output-dir", str(tmp_path / "one")]) == 0
    assert "could not be written" not in capsys.readouterr().out
    with file_size_limit(60_000):
        assert main([*words, "--output-dir", str(tmp_path / "two")]) == 0
        said = " ".join(capsys.readouterr().out.split())
        assert "note: the last checkpoint could not be written to" in said
        assert "should that fail, too, the training has to be done again." in said
        # Not the last one.
        assert main([*words, "--output-dir", str(tmp_path / "three"), "--checkpoint-every", "2"]) == 1
    assert "checkpoint-2 could not be written" in " ".join(capsys.readouterr().err.split())
    one, two = read_weights(tmp_path / "one"), read_weights(tmp_path / "two")
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert any(not torch.equal(two[name], tensor) for name, tensor in read_weights(cut).items())


def test_less_than_a_step_is_refused_and_a_part_of_one_is_told(
    cut: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["recover", str(cut), *TRAIN, "--output-dir", str(tmp_path / "out")]
    assert main([*words, "--sequences", "2", "--batch-size", "16"]) == 2
    message = " ".join(capsys.readouterr().err.split())
    assert (
        "--sequences is 2 and must be at least the 16 of a step; give more, or a --batch-size of at most 2." in message
    )
    assert main([*words, "--sequences", "3", "--batch-size", "2"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "note: 3 sequences are no whole number of steps of 2: the training takes 2 steps, which are 4" in said
    few = ["--retrieval-share", "0.1", "--sequence-length", "512"]
    assert main([*words, "--sequences", "4", "--batch-size", "2", "--overwrite", *few]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "no whole number" not in said
    assert "note: trained on text alone: a retrieval share of 0.1 of 4 sequences is less than one prompt; 10" in said
