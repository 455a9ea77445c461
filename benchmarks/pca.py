"""Principal directions kept instead of channels: a baseline that shows why channels are kept, never exported.

    python -m benchmarks.pca --models ../shared/models --text ../shared/text --calibration train_sample.txt \\
        --output pca.json --figure pca.png

For each model folder of a supported family, but for Kimi delta attention (see benchmarks.rotated_model), and from one
calibration as in benchmarks.selectors, the leading directions of each head's stacked key and query activations are
kept, and the rest is dropped before any recovery:

    pca-exact    rotated after the activation. No stock layer can do that: a bound on what directions could give
    pca-nearest  projections rotated; each direction has the filter that is nearest to its rotated convolution
    pca-shared   projections rotated; all directions of a head have the mean of its convolution's filters

Share 0 keeps every direction and tells what the change of basis alone does. Beside them stand cuts to channels by
`--methods`. Rows that `--output` has from the same settings are not measured again.

    python -m benchmarks.pca --results docs/results/pca.json --figure docs/pca.png

prints and draws results again.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

import torch

from benchmarks.cuts import (
    FIGURES,
    Bench,
    add_cut_options,
    add_measuring_options,
    by_layer,
    measure_cut,
    mixed_statistics,
    open_bench,
    supported_models,
)
from benchmarks.options import check_folders, check_methods, check_options, check_text, check_widths
from benchmarks.output_files import draw_figure, told_in_one_sentence
from benchmarks.principal_directions import nearest_filters, principal_directions, retained_squares, shared_filters
from benchmarks.resumable import Columns, Row, Rows, settings_of, stored_rows
from benchmarks.rotated_model import (
    Directions,
    Filters,
    RotatedChannels,
    refuse_decays_of_channels,
    rotated_weights,
)
from benchmarks.selector_cuts import KEYS
from benchmarks.selector_figures import draw_cuts, print_cuts
from benchmarks.selectors import head_figures
from compressor.architectures.masking import MaskedChannels
from compressor.errors import RequestError
from compressor.selecting import stacked_heads
from compressor.selection.base import HeadStatistics
from compressor.selection.registry import build_selector

EXACT = "pca-exact"
FILTERS: Mapping[str, Filters] = {"pca-nearest": nearest_filters, "pca-shared": shared_filters}
ROTATIONS = (EXACT, *FILTERS)
COLUMNS: Columns = {
    "model": str, "method": str, "scoring": str, "ratio": int | float, "norm_epsilon": str, "key_dim": int, **FIGURES,
}  # fmt: skip
"""What the tables read."""
NOT_SETTINGS = ("results", "models", "only", "methods", "ratios", "norm_epsilon", "output", "figure")


@told_in_one_sentence()
def main() -> None:
    arguments = parse_arguments()
    check_options(arguments)
    rows = stored_rows(arguments.results, COLUMNS, "benchmarks.pca") if arguments.results else measure(arguments)
    print_cuts(rows)
    print_retained(rows)
    # The exact rotation without a cut differs from the original by rounding, which a logarithmic axis would show.
    drawn = [row for row in rows if (row["method"], row["ratio"]) != (EXACT, 0.0)]
    cuts = [row for row in drawn if row["method"] != "dense"]
    draw_figure(arguments.figure, cuts, lambda partial: draw_cuts(drawn, partial))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="*", default=["drrqr", "energy"], help="channels to compare with")
    add_cut_options(parser)
    add_measuring_options(parser)
    return parser.parse_args()


def measure(arguments: argparse.Namespace) -> list[Row]:
    """Every model that can be cut and rotated; results are written after each row, and models refused are printed.

    Raises:
        RequestError: before any work, for what cannot be measured.
    """
    check_folders(arguments, arguments.texts)
    check_text(arguments.calibration)
    check_methods(arguments.methods)
    rows = Rows(arguments.output, settings_of(arguments, NOT_SETTINGS), KEYS)
    rows.load()
    for source in supported_models(arguments.models, arguments.only):
        try:
            refuse_decays_of_channels(source.architecture)
        except RequestError as refusal:
            print(f"{source.folder.name}: not measured: {refusal}")
            continue
        check_widths(source, arguments.ratios)
        asked = [{"model": source.folder.name, "scoring": "qk", **cut} for cut in cuts(arguments)]
        if rows.missing(asked):
            measure_model(open_bench(source, arguments), asked, rows, arguments)
    return rows.measured()


def cuts(arguments: argparse.Namespace) -> Iterator[Row]:
    """What a row of each cut is known by; the original comes first, and a rotation without a cut before its cuts."""
    yield {"method": "dense", "ratio": 0.0, "norm_epsilon": "keep"}
    for method in (*arguments.methods, *ROTATIONS):
        for ratio in [0.0, *arguments.ratios] if method in ROTATIONS else arguments.ratios:
            for epsilon in arguments.norm_epsilon:
                yield {"method": method, "ratio": ratio, "norm_epsilon": epsilon}


def measure_model(bench: Bench, asked: list[Row], rows: Rows, arguments: argparse.Namespace) -> None:
    """Calibrate once, then measure every cut that is missing."""
    heads = stacked_heads(bench.source, mixed_statistics(bench, arguments, gradients=False))
    for known_by in rows.missing(asked):
        rows.measure(known_by, lambda cut=known_by: measure_method(bench, heads, cut, arguments))  # type: ignore[misc]


def measure_method(bench: Bench, heads: HeadStatistics, cut: Row, arguments: argparse.Namespace) -> Row:
    """A rotation also tells, of each head, the share of the activations' squares in the directions that it keeps."""
    if cut["method"] not in ROTATIONS:
        return measure_channels(bench, heads, cut, arguments)
    gram = heads.gram("qk")
    directions = principal_directions(gram)
    keep = round(bench.width * (1 - cut["ratio"]))
    figures = measure_rotation(bench, by_layer(bench, directions), cut["method"], keep, cut["norm_epsilon"])
    retained = [float(f"{value:.5g}") for value in retained_squares(gram, directions, keep).tolist()]
    return {"key_dim": keep, **figures, "directions": {"activations": retained}}


