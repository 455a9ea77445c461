"""The command `compress`: parses, prints, calls the pipeline.

What is not of the standard library is imported where it is used: torch would make every start slow, and Ctrl-C during
an import at the top would print a traceback.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from compressor.errors import CompressorError

if TYPE_CHECKING:
    from rich.console import Console

    from compressor.planning import RunOptions
    from compressor.recipe import Recipe

_EPILOG = """other verbs:
  compress verify DIR         prove in clean processes that a result loads, runs and is the cut it says
  compress recover DIR        train a result with the original as teacher
  compress evaluate MODEL     perplexity, retrieval, aggregation, completion; --baseline MODEL2 for differences
  compress compare A B        results of evaluate, or compressed folders, side by side
  compress probe MODEL        what its recurrent states hold, which heads use them, what is lost without
  compress sweep MODEL        several methods and widths from one calibration; a table, JSON and a figure
  compress bench MODEL        time a step and a prompt take, and memory; --baseline MODEL2 for ratios
  compress inspect MODEL      layers, heads, widths, state bytes, and what engines make of each width
  compress validate RECIPE    check a recipe file
  compress push DIR REPO      upload a result to the Hub

Under `accelerate launch` or torchrun several processes share a cut, recover or sweep; the first does the rest alone.

Exit status: 0 done, 1 the run failed, 2 the request cannot be met, 130 or 143 interrupted."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    verbs = {
        "verify": _verify,
        "inspect": _inspect,
        "validate": _validate,
        "evaluate": _evaluate,
        "compare": _compare,
        "recover": _recover,
        "probe": _probe,
        "push": _push,
        "sweep": _sweep,
        "bench": _bench,
    }
    verb: Callable[[list[str]], int] = _compress
    if words and words[0] in verbs:
        verb = verbs[words.pop(0)]
    if verb not in (_compress, _recover, _sweep) or not {"-h", "--help"}.isdisjoint(words):
        from compressor.launched import act_alone

        if not _is_first_process():
            return 0
        act_alone()
    try:
        return verb(words)
    except CompressorError as error:
        _let_first_speak()
        if "--debug" in words:
            import traceback

            traceback.print_exc()
        print(f"compress: error: {error}", file=sys.stderr)
        return error.exit_code
    except (MemoryError, RuntimeError) as error:
        from compressor.out_of_memory import is_out_of_memory, told

        if "--debug" in words or not is_out_of_memory(error):
            raise
        print(f"compress: error: {told(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        if _is_first_process():
            print("compress: interrupted; nothing was written.", file=sys.stderr)
        return 130


def _is_first_process() -> bool:
    from compressor.launched import launch

    return launch().index == 0


def _let_first_speak() -> None:
    """Before an error: processes that have joined have said it once already."""
    if _is_first_process():
        return
    from compressor.data_parallel import have_joined
    from compressor.launched import let_first_speak

    if not have_joined():
        let_first_speak()


def _compress(words: list[str]) -> int:
    arguments = vars(_compress_parser().parse_args(words))
    from compressor.flat_settings import names_of_flat, nest_flat_settings
    from compressor.recipe import Recipe
    from compressor.recipe_file import load_settings

    switches = {name: arguments.pop(name) for name in ("dry_run", "resume", "overwrite", "debug")}
    repository, private = arguments.pop("push_to_hub", None), arguments.pop("private", False)
    statistics, kept_statistics = (arguments.pop(name, None) for name in ("statistics", "save_statistics"))
    recipe_file = arguments.pop("recipe", None)
    base = None if recipe_file is None else load_settings(recipe_file)
    origin = "the request" if recipe_file is None else str(recipe_file)
    name = names_of_flat(arguments, recipe_file is not None)
    recipe = Recipe.from_settings(nest_flat_settings(arguments, base), origin, name)
    from rich.console import Console

    from compressor.planning import RunOptions

    console = Console()
    options = RunOptions(switches["resume"], switches["overwrite"], statistics, kept_statistics, name)
    from compressor.push_command import check_push, push_result

    check_push(repository, private, recipe.model, asks_hub=_is_first_process())
    if switches["dry_run"]:
        if _is_first_process():
            _plan(recipe, options, console)
        return 0
    from compressor.data_parallel import leave_processes
    from compressor.pipeline import compress
    from compressor.reporting import result_table

    report = compress(recipe, options, console)
    leave_processes()
    if _is_first_process():
        console.print(result_table(report))
        console.print(f"result: {report.output_dir}", soft_wrap=True, highlight=False, markup=False)
        console.print(f"load:   {report.load_line}", soft_wrap=True, highlight=False, markup=False)
        if repository is not None:
            return push_result(Path(report.output_dir), repository, private, console)
    return 0


def _plan(recipe: Recipe, options: RunOptions, console: Console) -> None:
    """Print what a run would do."""
    from compressor.data_parallel import alone
    from compressor.pipeline import checked_plan
    from compressor.planning import pack_plan_tokens
    from compressor.reporting import plan_table

    plan = checked_plan(recipe, options, alone())
    tokens = pack_plan_tokens(plan)
    console.print(plan_table(plan))
    for note in (*plan.notes, *plan.cut.engine_warnings, *tokens.problems):
        console.print(f"note: {note}", soft_wrap=True, highlight=False, markup=False)
    console.print(
        f"nothing was written; the result would be {plan.output.path}", soft_wrap=True, highlight=False, markup=False
    )


def _evaluate(words: list[str]) -> int:
    from compressor.evaluate_command import evaluate_command

    return evaluate_command(words)


def _compare(words: list[str]) -> int:
    from compressor.evaluate_command import compare_command

    return compare_command(words)


def _recover(words: list[str]) -> int:
    from compressor.recover_command import recover_command

    return recover_command(words)


def _probe(words: list[str]) -> int:
    from compressor.probe_command import probe_command

    return probe_command(words)


def _push(words: list[str]) -> int:
    from compressor.push_command import push_command

    return push_command(words)


def _sweep(words: list[str]) -> int:
    from compressor.sweep_command import sweep_command

    return sweep_command(words)


def _bench(words: list[str]) -> int:
    from compressor.bench_command import bench_command

    return bench_command(words)


def _verify(words: list[str]) -> int:
    from compressor.command_words import path

    parser = argparse.ArgumentParser(
        prog="compress verify", description="Check a compressed checkpoint in clean processes."
    )
    parser.add_argument("folder", type=path("DIR"), metavar="DIR")
    parser.add_argument("--original", metavar="MODEL", help="the model it was cut from; default: what its recipe names")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: auto)")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    arguments = parser.parse_args(words)
    from compressor.verification.request import verify

    report = verify(arguments.folder, arguments.original, arguments.device)
    print(f"{arguments.folder}: loads with stock {report.stock_class}; generated by: {report.generated_by}")
    if report.oracle_relative_error is not None:
        print(f"logits equal the original with its dropped channels zeroed, to {report.oracle_relative_error:.1e}")
    for note in report.notes:
        print(f"note: {note}")
    return 0


