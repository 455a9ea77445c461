"""README.md and docs/: every command is one that the command line takes, every link and benchmark exists."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from compressor.cli import main
from compressor.errors import RequestError
from compressor.selection.base import HeadStatistics

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands() -> list[tuple[str, str]]:
    """(page, command) of every indented line that calls `compress`; two spaces begin what is said of it."""
    found = []
    for page in PAGES:
        for line in page.read_text(encoding="utf-8").splitlines():
            match = re.fullmatch(r"    ((?:compress|accelerate launch|torchrun) .*?)(\s{2,}.*)?", line)
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
    words = words[words.index("compressor") + 1 :] if words[0] != "compress" else words[1:]
    words = [f"./{word}" if word.isupper() and len(word) > 1 else word for word in words]
    bundled = words[0].startswith("--")
    status = main([*words, "--dry-run"] if bundled else words)
    assert status == (0 if bundled else 2), capsys.readouterr().err


def test_inline_commands_name_options_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    """`compress VERB ... --option` within a sentence; what stands in a line of its own is run."""
    found = [
        (page.name, shlex.split(command))
        for page in PAGES
        for command in re.findall(r"`compress ([^`]*)`", page.read_text(encoding="utf-8"))
    ]
    assert len(found) > 10
    for page, words in found:
        verb = words[:1] if re.fullmatch("[a-z]+", words[0]) else []
        with pytest.raises(SystemExit) as ended:
            main([*verb, "--help"])
        assert ended.value.code == 0
        known = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
        assert {word for word in words if word.startswith("--")} <= known, (page, words)


def benchmark_source(name: str) -> str:
    """Of a benchmark and of all benchmarks that it imports."""
    text, waiting, seen = "", [name], set[str]()
    while waiting:
        each = waiting.pop()
        place = ROOT / "benchmarks" / each
        files = sorted(place.glob("*.py")) if place.is_dir() else [place.with_suffix(".py")]
        own = "".join(file.read_text(encoding="utf-8") for file in files if file.is_file())
        seen.add(each)
        imported = set(re.findall(r"(?:from|import) benchmarks\.(\w+)", own))
        waiting += sorted(imported - seen - set(waiting))
        text += own
    return text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_benchmarks_have_the_options_that_are_shown(page: Path) -> None:
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    for name, words in re.findall(r"python -m benchmarks\.(\w+)([^`\n]*)", text):
        source = benchmark_source(name)
        for option in re.findall(r"(?<= )--[a-z-]+", words):
            assert option == "--help" or f'"{option}"' in source, (name, option)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_and_targets_that_are_named_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for file in re.findall(r"\b(?:tests|benchmarks|compressor|recipes)/[a-z0-9_/]+\.(?:py|yaml|md)\b", text):
        assert (ROOT / file).is_file(), file
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"(?:^ +|`)make ([a-z-]+)", text, re.MULTILINE):
        assert f"\n{target}:" in makefile, target


def test_every_page_is_reached_from_the_readme() -> None:
    reached, waiting = set(), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page in reached:
            continue
        reached.add(page)
        links = re.findall(r"\]\(([^)#\s:]+\.md)", page.read_text(encoding="utf-8"))
        waiting += [(page.parent / link).resolve() for link in links]
    assert set(PAGES) <= reached


def test_the_tree_of_the_readme_names_every_module() -> None:
    tree = (ROOT / "README.md").read_text(encoding="utf-8").partition("## The tree")[2]
    entries = [path for path in (ROOT / "compressor").iterdir() if path.is_dir() or path.suffix == ".py"]
    names = [f"{path.name}/" if path.is_dir() else path.name for path in entries if not path.name.startswith("_")]
    assert [name for name in sorted(names) if not re.search(rf"(?<![a-z_]){re.escape(name)}", tree)] == []


def test_the_selector_that_is_shown_keeps_what_it_says() -> None:
    """The code of docs/adding-a-selector.md, on the statistics of two heads."""
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "adding-a-selector.md").read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(code, "adding-a-selector.md", "exec"), names)
    squares = torch.tensor([[1.0, 9.0, 4.0, 0.0], [2.0, 2.0, 3.0, 1.0]], dtype=torch.float64)
    nothing = torch.zeros_like(squares)
    statistics = HeadStatistics(torch.diag_embed(squares), torch.diag_embed(nothing), nothing, nothing, tokens=5)
    choice = names["LoudestSelector"]("qk", 1.5).select(statistics, 2, torch.Generator())
    assert choice.indices.tolist() == [[1, 2], [0, 2]]
    assert choice.diagnostics.retained_energy.tolist() == pytest.approx([13 / 14, 5 / 8])
    with pytest.raises(RequestError):
        names["LoudestSelector"]("qk", 1.5).select(statistics, 5, torch.Generator())


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
