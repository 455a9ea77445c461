"""README.md and docs/: every command is one that the command line takes, every link and benchmark exists."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path

import pytest

from compressor.cli import main

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands() -> list[tuple[str, str]]:
    """(page, command) of every indented line that calls `compress`; two spaces begin what is said of it."""
    found = []
    for page in PAGES:
        for line in page.read_text(encoding="utf-8").splitlines():
            match = re.fullmatch(r"    (compress .*?|accelerate launch .*?)(\s{2,}.*)?", line)
            if match:
                found.append((page.name, match[1]))
    return found


def test_there_are_commands() -> None:
    assert len(commands()) > 10


@pytest.mark.parametrize(("page", "command"), commands())
def test_commands_are_understood(
    page: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model or file that is not there gives exit status 2; what argparse does not know ends in SystemExit."""
    monkeypatch.chdir(tmp_path)
    words = shlex.split(command)
    words = words[words.index("compressor") + 1 :] if words[0] == "accelerate" else words[1:]
    words = [f"./{word}" if word.isupper() and len(word) > 1 else word for word in words]
    bundled = words[0].startswith("--")
    status = main([*words, "--dry-run"] if bundled else words)
    assert status == (0 if bundled else 2), capsys.readouterr().err


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_benchmarks_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
        if "://" not in target:
            assert (page.parent / target).exists(), target
    for page_of, anchor in re.findall(r"\]\(([^)#\s]*)#([^)\s]+)\)", text):
        if "://" not in page_of:
            linked = (page.parent / page_of if page_of else page).read_text(encoding="utf-8")
            headings = [
                re.sub(r"[^\w\- ]", "", line.lstrip("# ").lower()).replace(" ", "-")
                for line in linked.splitlines()
                if line.startswith("#")
            ]
            assert anchor in headings, anchor
    for module in re.findall(r"python -m (benchmarks\.\w+)", text):
        assert importlib.util.find_spec(module) is not None, module