def _inspect(words: list[str]) -> int:
    from compressor.inspect_command import inspect_command

    return inspect_command(words)


def _validate(words: list[str]) -> int:
    from compressor.validate_command import validate_command

    return validate_command(words)


def _compress_parser() -> argparse.ArgumentParser:
    from compressor.command_options import add_calibration_options, add_selection_options, add_statistics_options
    from compressor.command_words import path
    from compressor.launched import LaunchedParser

    parser = LaunchedParser(
        prog="compress",
        description="Shrink the state of a linear-attention language model: fewer key/query channels a head.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("model", metavar="MODEL", nargs="?", help="a folder or Hub id; default: the bundled demo model")
    add("--output-dir", metavar="DIR", help="default: MODEL-METHOD-WIDTH in the current folder")
    add("--revision", help="branch, tag or commit of a Hub model")
    add("--recipe", type=path("--recipe"), metavar="FILE", help="YAML settings; options given here replace its own")
    add_selection_options(parser)
    add_calibration_options(parser)
    add_statistics_options(parser)
    _add_recovery_options(parser)
    run = parser.add_argument_group("run")
    run.add_argument("--seed", type=int, help="default: 0")
    run.add_argument("--dtype", help="auto, float32, bfloat16, float16 (default: auto, bfloat16 on a GPU)")
    run.add_argument("--device", help="auto, cpu, cuda, cuda:N (default: auto)")
    run.add_argument("--device-map", metavar="MAP", help="auto: spread a model larger than one GPU over all of them")
    run.add_argument("--max-shard-size", metavar="SIZE", help="of the written weight files (default: 5GB)")
    run.add_argument("--link", action="store_true", help="hard-link unchanged weight files: bytes shared with a cache")
    run.add_argument("--no-evaluate", dest="evaluate", action="store_false", help="measure nothing before and after")
    run.add_argument("--no-verify", dest="verify", action="store_false", help="do not check the result at the end")
    run.add_argument("--trust-remote-code", action="store_true", help="let the tokenizer run the model's code")
    run.add_argument("--push-to-hub", metavar="REPO", help="upload the result to this Hub repository, owner/name")
    run.add_argument("--private", action="store_true", help="make that repository private")
    for name, text in (
        ("--dry-run", "check everything, write nothing"),
        ("--resume", "go on with an interrupted run: its calibration, its training"),
        ("--overwrite", "replace the output folder"),
        ("--debug", "show tracebacks"),
    ):
        run.add_argument(name, action="store_true", default=False, help=text)
    return parser


def _add_recovery_options(parser: argparse.ArgumentParser) -> None:
    recovery = parser.add_argument_group("recovery")
    recovery.add_argument("--no-refit", dest="refit", action="store_false", help="leave the output projections as cut")
    recovery.add_argument(
        "--recover",
        dest="train",
        action="store_true",
        help="train with the original as teacher; its settings stand in the recipe's section recovery",
    )
    recovery.add_argument(
        "--save-adapter",
        metavar="DIR",
        help="new folder, which --overwrite does not replace, for the adapter in peft's format; its README.md loads it",
    )
