"""Ctrl-C while the command still imports is one sentence, as it is later."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# A Ctrl-C that comes at the import of the module that is named first; the rest are the command's words.
PROGRAM = """
import sys
from importlib.abc import MetaPathFinder

class Interrupt(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == sys.argv[1]:
            raise KeyboardInterrupt

from compressor.cli import main

sys.meta_path.insert(0, Interrupt())
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("compressor.selection.registry", ["--ratio", "0.5"]),
        ("pydantic", ["--ratio", "0.5"]),
        ("rich", ["--ratio", "0.5"]),
        ("torch", ["--ratio", "0.5"]),
        ("compressor.recover_command", ["recover", "folder"]),
        ("yaml", ["recover", "folder"]),
        ("compressor.evaluate_command", ["evaluate"]),
        ("pydantic", ["validate", "recipe.yaml"]),
        ("torch", ["inspect"]),
    ],
)
def test_an_interrupt_during_an_import(module: str, words: list[str]) -> None:
    command = [sys.executable, "-c", PROGRAM, module, *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "compress: interrupted; nothing was written.\n")


def test_nothing_slow_is_imported_before_an_interrupt_is_explained() -> None:
    code = "import sys; import compressor.cli; print(*{name.split('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not {"rich", "pydantic", "yaml", "torch"} & set(done.stdout.split())
