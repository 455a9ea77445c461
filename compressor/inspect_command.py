"""compress inspect: what a model has to cut."""

from __future__ import annotations

import argparse

from rich.console import Console

from compressor.inspection import inspect_model, inspection_tables


def inspect_command(words: list[str]) -> int:
    """Print the tables of a model. Raises RequestError where there is none of a supported family."""
    parser = argparse.ArgumentParser(prog="compress inspect", description="What a model has to cut.")
    parser.add_argument("model", metavar="MODEL", nargs="?", help="a folder or Hub id; default: the bundled model")
    parser.add_argument("--revision", help="branch, tag or commit of a Hub model")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    arguments = parser.parse_args(words)
    console = Console()
    for part in inspection_tables(inspect_model(arguments.model, arguments.revision)):
        console.print(part, highlight=False, soft_wrap=isinstance(part, str))
    return 0
