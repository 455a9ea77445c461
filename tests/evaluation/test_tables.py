"""What rows of a comparison say where two models were not asked the same, and what names may hold."""

from __future__ import annotations

import math
import re
import statistics
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from compressor.errors import RequestError
from compressor.evaluation.figure import draw_quality
from compressor.evaluation.pairing import require_something_in_common
from compressor.evaluation.printing import comparison_table, model_table
from compressor.evaluation.results import ModelFigures
from compressor.evaluation.tables import comparison_rows, headings, model_rows, several_rows
from compressor.evaluation.text_names import short_names
from tests.evaluation.hand_made_figures import model, task, text

SEEN, UNSEEN = "memory, forms that calibration may use", "memory, unseen forms"


def rows(before: ModelFigures, after: ModelFigures) -> dict[str, tuple[str, str, str]]:
    return {label: (old, new, change) for label, old, new, change in comparison_rows(before, after)}


def printed(table: Table) -> str:
    console = Console(file=StringIO(), width=200, force_terminal=True, color_system=None)
    console.print(table)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_memory_is_the_mean_over_the_forms_that_both_were_asked() -> None:
    before = model("a", task("vt", 1, 1, 0, 0), task("recall", 1, 1, 1, 1), task("cwe", 0, 0, 0, 0))
    after = model("b", task("vt", 1, 0, 0, 0), task("recall", 1, 1, 0, 1))
    old, new, change = rows(before, after)[f"{SEEN} (2 of 3 in common)"]
    assert (old, new) == ("75.0%", "50.0%")
    errors = [statistics.stdev(changes) / 2 for changes in ([0, -1, 0, 0], [0, 0, -1, 0])]
    assert change == f"-25.0 ± {100 * math.hypot(*errors) / 2:.1f}"


def test_memory_names_what_is_not_paired_and_keeps_kinds_apart() -> None:
    before = model("a", task("vt", 1, 1), task("fwe", 0, 1, seen=False))
    after = model(
        "b", task("vt", 1, 0, sha256="other"), task("fwe", 1, 1, seen=False), task("completion", 0, seen=False)
    )
    found = rows(before, after)
    assert found[SEEN][2] == "-50.0 ± 50.0 (unpaired)"
    assert found[f"{UNSEEN} (1 of 2 in common)"] == ("50.0%", "100.0%", "+50.0 ± 50.0")


def test_memory_without_a_common_form_has_no_row() -> None:
    before, after = model("a", task("vt", 1, 1)), model("b", task("fwe", 1, 1, seen=False))
    assert [label for label in rows(before, after) if label.startswith("memory")] == []


def test_what_one_model_was_not_asked_is_not_measured() -> None:
    before = model("a", task("vt", 1, 1), task("vt", 1, 0, length=1024), texts=(text("t", [[1.0, 2.0]]),))
    after = model("b", task("vt", 1, 0), task("cwe", 0, 0), texts=(text("u", [[math.log(2)] * 2]),))
    found = rows(before, after)
    assert found["vt at 1024, teacher-forced"] == ("50.0%", "not measured", "")
    assert found["cwe at 512, teacher-forced"] == ("not measured", "0.0%", "")
    assert found["loss, t"] == ("1.5000", "not measured", "")
    assert found["perplexity a token, u"] == ("not measured", "2.00", "")


def test_a_mean_over_other_forms_stands_in_a_row_of_its_own() -> None:
    """The first model's own figure depends on which of its forms the other model was asked."""
    first = model("a", task("vt", 1, 1), task("recall", 0, 0))
    table = several_rows([first, model("b", task("vt", 1, 1)), model("c", task("recall", 0, 0))])
    label = f"{SEEN} (1 of 2 in common)"
    assert [row for row in table if row[0] == label] == [
        [label, "100.0%", "100.0%", "+0.0 ± <50.0", "", ""],
        [label, "0.0%", "", "", "0.0%", "+0.0 ± <50.0"],
    ]


