"""Seconds of an evaluation suite: once with kernels to compile and tune, then `--repeats` times with all of it done.

    python -m benchmarks.evaluation_speed MODEL --suite full --text TEXTS --device cuda --output evaluation_speed.json

Each run loads the model, makes and reads all prompts and texts and scores them, as `compress evaluate` does, in one
process: Triton keeps what it has tuned only there.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.environment import write_result
from benchmarks.options import check_options, section
from benchmarks.output_files import told_in_one_sentence
from compressor.evaluating import EvaluationRequest, evaluate
from compressor.evaluation_section import EvaluationSection
from compressor.recipe import RuntimeSection


@told_in_one_sentence()
def main(words: Sequence[str] | None = None) -> None:
    arguments = _parser().parse_args(words)
    check_options(arguments)
    asked = {"suite": arguments.suite, "texts": [str(path) for path in arguments.text]}
    runtime = RuntimeSection(device=arguments.device)
    request = EvaluationRequest(section(EvaluationSection, asked), runtime, model=arguments.model)
    settings = {"model": Path(arguments.model).name, "suite": arguments.suite, "device": arguments.device}
    seconds = []
    for _ in range(1 + arguments.repeats):
        started = time.perf_counter()
        evaluate(request)
        seconds.append(round(time.perf_counter() - started, 2))
        print(f"{seconds[-1]:.1f} s", flush=True)
        write_result(arguments.output, {"settings": settings, "first_seconds": seconds[0], "seconds": seconds[1:]})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("model")
    add("--suite", choices=("quick", "full"), default="full")
    add("--text", nargs="+", type=Path, default=[])
    add("--device", default="cuda")
    add("--repeats", type=int, default=1)
    add("--output", type=Path)
    return parser


if __name__ == "__main__":
    main()
