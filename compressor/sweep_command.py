"""The verb `compress sweep`: options in, a folder with a table of cuts out. Imports no torch at start-up."""

from __future__ import annotations

import argparse

from rich.console import Console

from compressor.abbreviation import cut_word
from compressor.command_options import add_calibration_options, add_scoring_options, add_statistics_options
from compressor.command_words import path
from compressor.errors import RequestError
from compressor.flat_settings import names_of_flat, nest_flat_settings
from compressor.launched import LaunchedParser, launch
from compressor.naming import Naming
from compressor.sweep_recipes import sweep_recipes, swept_methods

DEFAULT_RATIOS = "0.25,0.5,0.75"
DEFAULT_METHODS = "drrqr,energy"


def sweep_command(words: list[str]) -> int:
    """`compress sweep`; returns the exit status."""
    arguments = vars(_parser().parse_args(words))
    names = ("ratios", "methods", "table_only", "resume", "overwrite", "statistics", "save_statistics", "debug")
    own = {name: arguments.pop(name, None) for name in names}
    output = arguments.pop("output_dir")
    ratios, methods = _ratios(own["ratios"]), _names(own["methods"])
    settings, name = nest_flat_settings(arguments), _names_of_sweep(names_of_flat(arguments, recipe=False))
    sweep_recipes(settings, ratios, methods, output, name)  # What is wrong with them is said before torch is imported.
    from compressor.data_parallel import leave_processes
    from compressor.planning import RunOptions
    from compressor.sweep_results import sweep_table
    from compressor.sweeping import SweepRequest, sweep

    files = (own["statistics"], own["save_statistics"])
    options = RunOptions(bool(own["resume"]), bool(own["overwrite"]), *files, name)
    console = Console()
    result = sweep(SweepRequest(settings, ratios, methods, output, bool(own["table_only"]), options), console)
    leave_processes()
    if launch().index == 0:
        console.print(sweep_table(result))
        console.print(f"result: {result.output_dir}", soft_wrap=True, highlight=False, markup=False)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = LaunchedParser(
        prog="compress sweep",
        description="Cut a model by several methods to several widths from one calibration, and measure every cut.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("model", metavar="MODEL", nargs="?", help="a folder or Hub id; default: the bundled demo model")
    add(
        "--output-dir",
        type=path("--output-dir"),
        metavar="DIR",
        required=True,
        help="for sweep.json, sweep.png and METHOD-WIDTH",
    )
    add("--revision", help="branch, tag or commit of a Hub model")
    add(
        "--ratios",
        metavar="A,B",
        default=DEFAULT_RATIOS,
        help=f"shares of key/query channels removed (default: {DEFAULT_RATIOS})",
    )
    add(
        "--methods",
        metavar="A,B",
        default=DEFAULT_METHODS,
        help=f"of {', '.join(swept_methods())} (default: {DEFAULT_METHODS})",
    )
    add("--table-only", action="store_true", help="keep no checkpoint, only the figures")
    add_scoring_options(parser)
    add_calibration_options(parser, low_memory=False)
    add_statistics_options(parser)
    run = parser.add_argument_group("run").add_argument
    run("--no-refit", dest="refit", action="store_false", help="leave the output projections as cut")
    run("--no-verify", dest="verify", action="store_false", help="do not check the checkpoints at the end")
    run("--seed", type=int, help="default: 0")
    run("--dtype", help="auto, float32, bfloat16, float16 (default: auto, bfloat16 on a GPU)")
    run("--device", help="auto, cpu, cuda, cuda:N (default: auto)")
    run("--trust-remote-code", action="store_true", help="let the tokenizer run the model's code")
    run("--resume", action="store_true", help="go on with an interrupted sweep: its calibration, its finished cuts")
    run("--overwrite", action="store_true", help="replace the output folder")
    run("--debug", action="store_true", help="show tracebacks")
    return parser


def _names_of_sweep(name: Naming) -> Naming:
    """What `name` names, with the two options that a sweep has in place of others."""
    own = {"selection.ratio": "ratios", "selection.method": "methods"}

    def named(setting: str, value: object = None, /) -> str:
        return name(own.get(setting, setting), value)

    return named


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _ratios(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(word) for word in _names(text))
    except ValueError:
        raise RequestError(
            f'--ratios "{cut_word(text)}" has a word that is no number; write them as {DEFAULT_RATIOS}.'
        ) from None
