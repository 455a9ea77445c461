"""What Fisher selection runs at once, and what becomes of it where memory has gone since planning."""

from __future__ import annotations

from pathlib import Path

import pytest

from compressor.cutting import write_cut
from compressor.data_parallel import alone
from compressor.fisher.memory import TooLittleMemoryError
from compressor.needed_statistics import fisher_batch
from compressor.planning import RunOptions, plan_run
from compressor.progress import StageReporter
from compressor.recipe import Recipe
from compressor.session import open_session
from tests.test_pipeline import make_source, make_text


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_source("gated_deltanet", tmp_path_factory.mktemp("source") / "model")


def little_memory(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Path:
    """A machine that says it has 1 MiB free, to Fisher selection alone; the file where it says so."""
    file = folder / "meminfo"
    file.write_text("MemTotal: 2048 kB\nMemAvailable: 1024 kB\n", encoding="ascii")
    monkeypatch.setattr("compressor.fisher.memory._MEMORY_FILE", file)
    return file


@pytest.mark.parametrize("method", ["auto", "fisher"])
def test_memory_that_went_since_planning_ends_only_what_tries_nothing_else(
    method: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {
        "model": str(source),
        "output_dir": str(tmp_path / "out"),
        "selection": {"method": method, "ratio": 0.5, "round_to": 1, "norm_epsilon": "auto"},
        "calibration": {"source": str(make_text(tmp_path)), "samples": 6, "sequence_length": 80},
        "recovery": {"refit": False},
        "runtime": {"device": "cpu"},
        "export": {"evaluate": False},
    }
    options, reporter = RunOptions(), StageReporter(None)
    plan = plan_run(Recipe.from_settings(settings), options)
    plan.resume_folder.mkdir()
    session = open_session([plan], options, alone(), reporter)
    little_memory(monkeypatch, tmp_path)
    folder = tmp_path / "cut"
    folder.mkdir()
    if method == "fisher":
        with pytest.raises(
            TooLittleMemoryError, match=r"lower calibration\.batch_size or calibration\.sequence_length"
        ):
            write_cut(plan, session.policies[0], session.original, folder, alone(), reporter)
        return
    written = write_cut(plan, session.policies[0], session.original, folder, alone(), reporter)
    assert {cut.method for cut in written.selection.candidates} == {"drrqr", "energy"}
    [note] = written.notes
    assert note.startswith("the method fisher was not tried: Fisher selection needs about 0.0 GB beside the model for")


@pytest.mark.parametrize(
    ("settings", "processes", "expected"),
    [
        ({"batch_size": 100, "sequence_length": 80}, 1, 51),
        ({"batch_size": 100, "sequence_length": 80}, 3, 20),
        ({"sequence_length": 64}, 1, 8),
        ({"sequence_length": 2048}, 1, 2),
        ({"batch_size": 1}, 1, 1),
    ],
)
def test_fisher_batches_go_by_tokens_on_a_cpu(
    settings: dict[str, int], processes: int, expected: int, source: Path, tmp_path: Path
) -> None:
    calibration = {"source": str(make_text(tmp_path)), "samples": 60, "retrieval_share": 0.0, **settings}
    recipe = {"model": str(source), "selection": {"ratio": 0.5, "round_to": 1}, "calibration": calibration}
    recipe |= {"output_dir": str(tmp_path / "out"), "runtime": {"device": "cpu"}}
    plan = plan_run(Recipe.from_settings(recipe), RunOptions())
    assert fisher_batch(plan, 60, processes) == expected