@pytest.mark.parametrize("samples", [2, 24])
def test_equal_prompts_show_the_error_that_one_other_prompt_would_make(samples: int) -> None:
    """An error of 0 would claim certainty from however few prompts."""
    one_apart = statistics.stdev([1.0, *[0.0] * (samples - 1)]) / math.sqrt(samples)
    same, zero = [1.0] * samples, [0.0] * samples
    tasks = (task("vt", *same), task("recall", *zero), task("fwe", *same, seen=False))
    found = rows(model("a", *tasks), model("b", *tasks))
    assert found["vt at 512, teacher-forced"] == ("100.0%", "100.0%", f"+0.0 ± <{100 * one_apart:.1f}")
    assert found[SEEN][2] == f"+0.0 ± <{100 * math.hypot(one_apart, one_apart) / 2:.1f}"
    alone = {label: error for label, _, error in model_rows(model("a", *tasks))}
    assert alone["recall at 512, teacher-forced"] == alone[UNSEEN] == f"<{one_apart:.1%}"
    assert alone[SEEN] == f"<{math.hypot(one_apart, one_apart) / 2:.1%}"
    # One prompt that differs is an error of its own; one prompt alone says nothing at all.
    other = model("b", task("vt", 0.0, *same[1:]))
    assert rows(model("a", task("vt", *same)), other)["vt at 512, teacher-forced"][2].endswith(
        f" ± {100 * one_apart:.1f}"
    )
    single = model("a", task("vt", 1.0))
    assert rows(single, single)["vt at 512, teacher-forced"][2] == "+0.0"


def test_scores_of_a_third_each_have_no_spread_either() -> None:
    """Though their mean, rounded, is not a third."""
    thirds = [1 / 3] * 25
    found = model("a", task("fwe", *thirds))
    assert found.tasks[0].score.standard_error != 0
    assert {error for _, _, error in model_rows(found)} == {"<4.0%"}


def test_without_the_same_prompts_each_model_has_one_that_could_differ() -> None:
    """Two independent errors, of 1/4 and of 1/3."""
    one, other = model("a", task("vt", 1, 1, 1, 1)), model("b", task("vt", 0, 0, 0))
    bound = 100 * math.hypot(1 / 4, 1 / 3)
    found = rows(one, other)
    assert found["vt at 512, teacher-forced"][2] == f"-100.0 ± <{bound:.1f} (unpaired)"
    assert found[SEEN][2] == f"-100.0 ± <{bound:.1f} (unpaired)"


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (("dense", None, None), ("half", "dense", 0.25), {"dense": ("0", "0.2500", "")}),
        (("half", "dense", 0.25), ("dense", None, None), {"dense": ("0.2500", "0", "")}),
        (("most", "dense", 0.125), ("half", "dense", 0.25), {"dense": ("0.1250", "0.2500", "")}),
        (("alone", None, None), ("half", "dense", 0.25), {"dense": ("not measured", "0.2500", "")}),
        (
            ("most", "other", 0.5),
            ("half", "dense", 0.25),
            {"dense": ("not measured", "0.2500", ""), "other": ("0.5000", "not measured", "")},
        ),
        (("dense", "other", 0.5), ("half", "dense", 0.25), {"dense": ("not measured", "0.2500", "")}),
    ],
)
def test_divergence_is_each_models_own(
    before: tuple[str, str | None, float | None],
    after: tuple[str, str | None, float | None],
    expected: dict[str, tuple[str, str, str]],
) -> None:
    models = [
        model(name, task("vt", 1, 1, kl=kl), texts=(text("t", [[1.0]], kl),), reference=reference)
        for name, reference, kl in (before, after)
    ]
    found = rows(*models)
    for reference, cells in expected.items():
        for kind in ("text", "prompts"):
            assert found[f"KL to {reference} a token, {kind}"] == cells


def test_divergences_on_other_text_are_unpaired() -> None:
    models = [
        model(name, texts=(text("t", [[1.0]], 0.5, first_token=token),), reference="dense")
        for name, token in (("a", 0), ("b", 9))
    ]
    assert rows(*models)["KL to dense a token, text"] == ("0.5000", "0.5000", "(unpaired)")


