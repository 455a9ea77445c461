"""The report as headless Chromium shows it: figures are there, and nothing is fetched."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
from matplotlib.image import imread

from compressor.cli import main
from compressor.probe import html_report as html
from tests.tiny_models import save_tiny, save_tiny_tokenizer

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next((path for path in map(shutil.which, BROWSERS) if path is not None), "")
VIRIDIS_HIGHEST, TAB_BLUE = (253, 231, 37), (31, 119, 180)

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not BROWSER, reason="not measured: no Chromium")]


def screenshot(page: Path, folder: Path) -> np.ndarray:
    """Pixels [rows, columns, 3] of the first 3,000 rows."""
    image = folder / "page.png"
    # Chromium refuses to run as root with its sandbox; the page is our own.
    words = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"]
    words += ["--window-size=1200,3000", f"--screenshot={image}", page.as_uri()]
    subprocess.run(words, check=True, capture_output=True, timeout=300)
    return np.asarray(np.round(imread(image)[..., :3] * 255), dtype=np.uint8)


def pixels(shown: np.ndarray, color: tuple[int, int, int]) -> int:
    return int((np.abs(shown.astype(int) - color).max(-1) <= 3).sum())


def test_figures_are_shown(tmp_path: Path) -> None:
    model = save_tiny_tokenizer(save_tiny("gated_deltanet", tmp_path / "model"))
    (tmp_path / "text.txt").write_text("the state of a layer is a matrix, and it forgets. " * 40)
    words = ["--every", "64", "--length", "256", "--documents", "3", "--text", str(tmp_path / "text.txt")]
    words += ["--no-truncation", "--device", "cpu", "--output", str(tmp_path / "out")]
    assert main(["probe", str(model), *words]) == 0
    report = tmp_path / "out" / "report.html"
    shown = screenshot(report, tmp_path)
    bare = tmp_path / "bare.html"
    bare.write_text(re.sub(r"data:image/png;base64,[^\"]*", "data:,", report.read_text(encoding="utf-8")), "utf-8")
    without = screenshot(bare, tmp_path)
    for color in (VIRIDIS_HIGHEST, TAB_BLUE):
        assert pixels(shown, color) > 200
        assert pixels(without, color) == 0


@contextmanager
def counting_server() -> Iterator[tuple[str, list[str]]]:
    """An address on this machine, and the paths that were asked of it."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_error(404)

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_nothing_is_fetched_even_if_a_page_names_it(tmp_path: Path) -> None:
    with counting_server() as (address, asked):
        hostile = f'<img src="{address}/a.png"><link rel="stylesheet" href="{address}/b.css">'
        page = html.page("a", [hostile, f'<script src="{address}/c.js"></script>'])
        path = tmp_path / "page.html"
        path.write_text(page, "utf-8")
        screenshot(path, tmp_path)
        assert asked == []
        path.write_text(re.sub(r"<meta http-equiv[^>]*>", "", page), "utf-8")
        screenshot(path, tmp_path)
        assert sorted(asked) == ["/a.png", "/b.css", "/c.js"]
