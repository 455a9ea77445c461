"""`python -m benchmarks.speed` on a CPU: every part gives cells, and what fails or is left out is recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import benchmarks.speed
from benchmarks.speed import main
from benchmarks.speed_bars import bars_of
from benchmarks.speed_figure import draw, gain
from benchmarks.speed_shapes import SHAPES, random_subject
from compressor.architectures.registry import architecture_of
from compressor.errors import RequestError
from compressor.speed.cells import Recorder
from compressor.speed.decoding import DecodePlan
from compressor.speed.measure import Bench, measure_decode
from compressor.speed.timing import Schedule

SMALL = [
    *("--shape", "tiny", "--device", "cpu", "--dtype", "float32", "--mode", "direct", "--batch-sizes", "1", "2"),
    *("--prompt-length", "16", "--prompt-piece", "8", "--prefill-lengths", "24", "--widths-prefill", "24"),
    *("--mixer-length", "70", "--mixer-batch-sizes", "1", "--steps", "2", "--warm-up", "1", "--repeats", "2"),
    *("--call-steps", "2", "--key-widths", "32", "16", "--all-widths", "32", "24", "16"),
]


def test_all_parts(tmp_path: Path) -> None:
    output, figure = tmp_path / "speed.json", tmp_path / "speed.png"
    parts = ["decode", "mixer", "prefill", "mixer-backward", "widths"]
    main([*SMALL, "--parts", *parts, "--profile", "--output", str(output)])
    result = json.loads(output.read_text())
    rows = result["rows"]
    main_rows = [row for row in rows if row["group"] == "main"]
    assert [(row["part"], row["batch"], row["key_width"]) for row in main_rows] == [
        ("decode", 1, 32), ("decode", 1, 16), ("mixer", 1, 32), ("mixer", 1, 16), ("decode", 2, 32), ("decode", 2, 16),
        ("prefill", 1, 32), ("prefill", 1, 16), ("mixer with backward", 1, 32), ("mixer with backward", 1, 16),
    ]  # fmt: skip
    assert [row["key_width"] for row in rows if row["group"] == "widths"] == [32, 24, 16] * 3
    for row in rows:
        assert row["failed"] is None
        assert row["seconds"] > 0
        assert len(row["rounds"]) == 2
        assert row["replay_agrees"] is (True if row["part"] == "decode" else None)
        assert row["tokens_per_second"] == pytest.approx(tokens_of(row) / row["seconds"])
    assert main_rows[0]["kernels"]
    assert not main_rows[4]["kernels"]
    # 2 layers: float32 states of 2 heads x 32 x k, and convolutions of 2 * 2 * k + 2 * 32 channels with 4 taps.
    assert [row["state_bytes_per_sequence"] for row in main_rows[:2]] == [
        4 * 2 * (2 * 32 * k + 4 * (4 * k + 64)) for k in (32, 16)
    ]
    main(["--results", str(output), "--figure", str(figure)])
    assert figure.stat().st_size > 1000


def tokens_of(row: dict[str, Any]) -> int:
    return row["batch"] * (1 if row["part"] == "decode" else row["length"])


def test_a_cell_that_fails_is_recorded_and_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mixer of another input size raises in torch, as a kernel that refuses a shape would."""
    whole = benchmarks.speed.random_subject

    def spoiled(shape: str, width: int, *arguments: Any) -> Any:
        subject = whole(shape, width, *arguments)
        if width == 16:
            subject.model.get_submodule(subject.mixers[0].module).o_proj = torch.nn.Linear(3, 3)
        return subject

    monkeypatch.setattr(benchmarks.speed, "random_subject", spoiled)
    output = tmp_path / "speed.json"
    main([*SMALL, "--parts", "decode", "mixer", "--output", str(output)])
    rows = json.loads(output.read_text())["rows"]
    assert [row["failed"] is None for row in rows] == [True, False] * 3
    assert all("RuntimeError" in row["failed"] for row in rows[1::2])


