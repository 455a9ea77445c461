"""Rules that a module's syntax tree is held to. Each takes the tree and yields one line an offence."""

from __future__ import annotations

import ast
from collections.abc import Iterator

MAX_MODULE_LINES = 300
MAX_FUNCTION_LINES = 55

# Checkpoint parameters and config fields of the families. They are spelled in compressor/architectures/ alone.
FAMILY_NAMES = frozenset(
    {
        *("q_proj", "k_proj", "v_proj", "q_conv1d", "k_conv1d", "v_conv1d", "A_log", "dt_bias"),
        *("in_proj_qkv", "in_proj_qkvz", "in_proj_ba", "in_proj_a", "in_proj_b", "in_proj_z"),
        *("linear_key_head_dim", "linear_num_key_heads", "linear_value_head_dim", "linear_num_value_heads"),
        *("expand_k", "expand_v", "state_size", "ssm_state_size"),
    }
)


def long_modules(source: str) -> Iterator[str]:
    lines = len(source.splitlines())
    if lines > MAX_MODULE_LINES:
        yield f"1: {lines} lines"


def long_functions(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                yield f"{node.lineno}: {node.name} has {lines} lines"


def asserts(tree: ast.Module) -> Iterator[str]:
    """`python -O` removes them; what the user did wrong is an exception of `compressor.errors`."""
    yield from (f"{node.lineno}: assert" for node in ast.walk(tree) if isinstance(node, ast.Assert))


def broad_excepts(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler):
            types = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            names = {None if kind is None else ast.unparse(kind) for kind in types}
            if names & {None, "Exception", "BaseException"}:
                yield f"{node.lineno}: {ast.unparse(node).splitlines()[0]}"


def attribute_probes(tree: ast.Module) -> Iterator[str]:
    """`hasattr`, and `getattr` with a default: an adapter says what a family has."""
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    for call in calls:
        name = ast.unparse(call.func)
        if name == "hasattr" or (name == "getattr" and len(call.args) == 3):
            yield f"{call.lineno}: {ast.unparse(call)}"


def family_names(tree: ast.Module) -> Iterator[str]:
    """Names of `FAMILY_NAMES` as a part of a string or as an attribute; prose of docstrings may name them."""
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in FAMILY_NAMES:
            yield f"{node.lineno}: .{node.attr}"
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            found = FAMILY_NAMES & set(node.value.replace("\\", ".").split("."))
            yield from (f"{node.lineno}: {name!r} in a string" for name in sorted(found))


def imported_modules(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every absolute import, inside functions too; `from a import b` gives `a.b`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
