"""State tracking: train small stock models, and see what pruning their key width does.

    python -m benchmarks.state_tracking --task s4 --family gated_deltaproduct --num-householder 2 \\
        --steps 3000 --output s4.json --figure s4.png

Every combination of the values given to --task, --num-householder, --depth and --negative-eigenvalues is one run.
Results are written after each part of a run; runs that --output already has whole are not repeated. A run gives

- accuracy by position to the longest test length, over all positions up to each test length, at its end, and
  the share of sequences without a mistake;
- the betas of each layer, Householder step and head;
- accuracy without each head and with it alone, and the principal components of the keys of the one that solves it;
- accuracy with 3/4, 1/2, 1/4, 1/8 of the key/query channels of every head, chosen by strong rank-revealing QR,
  by energy and at random: the unpruned model with the other channels zeroed before normalisation, no recovery.

A group's models are trained at 128 tokens and tested to 512, parity and arithmetic at 3 to 40 and 40 to 256, as
published (see `compressor.evaluation.state_tracking`). `--curriculum 4 8 32 --cooldown 400` trains short sequences
first and ends when the task is solved; `--initial-beta 1.9` begins with reflections, which forget nothing: groups that
have plateaus, from S4 on, then need a fraction of the steps. On a CPU the reference recurrences run in float32: good
for tiny models; on a GPU fla's kernels run under bfloat16 autocast.

    python -m benchmarks.state_tracking --merge part1.json part2.json --output all.json --figure all.png

trains nothing: it adds the runs of these files to --output, in place of runs with the same settings, and draws all; an
interrupted run takes the place of a shorter one alone.
"""

from __future__ import annotations

import argparse
import itertools
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.environment import write_result
from benchmarks.options import check_options
from benchmarks.output_files import check_folder_to_write, replaced, told_in_one_sentence
from benchmarks.state_tracking.figure import betas_of, draw
from benchmarks.state_tracking.merging import is_whole, merge, run_key, stored_runs
from benchmarks.state_tracking.models import FAMILIES, ModelSettings
from benchmarks.state_tracking.pace import TrainingSettings
from benchmarks.state_tracking.runs import RunSettings, run
from compressor.errors import RequestError
from compressor.evaluation.state_tracking.registry import TASK_NAMES, find_task
from compressor.evaluation.state_tracking.word_problems import GroupWordProblem
from compressor.loading import resolve_device
from compressor.progress import StageReporter


@told_in_one_sentence()
def main() -> None:
    arguments = parse()
    check_options(arguments)
    results = _results(arguments)
    if arguments.figure is not None:
        if not any(map(is_whole, results)):
            raise RequestError(f"--figure {arguments.figure}: no run is whole; let one end, or leave out --figure.")
        with replaced(arguments.figure) as partial:
            draw(results, partial)


