"""Fixtures of the whole suite, and what a machine lacks: a GPU, the larger trained models."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

# Read by huggingface_hub when it is first imported. A test that needs the network asks for it in a child process.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Tiny models gain nothing from a second thread, and lose minutes to it where another process holds a core.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

from compressor.demo import demo_model_path

SHARED = Path(__file__).resolve().parents[2] / "shared"
SHARED_FOLDERS = {"shared_models": SHARED / "models", "shared_text": SHARED / "text"}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("not measured: mounting a small file system is not permitted")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The bundled trained Gated DeltaNet checkpoint."""
    return demo_model_path()


@pytest.fixture(scope="session")
def shared_models() -> Path:
    """Folder of the larger trained models, one checkpoint a folder. Marks the test as `shared`."""
    return SHARED_FOLDERS["shared_models"]


@pytest.fixture(scope="session")
def shared_text() -> Path:
    """Folder of the test texts `test_prose.txt`, `test_docs.txt`, `test_code.txt`. Marks the test as `shared`."""
    return SHARED_FOLDERS["shared_text"]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what uses the shared folders, before `-m` selects; skip what this machine cannot run."""
    missing = [path for path in SHARED_FOLDERS.values() if not path.is_dir()]
    no_gpu = not torch.cuda.is_available()
    for item in items:
        if isinstance(item, pytest.Function) and SHARED_FOLDERS.keys() & set(item.fixturenames):
            item.add_marker("shared")
        if missing and item.get_closest_marker("shared"):
            item.add_marker(pytest.mark.skip(reason=f"not measured: {missing[0]} is absent"))
        if no_gpu and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="not measured: no CUDA device"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what a bare clone did not measure."""
    reports = terminalreporter.stats.get("skipped", [])
    count = sum("shared" in report.keywords for report in reports)
    if count:
        terminalreporter.write_line(
            f"{count} tests marked `shared` were not run: they measure the larger trained models, and the folders "
            f"{' and '.join(str(path) for path in SHARED_FOLDERS.values())} are not both there."
        )
