"""What a cut leaves of the use of states, by selector: the utilisation of each head, dense against pruned.

    python -m benchmarks.probe_selectors --models ../shared/models --only gdn-28m --calibration train_sample.txt \\
        --text ../shared/text/test_prose.txt --output probe_selectors.json --figure probe_selectors.png

All cuts of a model are chosen from one calibration, `--retrieval-share` of it retrieval prompts, and simulated as in
benchmarks.cuts, without recovery. The model then reads the documents in segments through its cache, as it is and under
each cut, and the spectra of what a cut checkpoint would hold are taken: of the kept key channels of every state.
Figures of heads are medians over documents at their ends. Correlations are over heads, of a cut with the model as it
is; a condition number stands beside 1/sqrt(utilisation), which it cannot be below. Rows that `--output` has from the
same settings are not measured again.

    python -m benchmarks.probe_selectors --results docs/results/probe_selectors.json --figure docs/probe-selectors.png

prints and draws results again.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor

from benchmarks.cuts import (
    Bench,
    Kept,
    add_cut_options,
    by_layer,
    masked,
    measure_models,
    mixed_statistics,
)
from benchmarks.options import DTYPES, check_methods, check_models, check_options, check_text
from benchmarks.output_files import draw_figure, told_in_one_sentence
from benchmarks.probe_selector_figures import draw_probes, print_probes
from benchmarks.resumable import Columns, Row, Rows, settings_of, stored_rows
from compressor.architectures.base import Mixer
from compressor.architectures.family import family_of
from compressor.calibration.text import TextSource, open_documents
from compressor.calibration.tokenizer import load_tokenizer
from compressor.evaluation.measure import Material
from compressor.loading import load_model, resolve_device, resolve_dtype
from compressor.preparation import Source
from compressor.probe.segments import Boundary, read_in_segments
from compressor.probe.spectra import FIGURES, spectrum
from compressor.probe.states import Probed
from compressor.probe_documents import probe_documents
from compressor.selecting import stacked_heads
from compressor.selection.base import HeadStatistics
from compressor.selection.registry import build_selector

METHODS = ("drrqr", "energy", "l1", "random")
KEYS = ("model", "method", "ratio", "norm_epsilon")
COLUMNS: Columns = {
    "model": str, "method": str, "ratio": int | float, "norm_epsilon": str, "key_dim": int, "losses": list,
    "heads": dict, "singular_values": list, "tokens": list, "utilisation": list,
}  # fmt: skip
"""What the table and the figure read."""
NOT_SETTINGS = ("results", "models", "only", "methods", "ratios", "norm_epsilon", "output", "figure")


@told_in_one_sentence()
def main() -> None:
    arguments = parse_arguments()
    check_options(arguments)
    rows = (
        stored_rows(arguments.results, COLUMNS, "benchmarks.probe_selectors")
        if arguments.results
        else measure(arguments)
    )
    print_probes(rows)
    cuts_made = [row for row in rows if row["method"] != "dense"]
    draw_figure(arguments.figure, cuts_made, lambda partial: draw_probes(rows, partial))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, nargs="*", help="print and draw these result files; measure nothing")
    parser.add_argument("--models", type=Path, help="folder of model folders")
    parser.add_argument("--only", nargs="*", help="names of model folders")
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    add_cut_options(parser)
    parser.add_argument("--f", type=float, default=1.5)
    parser.add_argument("--text", default="demo", help="what states are measured on, as compress probe takes it")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a document")
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--every", type=int, default=256, help="tokens of a segment")
    parser.add_argument("--window", type=int, default=2048, help="tokens of a calibration sequence")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto", choices=DTYPES)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--figure", type=Path)
    return parser.parse_args()


def measure(arguments: argparse.Namespace) -> list[Row]:
    """Every model of a supported family; results are written after each row. Raises RequestError before any work."""
    check_models(arguments.models, arguments.only)
    check_text(arguments.text, held_out=True)
    check_text(arguments.calibration)
    check_methods(arguments.methods)
    rows = Rows(arguments.output, settings_of(arguments, NOT_SETTINGS), KEYS)

    def measure_one(source: Source, asked: list[Row]) -> None:
        measure_model(open_bench(source, arguments), asked, rows, arguments)

    return measure_models(arguments, rows, list(cuts(arguments)), measure_one)


def cuts(arguments: argparse.Namespace) -> Iterator[Row]:
    """What a row of each cut is known by but for the model; the original comes first."""
    yield {"method": "dense", "ratio": 0.0, "norm_epsilon": "keep"}
    for method in arguments.methods:
        for ratio in arguments.ratios:
            for epsilon in arguments.norm_epsilon:
                yield {"method": method, "ratio": ratio, "norm_epsilon": epsilon}


def open_bench(source: Source, arguments: argparse.Namespace) -> Bench:
    """One model for both roles, and nothing that it is asked."""
    device = resolve_device(arguments.device)
    dtype = resolve_dtype(arguments.dtype, device, source.architecture)
    model = load_model(source.architecture, source.folder, source.checkpoint.raw_config, dtype, device)
    tokenizer = load_tokenizer(source.folder, trust_remote_code=False)
    return Bench(source, model, model, tokenizer, Material((), (), "teacher-forced", arguments.batch_size))


def measure_model(bench: Bench, asked: list[Row], rows: Rows, arguments: argparse.Namespace) -> None:
    """Calibrate once, then choose and measure every cut that is missing."""
    stream = open_documents(TextSource(arguments.text, held_out=True))
    documents, notes = probe_documents(
        stream, bench.tokenizer, arguments.length, arguments.every, arguments.documents
    )  # fmt: skip
    for note in notes:
        print(f"note: {note}")
    gradients = "gradient" in arguments.methods
    heads = stacked_heads(bench.source, mixed_statistics(bench, arguments, gradients))
    for known_by in rows.missing(asked):
        rows.measure(known_by, lambda cut=known_by: measure_row(bench, heads, documents, cut, arguments))  # type: ignore[misc]


def measure_row(
    bench: Bench, heads: HeadStatistics, documents: Sequence[Tensor], cut: Row, arguments: argparse.Namespace
) -> Row:
    if cut["method"] == "dense":
        return {"key_dim": bench.width, **probe_cut(bench, None, "keep", documents, arguments.every)}
    keep = round(bench.width * (1 - cut["ratio"]))
    generator = torch.Generator().manual_seed(arguments.seed)
    choice = build_selector(cut["method"], "qk", arguments.f).select(heads, keep, generator)
    kept = by_layer(bench, choice.indices)
    return {"key_dim": keep, **probe_cut(bench, kept, cut["norm_epsilon"], documents, arguments.every)}


def probe_cut(bench: Bench, kept: Kept | None, epsilon: str, documents: Sequence[Tensor], every: int) -> Row:
    """Spectra of the states of a cut, None for the model as it is, and its loss on the way.

    `losses` are nats a token of each document; `heads` hold each of FIGURES at the ends of the documents, heads of all
    layers after one another, an infinite one as None; `singular_values` are over the largest, mean over heads and
    documents; `utilisation` is that of `tokens` read, mean over heads.
    """
    source = bench.source
    probed = Probed(bench.cut, source.architecture, source.mixers, family_of(source.checkpoint.raw_config))
    along: dict[int, list[Tensor]] = {}
    ends: list[Tensor] = []
    values: list[Tensor] = []

    def look(boundary: Boundary) -> None:
        states = [kept_columns(probed.layout.read(boundary.cache, mixer), mixer, kept) for mixer in source.mixers]
        spectra = [spectrum(state) for state in states]
        figures = torch.cat([each.figures for each in spectra], dim=1).cpu()
        along.setdefault(boundary.read, []).append(figures[..., FIGURES.index("utilisation")])
        if boundary.last:
            ends.append(figures)
            singular = torch.cat([each.singular_values for each in spectra], dim=1).cpu()
            values.append(singular / singular[..., :1].clamp(min=torch.finfo(singular.dtype).tiny))

    with masked(bench, kept, epsilon):
        read = read_in_segments(bench.cut, documents, every, bench.material.batch_size, look)
    medians = torch.cat(ends).quantile(0.5, dim=0)
    return {
        "losses": [short(float(each.losses.double().mean())) for each in read],
        "heads": {name: [short(value) for value in medians[:, index].tolist()] for index, name in enumerate(FIGURES)},
        "singular_values": [short(value) for value in torch.cat(values).mean((0, 1)).tolist()],
        "tokens": sorted(along),
        "utilisation": [short(fmean(torch.cat(along[tokens]).flatten().tolist())) for tokens in sorted(along)],
    }


def kept_columns(state: Tensor, mixer: Mixer, kept: Kept | None) -> Tensor:
    """Of states [B, H_v, d_v, d_k] the key channels that the key head of each value head keeps: the others are zero."""
    if kept is None:
        return state
    indices = kept[mixer.layer].to(state.device).repeat_interleave(mixer.num_v_heads // mixer.num_k_heads, dim=0)
    return state.gather(-1, indices[None, :, None].expand(*state.shape[:-1], -1))


def short(value: float) -> float | None:
    return float(f"{value:.5g}") if value < float("inf") else None


if __name__ == "__main__":
    main()
