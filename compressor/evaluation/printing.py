"""Tables on a terminal. Names of models, texts and tasks are the user's: no cell is read as markup."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Column, Table
from rich.text import Text

from compressor.evaluation.results import ModelFigures
from compressor.evaluation.tables import headings, model_rows, several_rows


def model_table(figures: ModelFigures) -> Table:
    """One model alone."""
    table = _table(["", "value", "± standard error"])
    table.title = Text(figures.model, style="table.title")
    for row in model_rows(figures):
        _add_row(table, row)
    return table


def comparison_table(models: Sequence[ModelFigures]) -> Table:
    """The first model against each of the others."""
    first, *others = headings(models)
    table = _table(["", first, *(heading for name in others for heading in (name, "difference ± s.e."))])
    _add_row(table, _one_a_model("key width of a head", [str(model.key_dim) for model in models]))
    sizes = [f"{model.state_bytes_per_sequence:,}" for model in models]
    _add_row(table, _one_a_model("state bytes per sequence", sizes))
    for row in several_rows(models):
        _add_row(table, row)
    return table


def _table(titles: Sequence[str]) -> Table:
    """Cells wider than their column go on in the next line: names that begin alike stay apart."""
    return Table(*(Column(Text(title), overflow="fold") for title in titles))


def _one_a_model(label: str, values: Sequence[str]) -> list[str]:
    """A row without differences."""
    return [label, values[0], *(cell for value in values[1:] for cell in (value, ""))]


def _add_row(table: Table, row: Sequence[str]) -> None:
    table.add_row(*(Text(cell) for cell in row))
