"""A run from a Hub cache, offline: the pinned revision serves every file."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.test_pipeline import FAST, make_source, make_text

REVISIONS = {"main": "a" * 40, "v1": "b" * 40}


def fake_cache(root: Path) -> Path:
    """What huggingface_hub leaves behind: blobs, snapshots of links to them, refs."""
    repository = root / "models--org--tiny"
    (repository / "refs").mkdir(parents=True)
    for position, (name, commit) in enumerate(REVISIONS.items()):
        (repository / "refs" / name).write_text(commit)
        source = make_source("q35", root / f"source-{name}")
        (source / "chat_template.jinja").write_text(f"{{{{ messages }}}} of {name}")
        snapshot = repository / "snapshots" / commit
        snapshot.mkdir(parents=True)
        blobs = repository / "blobs"
        blobs.mkdir(exist_ok=True)
        for path in source.iterdir():
            blob = blobs / f"{position}-{path.name}"
            shutil.copy(path, blob)
            (snapshot / path.name).symlink_to(os.path.relpath(blob, snapshot))
    return repository


def test_pinned_revision_from_the_cache(tmp_path: Path) -> None:
    repository = fake_cache(tmp_path / "hub")
    output = tmp_path / "out"
    words = [
        "org/tiny",
        "--revision",
        "v1",
        "--ratio",
        "0.5",
        "--output-dir",
        str(output),
        "--no-verify",
        "--no-refit",
        "--no-evaluate",
        *FAST,
    ]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path / "hub")}
    command = [sys.executable, "-m", "compressor", *words, "--calibration", str(make_text(tmp_path))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (output / "chat_template.jinja").read_text() == "{{ messages }} of v1"
    report = json.loads((output / "compression.json").read_text())
    assert (report["base_model"], report["base_revision"]) == ("org/tiny", REVISIONS["v1"])
    assert f"revision: {REVISIONS['v1']}" in (output / "recipe.yaml").read_text()
    assert "base_model: org/tiny" in (output / "README.md").read_text()
    shutil.rmtree(repository)
    assert not any(path.is_symlink() for path in output.iterdir())