def test_what_the_budget_leaves_out_is_said(tmp_path: Path) -> None:
    output = tmp_path / "speed.json"
    main([*SMALL, "--parts", "decode", "widths", "--budget-seconds", "1e-9", "--output", str(output)])
    result = json.loads(output.read_text())
    assert (result["rows"], result["not_begun"]) == ([], ["tiny: main", "tiny: widths"])


def test_a_cell_after_the_budget_is_recorded_as_not_measured() -> None:
    cpu, recorder = torch.device("cpu"), Recorder(budget_seconds=-1.0)
    bench = Bench([random_subject("tiny", 16, cpu, torch.float32)], cpu, Schedule(1, 0, 1), recorder)
    measure_decode(bench, 3, DecodePlan(prompt_length=4, mode="plain"))
    assert [(cell.part, cell.batch, cell.failed) for cell in recorder.cells] == [("decode", 3, "the time was up")]


@pytest.mark.parametrize("shape", [name for name in SHAPES if name.startswith(("gated", "delta"))])
def test_sizes_of_the_shapes(shape: str) -> None:
    """Parameters from the config's numbers: mixers, MLPs of 5632 and two tables of 32000 tokens."""
    fields = SHAPES[shape]
    architecture = architecture_of(fields)
    architecture.import_stock_classes()
    with torch.device("meta"):
        model = architecture.model_class(fields)(benchmarks.speed_shapes._config(fields))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    expected = {
        "gated_deltanet-1.3b": 1.77e9, "gated_deltanet-1.3b-narrow": 1.47e9,
        "gated_deltanet-1.3b-wide": 1.39e9, "delta_net-1.3b": 1.36e9,
    }  # fmt: skip
    assert parameters == pytest.approx(expected[shape], rel=0.02)


def test_a_cut_shape_keeps_its_value_width() -> None:
    subject = random_subject("tiny", 24, torch.device("cpu"), torch.bfloat16)
    assert (subject.key_width, subject.mixers[0].head_v_dim) == (24, 32)
    assert {parameter.dtype for parameter in subject.model.parameters()} == {torch.bfloat16}


def row(part: str, width: int, seconds: float, peak: int | None = None, batch: int = 64) -> dict[str, Any]:
    named = {"shape": "gated_deltanet-1.3b", "group": "main", "part": part, "batch": batch, "length": 512}
    return {**named, "key_width": width, "seconds": seconds, "peak_bytes": peak, "failed": None}


def test_bars_of_the_shape_with_keys_of_256_are_against_128() -> None:
    rows = [row("decode", width, seconds) for width, seconds in ((256, 3.0), (128, 2.0), (64, 1.0))]
    bars = bars_of([cell | {"shape": "gated_deltanet-1.3b-wide"} for cell in rows])
    assert [(bar["bar"], bar["ratio"], bar["met"]) for bar in bars] == [("decode speed at batch 64", 1.5, True)]


def test_bars() -> None:
    rows = [row("decode", 128, 1.47), row("decode", 64, 1.0), row("mixer", 128, 1.2, 100), row("mixer", 64, 1.0, 80)]
    found = {bar["bar"]: (bar["ratio"], bar["met"]) for bar in bars_of(rows)}
    assert found == {
        "decode speed at batch 64": (1.47, True),
        "mixer speed": (1.2, False),
        "mixer peak memory": (0.8, False),
    }
    assert bars_of(rows[:1]) == []


def test_gain_is_against_the_widest(tmp_path: Path) -> None:
    rows = [row("decode", 128, 3.0), row("decode", 32, 1.5), row("largest batch", 128, 0, batch=100)]
    rows.append(row("largest batch", 32, 0, batch=250))
    assert gain(rows, "decode", 64, "seconds", 32) == 2
    assert gain(rows, "largest batch", None, "batch", 32) == 2.5
    assert gain(rows, "decode", 64, "seconds", 64) is None
    with pytest.raises(RequestError, match="measure again"):
        draw([], tmp_path / "figure.png")
