"""`compress verify`: prove in clean processes that a folder loads, runs, and is the cut it says it is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from compressor.architectures.base import Architecture
from compressor.errors import RunError
from compressor.report import VerificationReport
from compressor.verification.configs import config_difference, tokenizer_note

VERIFICATION_TOKENS = 256
"""Tokens of calibration text that both models read for the oracle; more than one chunk of 64."""
TRAINED_NOTE = "not checked against the original: its weights were trained after the cut, and are no slices any more"
UNTRAINED_NOTE = "what training leaves alone was checked: it is the slices of the original's that selection.json says"
REFITTED_NOTE = "the output projections were refitted: for the comparison the original got those of this folder"
ORACLE_TOLERANCE = 1e-3
"""Largest ||a - b|| / ||b|| of the logits that float32 rounding explains."""
GENERATION_TOLERANCE = 0.05
"""The same for generation with the cache against a full pass, in the checkpoint's dtype."""


@dataclass(frozen=True)
class Original:
    """The model a folder was cut from, on this machine.

    Attributes:
        folder: its files.
        scaled_epsilon: whether the folder's norm epsilon was multiplied by d_k / k.
        refitted: the folder's output projections are not the original's.
        trained: nor is what training changes; only the other tensors are compared, and no logits.
        targets: last names of the modules that got an adapter in training; None is all projections of the mixers.
    """

    folder: Path
    scaled_epsilon: bool
    refitted: bool
    trained: bool = False
    targets: tuple[str, ...] | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        """What a report has to say of the comparison, once it was passed."""
        if self.trained:
            return (TRAINED_NOTE, UNTRAINED_NOTE)
        return (REFITTED_NOTE,) if self.refitted else ()

    @property
    def words(self) -> list[str]:
        """The options by which the oracle's process knows it."""
        words = ["--original", str(self.folder)]
        words += ["--scaled"] * self.scaled_epsilon + ["--refitted"] * self.refitted + ["--trained"] * self.trained
        return words if self.targets is None else [*words, "--targets", *self.targets]


def verify_folder(
    folder: Path,
    architecture: Architecture,
    device: torch.device,
    tokens: list[int],
    original: Original | None,
    missing_original: str | None = None,
) -> VerificationReport:
    """Load `folder` with the stock classes in a process without this package, and check its config and the oracle.

    On a GPU every family generates with its stock kernels. On a CPU transformers families generate
    with fla hidden; fla's kernels need a GPU, so there the stock load is proven and the forward pass
    and generation run in a second process on the reference backend.

    Raises:
        RunError: a check failed; the message has the child's own words.
        RequestError: the stock classes cannot read a config.
    """
    if original is not None:
        _refuse_other_config(folder, architecture, original)
    stock_generates = device.type == "cuda" or not architecture.needs_fla
    stock = _run_stock_load(folder, architecture, device, stock_generates)
    notes = [] if missing_original is None else [missing_original]
    notes += [] if original is None else _notes(folder, original)
    oracle = _run_oracle(folder, original, tokens)
    _refuse_other_model(folder, oracle)
    generated_by = "stock kernels" if device.type == "cuda" else "stock transformers, fla hidden"
    if not stock_generates:
        generated_by = "reference backend"
        notes.append(
            "fla's kernels need a GPU: the stock load was proven, the forward pass ran on the reference backend"
        )
    if stock["fla_softmax_layers"]:
        notes.append("this model has softmax layers, for which fla needs flash-attn on a GPU")
    error = (stock if stock_generates else oracle)["generation_error"]
    if not error <= GENERATION_TOLERANCE:
        raise RunError(
            f"{folder}: generation with the cache ({generated_by}) gives other logits than one full pass "
            f"({error:.2g} apart, at most {GENERATION_TOLERANCE:g}); with fla 0.6 use transformers below 5.24."
        )
    return VerificationReport(
        passed=True,
        stock_class=stock["class"],
        generated_by=generated_by,
        generation_error=error,
        oracle_relative_error=oracle["relative_error"],
        device=str(device),
        notes=notes,
    )


def _refuse_other_config(folder: Path, architecture: Architecture, original: Original) -> None:
    """Of a trained folder the logits tell nothing, and of any other not which field it is."""
    difference = config_difference(architecture, original.folder, folder, original.scaled_epsilon)
    if difference is not None:
        raise RunError(f"{difference}; the checkpoint is not the cut it says: set it back, or compress again.")


def _refuse_other_model(folder: Path, oracle: dict[str, Any]) -> None:
    if oracle["first_difference"] is not None:
        raise RunError(
            f"{folder}: {oracle['first_difference']} is not the slice of the original's that selection.json says; "
            "the checkpoint is not the cut it says."
        )
    if oracle["relative_error"] is not None and not oracle["relative_error"] <= ORACLE_TOLERANCE:
        raise RunError(
            f"{folder}: logits differ from the original with the dropped channels zeroed by "
            f"{oracle['relative_error']:.2g} (at most {ORACLE_TOLERANCE:g}); the checkpoint is not the cut it says."
        )


def _notes(folder: Path, original: Original) -> list[str]:
    tokenizer = tokenizer_note(original.folder, folder)
    return [*original.notes, *([] if tokenizer is None else [tokenizer])]


def _run_stock_load(folder: Path, architecture: Architecture, device: torch.device, generate: bool) -> dict[str, Any]:
    script = Path(__file__).with_name("stock_load.py")
    command = [sys.executable, "-P", str(script), str(folder), "--device", str(device)]
    if architecture.needs_fla:
        command.append("--import-fla")
    elif device.type == "cpu":
        command.append("--hide-fla")
    if generate:
        command.append("--generate")
    stock = _run_child(command, f"the stock load of {folder}", {})
    if stock["problems"] or stock["imported_compressor"]:
        raise RunError(f"{folder} does not load as it is with the stock classes: {'; '.join(stock['problems'])}")
    return stock


def _run_oracle(folder: Path, original: Original | None, tokens: list[int]) -> dict[str, Any]:
    """On the CPU everywhere: exact in float32, and no GPU kernel has to be compiled for it."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(tokens[:VERIFICATION_TOKENS], file)
        file.flush()
        command = [sys.executable, "-m", "compressor.verification.oracle", str(folder)]
        command += ["--tokens", file.name]
        if original is not None:
            command += original.words
        return _run_child(command, f"the forward pass of {folder}", {"CUDA_VISIBLE_DEVICES": ""})


def _run_child(command: list[str], what: str, variables: dict[str, str]) -> dict[str, Any]:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", **variables}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode != 0:
        last = [line for line in done.stderr.strip().splitlines() if line.strip()][-1:] or ["no message"]
        raise RunError(f"{what} failed in a clean process (exit {done.returncode}): {last[0].strip()}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result
