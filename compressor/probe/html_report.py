"""One HTML file that holds everything it shows: figures inline, no script, nothing fetched."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from html import escape

Cell = str | int | float | None

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; border-bottom: 1px solid #ddd; }
figure { margin: 1rem 0; } img { max-width: 100%; } figcaption { color: #555; font-size: 0.92em; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: 0.8rem 0; }
th, td { padding: 0.2rem 0.7rem; text-align: right; border-bottom: 1px solid #e4e4e4; }
th:first-child, td:first-child { text-align: left; } th { background: #f6f6f6; }
dt { font-weight: 600; } dd { margin: 0 0 0.4rem 1.5rem; }
.wide { overflow-x: auto; } .note { color: #8a4b00; }
"""


def paragraph(text: str, kind: str = "") -> str:
    return f'<p class="{escape(kind)}">{escape(text)}</p>' if kind else f"<p>{escape(text)}</p>"


def heading(text: str) -> str:
    return f"<h2>{escape(text)}</h2>"


def table(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """Numbers to four digits; None is a dash."""
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in columns)
    body = "".join("<tr>" + "".join(f"<td>{escape(_shown(cell))}</td>" for cell in row) + "</tr>\n" for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody></table></div>'


def details(summary: str, content: str) -> str:
    return f"<details><summary>{escape(summary)}</summary>{content}</details>"


def figure(image: bytes, caption: str) -> str:
    """A PNG with its caption."""
    data = base64.b64encode(image).decode("ascii")
    source = f"data:image/png;base64,{data}"
    text = escape(caption)
    return f'<figure><img src="{source}" alt="{text}"><figcaption>{text}</figcaption></figure>'


def facts(values: Mapping[str, Cell]) -> str:
    return table(("", ""), [(name, value) for name, value in values.items()])


def definitions(terms: Mapping[str, str]) -> str:
    body = "".join(f"<dt>{escape(term)}</dt><dd>{escape(meaning)}</dd>\n" for term, meaning in terms.items())
    return f"<dl>\n{body}</dl>"


def page(title: str, parts: Sequence[str]) -> str:
    body = "\n".join(parts)
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; '
        f"style-src 'unsafe-inline'\">\n<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n"
        f"<body>\n<h1>{escape(title)}</h1>\n{body}\n</body>\n</html>\n"
    )


def _shown(cell: Cell) -> str:
    if cell is None:
        return "\u2013"
    return f"{cell:.4g}" if isinstance(cell, float) else str(cell)
