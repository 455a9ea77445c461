"""Peak anonymous memory of cutting and of calibrating a checkpoint that is large for its machine.

    python -m benchmarks.memory --output docs/results/memory.json

A checkpoint of random weights (see `random_checkpoint`) is made in a temporary folder and removed at the end. Two
processes are watched in turn: `cut`, which writes the smaller checkpoint with channels drawn at random, and
`calibrate`, which is `compress --low-memory` from the command line with few tokens. Measured is RssAnon of the process
and all its children: pages of files are the page cache's, which the system takes back when it needs them.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.environment import write_result
from benchmarks.options import DTYPES, check_options
from benchmarks.output_files import check_folder_to_write, told_in_one_sentence
from benchmarks.random_checkpoint import make_checkpoint
from compressor.artifacts import Selection
from compressor.errors import RunError
from compressor.export.sizes import parse_size
from compressor.preparation import choose_width, open_model, open_source, plan_cut
from compressor.recipe import Recipe
from compressor.writing import write_checkpoint

SECONDS_BETWEEN_SAMPLES = 0.02
BARS = {"cut": 2_000_000_000, "calibrate": 6_000_000_000}
CALIBRATION = ["--calibration", "demo", "--ratio", "0.5", "--device", "cpu"]
WITHOUT_WHOLE_MODELS = ["--no-refit", "--no-evaluate", "--no-verify"]


@told_in_one_sentence()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="for the temporary folder; default: the system's")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--hidden-size", type=int, default=2560)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--sequence-length", type=int, default=320)
    parser.add_argument("--dtype", default="auto", choices=DTYPES)
    parser.add_argument("--in-memory", action="store_true", help="calibrate in memory too, and compare the channels")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--cut", nargs=2, type=Path, metavar=("MODEL", "DIR"), help="what the first process runs")
    arguments = parser.parse_args()
    check_options(arguments)
    if arguments.cut is not None:
        cut(*arguments.cut)
        return
    check_folder_to_write("--folder", arguments.folder)
    folder = Path(tempfile.mkdtemp(prefix="compressor-memory-", dir=arguments.folder))
    try:
        result = measure(folder, arguments)
    finally:
        shutil.rmtree(folder)
    settings = {name: value for name, value in vars(arguments).items() if name not in ("folder", "output", "cut")}
    write_result(arguments.output, {"settings": settings, **result})


def measure(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Make the checkpoint and watch the processes."""
    model = folder / "model"
    weight_bytes = make_checkpoint(model, arguments.layers, arguments.hidden_size, 0)
    tokens = ["--calibration-samples", str(arguments.samples), "--sequence-length", str(arguments.sequence_length)]
    compress = [sys.executable, "-m", "compressor", str(model), *CALIBRATION, *tokens, *WITHOUT_WHOLE_MODELS]
    compress += ["--dtype", arguments.dtype, "--batch-size", "1", "--output-dir"]
    runs = {
        "cut": [sys.executable, "-m", "benchmarks.memory", "--cut", str(model), str(folder / "cut")],
        "calibrate": [*compress, str(folder / "calibrate"), "--low-memory"],
    }
    if arguments.in_memory:
        runs["in_memory"] = [*compress, str(folder / "in_memory")]
    figures: dict[str, Any] = {}
    selections = {}
    for name, command in runs.items():
        figures[name] = watched(command) | {"bar": BARS.get(name)}
        print(name, json.dumps(figures[name]), flush=True)
        selections[name] = json.loads((folder / name / "selection.json").read_text(encoding="utf-8"))
        shutil.rmtree(folder / name)
    same = selections["calibrate"] == selections["in_memory"] if arguments.in_memory else None
    return {"weight_bytes": weight_bytes, "runs": figures, "same_selection_as_in_memory": same}


def cut(model: Path, folder: Path) -> None:
    """Write the smaller checkpoint with random channels: what a run does once it has chosen them."""
    recipe = Recipe.from_settings({"model": str(model), "selection": {"ratio": 0.5}})
    configured = open_model(recipe.model, None)
    source = open_source(configured)
    plan = plan_cut(source, recipe, choose_width(configured, recipe.selection))
    generator = torch.Generator().manual_seed(0)
    kept = {
        mixer.layer: torch.rand(mixer.num_k_heads, mixer.head_k_dim, generator=generator)
        .argsort(-1)[:, : plan.keep]
        .sort(-1)
        .values
        for mixer in source.mixers
    }
    folder.mkdir()
    selection = Selection(source.mixers[0].head_k_dim, kept)
    write_checkpoint(folder, source, plan, selection, parse_size(recipe.export.max_shard_size), lambda count: None)


def watched(command: list[str]) -> dict[str, Any]:
    """Peak RssAnon and seconds of a process and its children.

    Raises:
        RunError: the process failed.
    """
    started, peak = time.perf_counter(), 0
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while process.poll() is None:
        peak = max(peak, anonymous_bytes(process.pid))
        time.sleep(SECONDS_BETWEEN_SAMPLES)
    if process.returncode:
        raise RunError(f"{' '.join(command)} failed with status {process.returncode}; what it said is above.")
    return {"peak_rss_anon": peak, "seconds": round(time.perf_counter() - started, 1)}


def anonymous_bytes(pid: int) -> int:
    """RssAnon of the process and all below it; 0 for one that has ended."""
    folder = Path("/proc", str(pid))
    total = 0
    try:
        for line in (folder / "status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                total = int(line.split()[1]) * 1024
        children = [child for task in (folder / "task").iterdir() for child in (task / "children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return total
    return total + sum(anonymous_bytes(int(child)) for child in children)


if __name__ == "__main__":
    main()