def _results(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    if arguments.merge:
        return merge(arguments.merge, arguments.output)
    return stored_runs(arguments.output) if arguments.only_figure else measure_all(arguments)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", nargs="+", default=["s4"], help=f"of {', '.join(TASK_NAMES)}")
    parser.add_argument("--family", choices=FAMILIES, default="gated_deltaproduct")
    parser.add_argument("--num-householder", type=int, nargs="+", default=[2])
    parser.add_argument("--depth", type=int, nargs="+", default=[1])
    parser.add_argument("--negative-eigenvalues", choices=("on", "off"), nargs="+", default=["on"])
    parser.add_argument("--hidden-size", type=int, default=128)
    parser.add_argument("--num-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=32)
    parser.add_argument("--initial-beta", type=float, metavar="B", help="mean of the first layer's before training")
    for name in ("short-convolution", "forget-gate", "output-gate"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--train-lengths", type=int, nargs=2, help="shortest and longest")
    parser.add_argument("--curriculum", type=int, nargs="*", default=[], help="longest lengths before, ascending")
    parser.add_argument("--cooldown", type=int, metavar="N", help="end N steps after the task is solved; no cosine")
    parser.add_argument("--time-limit", type=float, metavar="S", help="seconds after which --cooldown begins unsolved")
    parser.add_argument("--test-lengths", type=int, nargs="+", help="ascending")
    parser.add_argument("--test-samples", type=int, default=2048)
    parser.add_argument("--pruning-samples", type=int, default=256)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--weight-decay", type=float, default=1e-6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--checkpoints", type=Path, help="folder that each trained model is saved into")
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--only-figure", action="store_true", help="draw what --output holds; train nothing")
    parser.add_argument("--merge", type=Path, nargs="+", default=[], metavar="FILE", help="results added to --output")
    return parser.parse_args()


def run_settings(arguments: argparse.Namespace) -> list[RunSettings]:
    """One a run. Raises RequestError before anything is trained."""
    axes = (arguments.task, arguments.num_householder, arguments.depth, arguments.negative_eigenvalues)
    return [_settings(arguments, *values) for values in itertools.product(*axes)]


def _settings(
    arguments: argparse.Namespace, task_name: str, num_householder: int, depth: int, eigenvalues: str
) -> RunSettings:
    task = find_task(task_name)
    is_group = isinstance(task, GroupWordProblem)
    shortest, longest = arguments.train_lengths or ((128, 128) if is_group else (3, 40))
    if not 1 <= shortest <= longest:
        raise RequestError(f"--train-lengths {shortest} {longest}: give the shortest, at least 1, and the longest.")
    lengths = tuple(arguments.test_lengths or ((128, 256, 512) if is_group else (256,)))
    if list(lengths) != sorted(set(lengths)) or arguments.test_samples < 1 or arguments.pruning_samples < 1:
        raise RequestError(
            f"test lengths {list(lengths)}, {arguments.test_samples} test and {arguments.pruning_samples} pruning "
            "samples: give ascending lengths and at least 1 sample of each."
        )
    model = ModelSettings(
        family=arguments.family, num_householder=num_householder, depth=depth,
        negative_eigenvalues=eigenvalues == "on", hidden_size=arguments.hidden_size, num_heads=arguments.num_heads,
        head_dim=arguments.head_dim, short_convolution=arguments.short_convolution,
        forget_gate=arguments.forget_gate, output_gate=arguments.output_gate, initial_beta=arguments.initial_beta,
    )  # fmt: skip
    curriculum = tuple(arguments.curriculum)
    if list(curriculum) != sorted(set(curriculum)) or any(not 1 < length < longest for length in curriculum):
        raise RequestError(
            f"curriculum {list(curriculum)}: give ascending lengths above 1 and below {longest}, the longest trained."
        )
    if arguments.time_limit is not None and arguments.cooldown is None:
        raise RequestError(f"--time-limit {arguments.time_limit:g} needs --cooldown, the steps that it leaves.")
    if arguments.steps < 1 or (arguments.cooldown is not None and not 1 <= arguments.cooldown <= arguments.steps):
        raise RequestError(
            f"{arguments.steps} steps, cooldown {arguments.cooldown}: give at least 1 step and a cooldown of 1 to that."
        )
    training = TrainingSettings(
        arguments.steps, arguments.batch_size, shortest, longest, arguments.learning_rate, arguments.weight_decay,
        curriculum=curriculum, cooldown=arguments.cooldown, time_limit_s=arguments.time_limit,
    )  # fmt: skip
    return RunSettings(
        task=task_name, model=model, training=training, test_lengths=lengths,
        test_shortest=lengths[-1] if is_group else min(longest, lengths[0]),
        first_position=1 if is_group else min(longest, lengths[0]),
        test_samples=arguments.test_samples, pruning_samples=arguments.pruning_samples,
        test_batch_size=arguments.batch_size, seed=arguments.seed,
    )  # fmt: skip


def measure_all(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Every run; `--output` holds what there is after each part of each."""
    device = resolve_device(arguments.device)
    if device.type == "cuda":
        torch.set_num_threads(1)  # The CPU only draws words; threads of runs side by side would wait for each other.
    console = Console(stderr=True)
    planned = run_settings(arguments)
    finished = [stored for stored in stored_runs(arguments.output) if is_whole(stored)]
    measured = {run_key(stored["settings"]) for stored in finished}
    check_folder_to_write("--checkpoints", arguments.checkpoints)
    for number, settings in enumerate(planned, start=1):
        console.print(f"[{number}/{len(planned)}] {settings.label}", markup=False)
        if run_key(asdict(settings)) in measured:
            console.print("already measured", markup=False)
            continue
        result: dict[str, Any] = {}
        for result in run(settings, device, StageReporter(console), arguments.checkpoints):
            write_result(arguments.output, {"runs": [*finished, result]})
        finished.append(result)
        measured.add(run_key(asdict(settings)))
        print_summary(result)
    return finished


def print_summary(result: dict[str, Any]) -> None:
    settings, test, head = result["settings"], result["test"], result["solving_head"]
    model = settings["model"]
    print(
        f"{settings['task']} {model['family']} n_h={model['num_householder']} depth={model['depth']} "
        f"negative eigenvalues {'on' if model['negative_eigenvalues'] else 'off'}: {result['training_seconds']} s"
    )
    print(f"  accuracy to {test['accuracy']}  at the end {test['accuracy_at_the_end']}  chance {result['chance']:.4f}")
    for betas in betas_of(result, head):
        near = "  ".join(f"near {name} {betas[f'near_{name}']:.2f}" for name in ("zero", "one", "two"))
        print(f"  betas of the solving head, step {betas['step']}: {near}")
    print(
        f"  head {head['head']} of layer {head['layer']}: accuracy {head['accuracy_without']} without it, "
        f"{head['accuracy_alone']} with it alone; "
        f"key variance {head['variance_share'][:6]}, energy {head['energy_share'][:6]}"
    )
    for cell in result["pruning"]:
        print(f"  keep {cell['keep']:>3} by {cell['method']:<7}{cell['accuracy']}")


if __name__ == "__main__":
    main()
