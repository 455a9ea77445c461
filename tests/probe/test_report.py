"""The page holds everything it shows."""

from __future__ import annotations

import base64
from html.parser import HTMLParser

import pytest

from compressor.probe import html_report as html
from compressor.probe.figures import new_figure, png

PNG_BEGINNING = b"\x89PNG\r\n\x1a\n"
VOID = {"meta", "img", "br", "hr", "link", "input"}
REFERRING = {"src", "href", "srcset", "data", "action", "poster", "background"}


class Page(HTMLParser):
    """Tags in balance, images decoded, and every attribute or style that could fetch something."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.images: list[bytes] = []
        self.external: list[str] = []
        self.tags: list[str] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            prefix = "data:image/png;base64,"
            if name == "src" and value is not None and value.startswith(prefix):
                self.images.append(base64.b64decode(value.removeprefix(prefix), validate=True))
            elif name in REFERRING or "url(" in (value or ""):
                self.external.append(f"{tag} {name}={value}")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)
        if "url(" in data or "@import" in data:
            self.external.append(data)


def check_page(text: str, images: int) -> Page:
    """Parses, shows so many PNGs, runs no script and fetches nothing."""
    page = Page(text)
    assert page.external == []
    assert not {"script", "iframe", "link", "object", "embed"} & set(page.tags)
    assert len(page.images) == images
    assert all(image.startswith(PNG_BEGINNING) for image in page.images)
    assert text.startswith("<!DOCTYPE html>")
    return page


def test_a_page_is_whole_and_escaped() -> None:
    figure, (axes,) = new_figure(1)
    axes.plot([0, 1], [1, 0])
    hostile = '<script src="https://example.org/x.js"></script>'
    parts = [
        html.heading(hostile),
        html.paragraph(hostile, "note"),
        html.figure(png(figure), hostile + '" onerror="x'),
        html.details(hostile, html.table((hostile, "b"), [(hostile, 1.23456), (None, 3)])),
        html.facts({hostile: None}),
    ]
    page = check_page(html.page(hostile, parts), images=1)
    shown = "".join(page.text)
    assert shown.count(hostile) == 9
    assert "1.235" in shown
    assert "\u2013" in shown


@pytest.mark.parametrize("sneaked", ['<img src="https://example.org/a.png">', "<script></script>", "<p><b></p>"])
def test_the_check_sees_what_it_is_for(sneaked: str) -> None:
    with pytest.raises(AssertionError):
        check_page(html.page("a", [sneaked]), images=0)