def measure_channels(bench: Bench, heads: HeadStatistics, cut: Row, arguments: argparse.Namespace) -> Row:
    """A cut to channels, or the original."""
    keep = round(bench.width * (1 - cut["ratio"]))
    if cut["method"] == "dense":
        return {"key_dim": keep, **measure_cut(bench, None, "keep")}
    generator = torch.Generator().manual_seed(arguments.seed)
    choice = build_selector(cut["method"], cut["scoring"], arguments.f).select(heads, keep, generator)
    figures = measure_cut(bench, by_layer(bench, choice.indices), cut["norm_epsilon"])
    return {"key_dim": keep, **figures, "heads": head_figures(heads, choice.indices, bench.width)}


def measure_rotation(bench: Bench, directions: Directions, method: str, keep: int, epsilon: str) -> Row:
    """As `benchmarks.cuts.measure_cut`, of the `keep` leading directions."""
    architecture, mixers = bench.source.architecture, bench.source.mixers
    scale = architecture.output_scale(bench.width, keep) if epsilon == "keep" else 1.0
    if method == EXACT:
        with architecture.tapped(bench.cut, mixers, RotatedChannels(architecture, directions, keep, scale)):
            return measure_cut(bench, None, epsilon)
    leading = {layer: torch.arange(keep).expand(len(rows), -1) for layer, rows in directions.items()}
    with (
        rotated_weights(architecture, bench.cut, mixers, directions, FILTERS[method]),
        architecture.tapped(bench.cut, mixers, MaskedChannels(leading, bench.width, scale)),
    ):
        return measure_cut(bench, None, epsilon)


def print_retained(rows: Sequence[Row]) -> None:
    """Mean over heads of the share of the activations' squares that is kept."""
    print(f"\n{'model':<14}{'kept by':<13}{'keep':>5}{'activations':>13}")
    seen = set()
    for row in rows:
        kept_by = "directions" if "directions" in row else row["method"]
        place = (row["model"], kept_by, row["key_dim"])
        figures = row.get("directions") or row.get("heads")
        if figures and place not in seen:
            seen.add(place)
            print(f"{row['model']:<14}{kept_by:<13}{row['key_dim']:>5}{fmean(figures['activations']):>13.4f}")


if __name__ == "__main__":
    main()
