"""Options that several verbs of the command share. Imports no torch."""

from __future__ import annotations

import argparse
from typing import Any

from compressor.command_words import path
from compressor.width import check_allocation


class _CheckedAllocation(argparse.Action):
    """Refuses what cannot be written and stores nothing: there is one thing left that it could be."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, *_: Any) -> None:
        check_allocation(values)


def add_selection_options(parser: argparse.ArgumentParser) -> None:
    """The width, the method and what `add_scoring_options` adds."""
    from compressor.selection.registry import method_names

    add = parser.add_argument_group("selection").add_argument
    add("--ratio", type=float, help="share of key/query channels removed, in [0, 1)")
    add("--target-dim", type=int, metavar="K", help="channels kept of each head; instead of --ratio")
    add("--target-state-bytes", metavar="SIZE", help="most bytes of a sequence's state; instead of --ratio")
    add("--method", help=f"{', '.join(method_names())} (default: drrqr)")
    add_scoring_options(parser)


def add_scoring_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("choice of channels").add_argument
    add("--round-to", type=int, metavar="N", help="keep a multiple of N channels, but for --target-dim (default: 16)")
    add("--allocation", action=_CheckedAllocation, help="uniform: the width is that of all layers (default)")
    add("--scoring", help="what is scored: qk, k or q; the choice always cuts both (default: qk)")
    add("--f", type=float, help="bound of strong RRQR on max rho (default: 1.5)")
    add("--norm-epsilon", help="keep, scaled by d_k/k, which undoes the change of scale, or auto (default: keep)")


def add_calibration_options(parser: argparse.ArgumentParser, low_memory: bool = True) -> None:
    """Without `low_memory` for a verb that needs whole models."""
    add = parser.add_argument_group("calibration").add_argument
    add("--calibration", metavar="SOURCE", help="demo, a .txt/.jsonl/.parquet file or folder, or a Hub data set id")
    add("--calibration-column", metavar="NAME", help="field with the text (default: text)")
    add("--calibration-config", metavar="NAME", help="configuration of a Hub data set")
    add("--calibration-split", metavar="NAME", help="split of a Hub data set (default: train)")
    add("--calibration-samples", type=int, metavar="N", help="sequences (default: 128)")
    add("--sequence-length", type=int, metavar="T", help="tokens of a sequence (default: 2048)")
    add("--batch-size", type=int, metavar="B", help="sequences at once (default: 8)")
    if low_memory:
        add("--low-memory", action="store_true", help="layer by layer, for a model larger than memory")
    add(
        "--retrieval-share",
        type=float,
        metavar="SHARE",
        help="retrieval prompts instead of text, in [0, 1] (default: 0.5)",
    )


def add_statistics_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("statistics").add_argument
    kept, used = (path(name) for name in ("--save-statistics", "--statistics"))
    add("--save-statistics", type=kept, metavar="FILE", help="keep those of the calibration, outside the output folder")
    add("--statistics", type=used, metavar="FILE", help="use what --save-statistics kept, of the same model and tokens")