def test_nothing_in_common_is_refused() -> None:
    first, other = model("a", task("vt", 1)), model("b", task("vt", 1, length=1024), texts=(text("t", [[1.0]]),))
    require_something_in_common([first, model("c", task("vt", 0, sha256="other"))])
    with pytest.raises(RequestError, match=r"a and b were measured on different .* \(vt at 512 .*; t, vt at 1024 "):
        require_something_in_common([first, first, other])


def test_the_error_of_a_perplexity_is_that_of_the_loss_to_first_order() -> None:
    """Two windows of two tokens with means 1 and 2: the standard error of their mean is 1/2."""
    found = {label: cells for label, *cells in model_rows(model("a", texts=(text("t", [[1.0, 1.0], [2.0, 2.0]]),)))}
    assert found["perplexity a token, t"] == [f"{math.exp(1.5):.2f}", f"{math.exp(1.5) / 2:.2f}"]


@pytest.mark.parametrize(
    ("models", "expected"),
    [
        ([("m", "a/m"), ("m", "b/m/")], ["m (a)", "m (b)"]),
        ([("m", "m"), ("m", "b/m")], ["m", "m (b)"]),
        ([("m", "a/m"), ("m", "a/m")], ["m (a) (1)", "m (a) (2)"]),
        ([("m", None), ("n", "a/n"), ("m", None)], ["m (1)", "n", "m (2)"]),
    ],
)
def test_models_of_one_name_are_told_apart(models: list[tuple[str, str | None]], expected: list[str]) -> None:
    assert headings([model(name, given=given) for name, given in models]) == expected


def test_names_are_shown_as_they_are(tmp_path: Path) -> None:
    """Square brackets and colons are markup to rich, dollar signs mathematics to matplotlib."""
    name, path = "m[bold]x[/y]:smile:", "_$x^{$[/red]"
    figures = model(name, task("vt[i]", 1, 1), texts=(text(path, [[1.0]]),))
    for table in (model_table(figures), comparison_table([figures, figures])):
        assert all(part in printed(table) for part in (name, path, "vt[i] at 512"))
    draw_quality([figures, model("b", texts=(text(path, [[1.0]]),))], tmp_path / "figure.svg")
    assert (tmp_path / "figure.svg").stat().st_size > 0


def test_texts_are_called_by_what_tells_them_apart() -> None:
    names = ["/data/long/prose.txt", "/data/long/code.txt", "/other/long/code.txt", "org/name", "demo", "b.jsonl"]
    assert short_names([*names, "x/b.jsonl", "x/b.jsonl"]) == {
        "/data/long/prose.txt": "prose.txt",
        "/data/long/code.txt": "data/long/code.txt",
        "/other/long/code.txt": "other/long/code.txt",
        "org/name": "org/name",
        "demo": "demo",
        "b.jsonl": "b.jsonl",
        "x/b.jsonl": "x/b.jsonl",
    }


def test_files_of_one_name_stay_two_texts() -> None:
    """Also where only two of three models show both."""
    first, second = (text(f"/{folder}/held_out.txt", [[loss]]) for folder, loss in (("a", 1.0), ("b", 2.0)))
    table = several_rows(
        [model("one", texts=(first, second)), model("two", texts=(first,)), model("3", texts=(second,))]
    )
    losses = {row[0]: row[1] for row in table if row[0].startswith("loss, ")}
    assert losses == {"loss, a/held_out.txt": "1.0000", "loss, b/held_out.txt": "2.0000"}


def test_a_narrow_terminal_shows_names_whole() -> None:
    texts = (text("/data/a_rather_long_name_of_a_text_prose.txt", [[1.0]]),)
    stream = StringIO()
    models = [model("a-rather-long-model-0.5", texts=texts), model("b", texts=texts)]
    Console(width=60, file=stream).print(comparison_table(models))
    cells = [re.split("[│┃]", line) for line in stream.getvalue().splitlines()]
    labels, before = ("".join(row[number].strip() for row in cells if len(row) > 3) for number in (1, 2))
    assert "…" not in stream.getvalue()
    assert "a_rather_long_name_of_a_text_prose.txt" in labels
    assert "a-rather-long-model-0.5" in before
