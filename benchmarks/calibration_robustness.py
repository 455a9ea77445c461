"""How much a selection depends on what it was calibrated on: text, number of samples, seed.

    python -m benchmarks.calibration_robustness --models ../shared/models --only gdn-28m --text ../shared/text \\
        --sources prose=prose.txt docs=docs.txt code=code.txt --output robustness.json --figure robustness.png

Cuts of `--ratio` by `--methods` are chosen from each text of `--sources` (from the training or validation split, not
the ones that are measured on), from `mixture`, equal shares of them, and from `prompts-half`, half of it and half
retrieval prompts; from each of `--samples` sequences, drawn with each of `--seeds`. A row has the perplexity and memory
of the cut, KL to the original, and its channels. Where a text has fewer sequences than were asked for, the row says how
many it had. Rows that `--output` has from the same settings are not measured again.

The table gives, over the seeds, mean and spread of the figures and the mean overlap of two seeds; and the overlap with
the channels that the most samples of `prompts-half` choose.

    python -m benchmarks.calibration_robustness --results robustness.json --figure robustness.png

prints and draws results again.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor

from benchmarks.cuts import (
    EPSILONS,
    FIGURES,
    Bench,
    add_measuring_options,
    as_hexadecimal,
    by_layer,
    collect_statistics,
    measure_cut,
    open_bench,
    overlap,
    prompt_sequences,
    supported_models,
    text_sequences,
)
from benchmarks.options import check_folders, check_methods, check_options, check_text, check_widths
from benchmarks.output_files import draw_figure, told_in_one_sentence
from benchmarks.resumable import Columns, Row, Rows, settings_of, stored_rows
from compressor.errors import RequestError
from compressor.retrieval_tokens import interleave
from compressor.selecting import stacked_heads
from compressor.selection.registry import build_selector, get_selector_entry

MIXTURE, PROMPTS_HALF = "mixture", "prompts-half"
KEYS = ("model", "method", "source", "samples", "seed")
COLUMNS: Columns = {
    "model": str, "method": str, "source": str, "samples": int, "seed": int, "sequences": int, "kept": list, **FIGURES,
    "memory": int | float,
}  # fmt: skip
"""What the table and the figure read."""
NOT_SETTINGS = ("results", "models", "only", "methods", "samples", "seeds", "output", "figure")


@told_in_one_sentence()
def main() -> None:
    arguments = parse_arguments()
    check_options(arguments)
    rows = (
        stored_rows(arguments.results, COLUMNS, "benchmarks.calibration_robustness")
        if arguments.results
        else measure(arguments)
    )
    print_table(rows)
    draw_figure(arguments.figure, rows, lambda partial: draw(rows, partial))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sources", nargs="+", default=["demo=demo"], metavar="NAME=TEXT")
    parser.add_argument("--methods", nargs="+", default=["drrqr", "energy", "gradient"])
    parser.add_argument("--samples", nargs="+", type=int, default=[8, 32, 128, 512])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--ratio", type=float, default=0.5, help="share removed")
    parser.add_argument("--norm-epsilon", default="keep", choices=EPSILONS)
    add_measuring_options(parser)
    return parser.parse_args()


def measure(arguments: argparse.Namespace) -> list[Row]:
    """One calibration for each source, number of samples and seed, which all methods choose from.

    Raises:
        RequestError: before any work, for what cannot be measured.
    """
    check_folders(arguments, arguments.texts)
    check_methods(arguments.methods)
    sources = named_sources(arguments.sources)
    rows = Rows(arguments.output, settings_of(arguments, NOT_SETTINGS), KEYS)
    rows.load()
    for source in supported_models(arguments.models, arguments.only):
        check_widths(source, [arguments.ratio])
        bench: Bench | None = None
        for name, samples, seed in itertools.product(
            (*sources, MIXTURE, PROMPTS_HALF), arguments.samples, arguments.seeds
        ):
            known_by = {"model": source.folder.name, "source": name, "samples": samples, "seed": seed}
            asked = rows.missing([{**known_by, "method": method} for method in arguments.methods])
            if asked:
                bench = open_bench(source, arguments) if bench is None else bench
                sequences = calibration(bench, sources, name, samples, seed, arguments.window)
                measure_choices(bench, sequences, asked, rows, arguments)
    return rows.measured()


def named_sources(words: Sequence[str]) -> dict[str, str]:
    """Texts by name. Raises RequestError where one has no name or cannot be read."""
    sources: dict[str, str] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or name in ("", MIXTURE, PROMPTS_HALF, *sources):
            raise RequestError(
                f'--sources "{word}" is no NAME=TEXT with a name of its own, other than {MIXTURE} and {PROMPTS_HALF}; '
                "give such."
            )
        check_text(text)
        sources[name] = text
    return sources


def calibration(
    bench: Bench, sources: dict[str, str], name: str, samples: int, seed: int, length: int
) -> tuple[Tensor, ...]:
    """Sequences int64 [length] of one source."""
    if name in sources:
        return text_sequences(bench, sources[name], samples, length, seed)
    prompts = samples // 2 if name == PROMPTS_HALF else 0
    shares = [(samples - prompts + place) // len(sources) for place in range(len(sources))]
    texts: tuple[Tensor, ...] = ()
    for text, share in zip(sources.values(), shares, strict=True):
        texts = interleave(texts, text_sequences(bench, text, share, length, seed))
    return interleave(texts, prompt_sequences(bench, prompts, length, seed))


def measure_choices(
    bench: Bench, sequences: Sequence[Tensor], asked: Sequence[Row], rows: Rows, arguments: argparse.Namespace
) -> None:
    gradients = any("gradient" in get_selector_entry(row["method"]).needs for row in asked)
    heads = stacked_heads(bench.source, collect_statistics(bench, sequences, arguments.batch_size, gradients))
    keep = round(bench.width * (1 - arguments.ratio))

    def work(known_by: Row) -> Row:
        generator = torch.Generator().manual_seed(known_by["seed"])
        choice = build_selector(known_by["method"], "qk", arguments.f).select(heads, keep, generator)
        figures = measure_cut(bench, by_layer(bench, choice.indices), arguments.norm_epsilon)
        counts = {"sequences": len(sequences), "tokens": sum(len(sequence) for sequence in sequences)}
        return {"key_dim": keep, **counts, **figures, "kept": as_hexadecimal(choice.indices, bench.width)}

    for known_by in asked:
        rows.measure(known_by, lambda row=known_by: work(row))  # type: ignore[misc]


def print_table(rows: Sequence[Row]) -> None:
    """One line for all seeds of a model, method, source and number of samples."""
    texts = list(dict.fromkeys(text for row in rows for text in row["perplexity"]))
    names = "".join(f"{text:>17}" for text in texts)
    heading = f"{'model':<14}{'method':<10}{'source':<14}{'samples':>8}{'sequences':>10}"
    print(f"{heading}{names}{'KL text':>18}{'memory':>15}{'of seeds':>10}{'reference':>10}")
    for model, method, source, samples in groups(rows):
        members = of_group(rows, model, method, source, samples)
        spreads = [spread([row["perplexity"].get(text) for row in members], 2) for text in texts]
        spreads.append(spread([row["kl_text"] for row in members], 4))
        spreads.append(spread([row["memory"] for row in members], 1))
        widths = [17] * len(texts) + [18, 15]
        figures = "".join(f"{value:>{width}}" for value, width in zip(spreads, widths, strict=True))
        place = f"{model:<14}{method:<10}{source:<14}{samples:>8}{members[0]['sequences']:>10}"
        shares = (overlap_of_seeds(members), overlap_with_reference(rows, members))
        print(place + figures + "".join(f"{'' if share is None else format(share, '.3f'):>10}" for share in shares))


def groups(rows: Sequence[Row]) -> Iterator[tuple[str, str, str, int]]:
    yield from dict.fromkeys((row["model"], row["method"], row["source"], row["samples"]) for row in rows)


def of_group(rows: Sequence[Row], model: str, method: str, source: str, samples: int) -> list[Row]:
    wanted = (model, method, source, samples)
    return [row for row in rows if (row["model"], row["method"], row["source"], row["samples"]) == wanted]


def spread(values: Sequence[float | None], digits: int) -> str:
    """Mean, and the difference of the largest and the smallest."""
    known = [value for value in values if value is not None]
    if not known:
        return "none"
    return f"{fmean(known):.{digits}f} ({max(known) - min(known):.{digits}f})"


def overlap_of_seeds(members: Sequence[Row]) -> float | None:
    """Mean over heads and pairs of seeds; None with one seed."""
    pairs = list(itertools.combinations(members, 2))
    return fmean(fmean(overlap(a["kept"], b["kept"])) for a, b in pairs) if pairs else None


def overlap_with_reference(rows: Sequence[Row], members: Sequence[Row]) -> float | None:
    """Mean over heads and seeds of the channels shared with the most samples of `PROMPTS_HALF`, first seed."""
    model, method = members[0]["model"], members[0]["method"]
    references = [r for r in rows if (r["model"], r["method"], r["source"]) == (model, method, PROMPTS_HALF)]
    if not references:
        return None
    most = max(row["samples"] for row in references)
    reference = min((row for row in references if row["samples"] == most), key=lambda row: int(row["seed"]))
    return fmean(fmean(overlap(row["kept"], reference["kept"])) for row in members)


def draw(rows: Sequence[Row], path: Path) -> None:
    """Overlap with the reference, KL on text and memory against the samples; a row of panels a model and method."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = list(dict.fromkeys((row["model"], row["method"]) for row in rows))
    figure, axes = plt.subplots(len(panels), 3, figsize=(14, 3.4 * len(panels)), squeeze=False)
    for (overlaps, divergences, memories), (model, method) in zip(axes, panels, strict=True):
        for source in dict.fromkeys(row["source"] for row in rows):
            grouped = [of_group(rows, *group) for group in groups(rows) if group[:3] == (model, method, source)]
            grouped.sort(key=lambda members: int(members[0]["samples"]))
            samples = [members[0]["samples"] for members in grouped]
            shares = [overlap_with_reference(rows, members) for members in grouped]
            overlaps.plot(samples, [float("nan") if s is None else s for s in shares], marker="o", label=source)
            for axis, name in ((divergences, "kl_text"), (memories, "memory")):
                values = [[row[name] for row in members] for members in grouped]
                means = [fmean(of_seeds) for of_seeds in values]
                below = [mean - min(of_seeds) for mean, of_seeds in zip(means, values, strict=True)]
                above = [max(of_seeds) - mean for mean, of_seeds in zip(means, values, strict=True)]
                axis.errorbar(samples, means, (below, above), marker="o", capsize=2, label=source)
        labels = ("overlap with the reference", "KL on text", "memory score, %")
        for axis, label in zip((overlaps, divergences, memories), labels, strict=True):
            axis.set(title=f"{model}, {method}", xlabel="calibration sequences", ylabel=label)
            axis.set_xscale("log", base=2)
    axes[0][0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    main()
