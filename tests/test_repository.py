"""What no unit test sees: the direction of imports, where names may stand, what a start of the command loads."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests import source_rules

ROOT = Path(__file__).resolve().parents[1]
SOURCE_FOLDERS = ("compressor", "tests", "benchmarks")
TEXT_SUFFIXES = {".py", ".md", ".toml", ".yaml", ".yml", ".txt", ".json", ".sh", ""}

# Part of the package -> the other parts that it may import; `architectures.base` would allow that module alone.
# Stages pass each other the types of `artifacts`, and import none of the parts that compose them, which have no row.
ALLOWED_IMPORTS: dict[str, set[str]] = {
    "errors": set(),
    "out_of_memory": set(),
    "abbreviation": set(),
    "file_kinds": {"errors"},
    "json_text": set(),
    "demo": set(),
    "progress": set(),
    "width": {"errors", "naming"},
    "selection": {"errors"},
    "reference": {"errors"},
    "artifacts": {"errors"},
    "checkpoint": {"errors", "file_kinds", "json_text"},
    "architectures": {"errors", "abbreviation", "reference"},
    "calibration": {
        "errors",
        "naming",
        "artifacts",
        "architectures",
        "demo",
        "file_kinds",
        "json_text",
        "tokenization",
    },
    "surgery": {"errors", "artifacts", "architectures", "checkpoint", "export"},
    "export": {"errors", "json_text", "artifacts", "checkpoint"},
    "recovery": {"errors", "json_text", "naming", "out_of_memory", "section", "architectures"},
    "sensitivity": {"errors", "naming", "architectures", "recovery"},
    "fisher": {"errors", "naming", "architectures", "selection", "recovery"},
    "tokenization": {"errors"},
    "prompts": {"errors", "demo", "file_kinds", "json_text"},
    "evaluation": {"errors", "file_kinds", "json_text", "prompts", "tokenization", "architectures.cached_forward"},
    "probe": {"errors", "architectures", "evaluation"},
    "speed": {"errors", "out_of_memory", "architectures"},
}
# Parts that few may import: the command stands above the pipeline, the pipeline above the rest.
IMPORTED_BY: dict[str, set[str]] = {"cli": {"__main__"}, "pipeline": {"__init__", "cli"}}

Rule = Callable[[ast.Module], Iterable[str]]


def modules(*folders: str) -> Iterator[tuple[str, str]]:
    """(path from the root, source) of every Python file below the folders."""
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), path.read_text()


def offences(rule: Rule, sources: Iterable[tuple[str, str]]) -> list[str]:
    return [f"{path}:{offence}" for path, source in sources for offence in rule(ast.parse(source))]


def part_of(path: str) -> str:
    """`compressor/export/writer.py` -> `export`, `compressor/cli.py` -> `cli`."""
    return Path(path).parts[1].removesuffix(".py")


def may_import(part: str, target: str) -> bool:
    """Whether a module of `part` may import `compressor.<target>`."""
    target_part = target.partition(".")[0]
    if target_part == part:
        return True
    if part in ALLOWED_IMPORTS:
        return any(f"{target}.".startswith(f"{allowed}.") for allowed in ALLOWED_IMPORTS[part])
    return target_part not in IMPORTED_BY or part in IMPORTED_BY[target_part]


def own_imports() -> Iterator[tuple[str, int, str]]:
    """(path, line, dotted name below `compressor`) of every import of our own."""
    for path, source in modules("compressor"):
        for line, name in source_rules.imported_modules(ast.parse(source)):
            if name.split(".")[0] == "compressor":
                yield path, line, name.removeprefix("compressor").removeprefix(".")


def test_imports_go_one_way() -> None:
    wrong = [f"{path}:{line}: {name}" for path, line, name in own_imports() if not may_import(part_of(path), name)]
    assert wrong == []


def test_no_two_parts_import_each_other() -> None:
    graph: dict[str, set[str]] = {}
    for path, _, name in own_imports():
        graph.setdefault(part_of(path), set()).add(name.partition(".")[0])
    order = TopologicalSorter({part: targets - {part} for part, targets in graph.items()})
    order.prepare()  # raises CycleError, which names the cycle


def test_parameter_names_stand_in_the_adapters_only() -> None:
    elsewhere = (pair for pair in modules("compressor") if part_of(pair[0]) != "architectures")
    assert offences(source_rules.family_names, elsewhere) == []


@pytest.mark.parametrize(
    "rule",
    [source_rules.asserts, source_rules.broad_excepts, source_rules.attribute_probes],
    ids=lambda rule: rule.__name__,
)
def test_package_keeps(rule: Rule) -> None:
    assert offences(rule, modules("compressor")) == []


def test_modules_and_functions_are_short() -> None:
    long = [f"{path}:{line}" for path, text in modules(*SOURCE_FOLDERS) for line in source_rules.long_modules(text)]
    assert long + offences(source_rules.long_functions, modules(*SOURCE_FOLDERS)) == []


@pytest.mark.parametrize(
    ("rule", "source"),
    [
        (source_rules.asserts, "assert ready"),
        (source_rules.broad_excepts, "try:\n    go()\nexcept Exception:\n    pass"),
        (source_rules.broad_excepts, "try:\n    go()\nexcept (OSError, BaseException) as error:\n    pass"),
        (source_rules.broad_excepts, "try:\n    go()\nexcept:\n    pass"),
        (source_rules.attribute_probes, "hasattr(config, 'width')"),
        (source_rules.attribute_probes, "getattr(config, 'width', None)"),
        (source_rules.family_names, "name = 'model.layers.0.attn.q_proj.weight'"),
        (source_rules.family_names, "name = f'{prefix}.in_proj_qkv.weight'"),
        (source_rules.family_names, "width = config.linear_key_head_dim"),
        (source_rules.long_functions, "def long():\n" + "    step()\n" * 55),
    ],
)
def test_a_rule_sees_an_offence(rule: Rule, source: str) -> None:
    assert offences(rule, [("module.py", source)]) != []


@pytest.mark.parametrize(
    ("part", "target"),
    [
        ("selection", "artifacts.Selection"),
        ("calibration", "export.writer"),
        ("recovery", "calibration.tokens"),
        ("export", "architectures.base"),
        ("pipeline", "cli.main"),
        ("reporting", "pipeline.compress"),
        ("surgery", "errors_of_another_kind"),
    ],
)
def test_an_import_against_the_direction_is_seen(part: str, target: str) -> None:
    assert not may_import(part, target)


def test_no_file_names_a_folder_of_one_machine() -> None:
    absolute = re.compile(r"(?<![\w.\-}<*])/(?:home|root|Users|work|mnt)/\w")
    files = [path for path in ROOT.iterdir() if path.is_file()]
    for folder in (*SOURCE_FOLDERS, "docs", "recipes", ".ci"):
        files += [path for path in (ROOT / folder).rglob("*") if path.is_file()]
    wrong = [
        f"{path.relative_to(ROOT)}: {match.group()}"
        for path in files
        if path.suffix in TEXT_SUFFIXES and "__pycache__" not in path.parts
        for match in absolute.finditer(path.read_text())
    ]
    assert wrong == []


def test_the_command_starts_without_the_heavy_libraries() -> None:
    heavy = ("torch", "transformers", "fla", "datasets", "numpy", "pyarrow")
    code = f"import sys, compressor.cli; print([name for name in {heavy} if name in sys.modules])"
    child = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert child.stdout.strip() == "[]"
