"""The verbs `compress evaluate` and `compress compare`: options in, tables out. Imports no torch at start-up."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from rich.console import Console

from compressor.command_words import filled, names, number, path
from compressor.errors import RequestError
from compressor.evaluation_section import EvaluationSection
from compressor.flat_settings import validate_both
from compressor.interruption import explained_termination
from compressor.naming import option_of
from compressor.recipe import RuntimeSection

_TASKS = """tasks:
  niah_single_1..3, niah_multikey_1..3, niah_multivalue, niah_multiquery, niah_word, niah_keys_N, vt, vt_CxH,
  cwe, cwe_N, fwe, recall, recall_N, completion, and lm_eval:NAME for tasks of lm-eval, which come last:
  --tasks niah_single_1,vt,lm_eval:wikitext,lambada_openai"""


def evaluate_command(words: list[str]) -> int:
    """`compress evaluate`; returns the exit status."""
    with explained_termination():
        return _evaluate(words)


def compare_command(words: list[str]) -> int:
    """`compress compare`; returns the exit status."""
    with explained_termination():
        return _compare(words)


def _evaluate(words: list[str]) -> int:
    arguments = vars(_evaluate_parser().parse_args(words))
    arguments.pop("debug", None)
    names = ("model", "revision", "baseline", "baseline_revision")
    models = {name: arguments.pop(name) for name in names if name in arguments}
    given, overwrite = arguments.pop("output", None), arguments.pop("overwrite", False)
    section, runtime = read_sections(arguments)
    if overwrite and given is None:
        raise RequestError("--overwrite would change nothing here; add --output, or leave it out.")
    from compressor.evaluating import EvaluationRequest, evaluate
    from compressor.evaluation.printing import comparison_table, model_table
    from compressor.output_file import OutputFile

    output = None if given is None else OutputFile.checked(given, overwrite)
    console = Console()
    result = evaluate(EvaluationRequest(section=section, runtime=runtime, **models), console)
    console.print(
        model_table(result.model) if result.baseline is None else comparison_table([result.baseline, result.model])
    )
    if output is not None:
        output.write(result.to_json())
        _say(console, f"result: {output.given}")
    return 0


def _compare(words: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="compress compare",
        description="The first model against the others: results of compress evaluate, or compressed folders.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "results", type=path("FILE"), metavar="FILE", nargs="+", help="JSON file, or a compressed folder"
    )
    parser.add_argument(
        "--figure", type=path("--figure"), metavar="FILE", help="draw quality against state size (.png, .svg, .pdf)"
    )
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    arguments = parser.parse_args(words)
    from compressor.evaluation.figure import check_figure_path, draw_quality
    from compressor.evaluation.pairing import require_something_in_common
    from compressor.evaluation.printing import comparison_table
    from compressor.evaluation.result_files import read_models

    if arguments.figure is not None:
        check_figure_path(arguments.figure)
    found = [read_models(path) for path in arguments.results]
    # One file with its own baseline is a comparison already; of several, each one's model is meant.
    models = list(found[0]) if len(found) == 1 else [each[-1] for each in found]
    if len(models) < 2:
        raise RequestError(f"{arguments.results[0]} holds one model; give a second file to compare it with.")
    require_something_in_common(models)
    console = Console()
    console.print(comparison_table(models))
    if arguments.figure is not None:
        draw_quality(models, arguments.figure)
        _say(console, f"figure: {arguments.figure}")
    return 0


def read_sections(settings: Mapping[str, Any]) -> tuple[EvaluationSection, RuntimeSection]:
    """The two sections of a recipe that `compress evaluate` has, from settings named as their fields.

    Raises:
        RequestError: lists every mistake, with its value and what is allowed.
    """
    of_runtime = {name: value for name, value in settings.items() if name in RuntimeSection.model_fields}
    others = {name: value for name, value in settings.items() if name not in of_runtime}
    return validate_both((EvaluationSection, others), (RuntimeSection, of_runtime), option_of)


def _say(console: Console, line: str) -> None:
    console.print(line, soft_wrap=True, highlight=False, markup=False, emoji=False)


def _evaluate_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="compress evaluate",
        description="Measure a model on text and on prompts that need its memory, alone or against a baseline.",
        epilog=_TASKS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "model",
        type=filled("MODEL"),
        metavar="MODEL",
        nargs="?",
        help="a folder or Hub id; default: the bundled demo model",
    )
    add("--revision", type=filled("--revision"), help="branch, tag or commit of a Hub model")
    add(
        "--baseline",
        type=filled("--baseline"),
        metavar="MODEL",
        help="model to compare with, such as the original: differences and KL",
    )
    revision = "--baseline-revision"
    add(revision, type=filled(revision), metavar="REVISION", help="the same for the baseline")
    add("--output", type=path("--output"), metavar="FILE", help="JSON file for the results")
    add("--overwrite", action="store_true", help="replace the file of --output")
    _add_prompt_options(parser)
    _add_text_options(parser)
    run = parser.add_argument_group("run")
    run.add_argument("--seed", type=int, help="of the prompts (default: 0)")
    run.add_argument("--batch-size", type=int, metavar="B", help="sequences at once (default: 32)")
    run.add_argument("--dtype", help="auto, float32, bfloat16, float16 (default: auto, bfloat16 on a GPU)")
    run.add_argument("--device", help="auto, cpu, cuda, cuda:N (default: auto)")
    run.add_argument("--trust-remote-code", action="store_true", help="let the tokenizer run the model's code")
    run.add_argument("--debug", action="store_true", help="show tracebacks")
    return parser


def _add_prompt_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("prompts").add_argument
    add("--suite", help="quick (4 tasks x 24 at 512 tokens) or full (13 x 256 at 2048) (default: quick)")
    add("--tasks", type=names, metavar="A,B", help="instead of the suite's")
    add("--lengths", type=_numbers, metavar="N,M", help="tokens of prompt and output, instead of the suite's")
    add("--samples", type=int, metavar="N", help="prompts of each task and length; documents of each lm-eval task")
    add(
        "--mode",
        help="teacher-forced (one pass) or generation (greedy, with the cache); quick: the first, full: the second",
    )
    add("--haystack", metavar="FILE", help="text for haystacks (default: the bundled text)")
    add("--completion", metavar="FILE", help="JSON or JSONL with the fields text and value (default: bundled passages)")
    add("--lm-eval-tasks", metavar="DIR", help="folder of further task files for lm-eval")
    add("--allow-extrapolation", action="store_true", help="ask beyond the context length of the config")


def _add_text_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("text").add_argument
    add(
        "--text",
        dest="texts",
        action="append",
        metavar="SOURCE",
        help="held-out text: a .txt/.jsonl/.parquet file or folder, a Hub data set id, demo; may be given again "
        "(default: demo)",
    )
    add("--windows", type=int, metavar="N", help="most windows of each text (quick: 16, full: 64)")
    add("--window-length", type=int, metavar="T", help="tokens of a window (quick: 512, full: 2048)")
    add("--windowing", help="disjoint, sliding, or rolling as lm-eval's perplexities (default: disjoint)")
    add("--stride", type=int, metavar="N", help="new tokens of each sliding window (default: half a window)")


def _numbers(text: str) -> list[Any]:
    """Words that are no numbers are left to the section, which says what is wrong with them."""
    return [number(word.strip()) for word in text.split(",")]
