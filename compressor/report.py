"""The result of a run: what `compress()` returns and `compression.json` holds.

Field names are stable; the README documents them. A figure that was not measured is None.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from compressor.evaluation.results import Difference, ModelFigures
from compressor.export.file_records import FileRecord

SCHEMA = 1
_REPORTED_PACKAGES = ("torch", "triton", "transformers", "flash-linear-attention", "safetensors")


@dataclass(frozen=True)
class BeforeAfter:
    before: int
    after: int


@dataclass(frozen=True)
class LayerReport:
    """Diagnostics of one layer's key heads, a list entry a head; an infinite value is None."""

    layer: int
    max_rho: list[float | None]
    swaps: list[int]
    numerical_rank: list[int]
    rank_deficient: list[bool]
    sigma_min: list[float | None]
    sigma_max: list[float | None]
    condition_number: list[float | None]
    retained_energy: list[float | None]


@dataclass(frozen=True)
class CalibrationReport:
    """`retrieval_share` is what was asked for; the three after it are what it gave, `retrieval_prompts` whole ones."""

    source: str
    sha256: str
    tokens: int
    requested_tokens: int
    documents: int
    sequence_length: int
    retrieval_share: float
    retrieval_sequences: int
    retrieval_prompts: int
    retrieval_tasks: tuple[str, ...]
    seed: int
    dtype: str
    device: str


@dataclass(frozen=True)
class NormEpsilonFigures:
    """One cut with one norm epsilon: KL(original || compressed) in nats a token, and the mean score of the prompts."""

    kl_text: float | None
    kl_prompts: float | None
    memory: float | None


@dataclass(frozen=True)
class EvaluationReport:
    """The original and the compressed checkpoint on the same text and prompts.

    `by_norm_epsilon` has the same cut with the epsilon kept and scaled; the exported one is among them. `untrained` is
    the compressed checkpoint as it was before `compress recover`.
    """

    before: ModelFigures
    after: ModelFigures
    differences: tuple[Difference, ...]
    by_norm_epsilon: dict[str, NormEpsilonFigures]
    settings: dict[str, Any]
    untrained: ModelFigures | None = None


@dataclass(frozen=True)
class CandidateReport:
    """A cut that was tried: the channels of one method, written with one norm epsilon.

    `kl_before` and `kl_after` are KL(original || cut) on the held-out part of the calibration data, in nats a token,
    without and with the refit; None where nothing was refitted or to be chosen. `passes` is what the choice cost beside
    the calibration, in bare forward passes over its tokens, and `seconds` how long it took; cuts of one method that
    share their channels share both.
    """

    method: str
    norm_epsilon: str
    kl_before: float | None
    kl_after: float | None
    passes: float
    seconds: float
    written: bool


@dataclass(frozen=True)
class SelectionReport:
    """What was asked for and tried; `passes` and `seconds` are those of all choices together."""

    asked: str
    candidates: list[CandidateReport]
    passes: float
    seconds: float


@dataclass(frozen=True)
class LayerRefitReport:
    """One output projection. The errors are |Y - X W^T| / |Y| on held-out tokens; `ridge` None: it stayed as it was."""

    layer: int
    ridge: float | None
    error_before: float
    error_after: float


@dataclass(frozen=True)
class RefitReport:
    """The closed-form refit of the output projections. `kept` is False where it would have diverged more.

    `kl_before` and `kl_after` are KL(original || compressed) on the held-out part of the calibration data, in nats a
    token; `kl_by_norm_epsilon` has `kl_after` under every norm epsilon that was tried with the written method.
    """

    kept: bool
    tokens: int
    held_out_tokens: int
    kl_before: float
    kl_after: float
    kl_by_norm_epsilon: dict[str, float]
    layers: list[LayerRefitReport]


@dataclass(frozen=True)
class TrainingReport:
    """Distillation from the original. `last` is the last step: losses in nats a token, rate in tokens a second.

    `adapters` names the modules with an adapter, by layer, and `adapter_folder` where they were saved by themselves;
    every curve stands in training.jsonl.
    """

    source: str
    steps: int
    tokens: int
    resumed_step: int
    trainable: str
    trainable_parameters: int
    adapters: dict[int, tuple[str, ...]]
    seconds: float
    last: dict[str, float]
    adapter_folder: str | None = None


@dataclass(frozen=True)
class RecoveryReport:
    """How quality was won back; a step that was not taken is None."""

    refit: RefitReport | None
    training: TrainingReport | None


@dataclass(frozen=True)
class NormEpsilonReport:
    """`smallest_mean_square_of_other_norms` is None unless the epsilon was scaled."""

    policy: str
    before: float
    after: float
    smallest_mean_square_of_other_norms: float | None


@dataclass(frozen=True)
class VerificationReport:
    """What `compress verify` did, and found.

    `generation_error` compares the logits of cached generation with one full pass, and
    `oracle_relative_error` those of the checkpoint with the original whose dropped channels are
    zeroed, both as ||a - b|| / ||b||; the second is None, with the reason in `notes`, where the
    original was not found.
    """

    passed: bool
    stock_class: str
    generated_by: str
    generation_error: float
    oracle_relative_error: float | None
    device: str
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Report:
    """Everything about one compressed checkpoint. `files` are those beside this report and the card, as written."""

    output_dir: str
    load_line: str
    base_model: str
    base_revision: str | None
    base_sha256: str
    base_compression: dict[str, Any] | None
    architecture: str
    method: str
    scoring: str
    f: float
    ratio: float
    key_dim: BeforeAfter
    state_bytes_per_sequence: BeforeAfter
    convolution_state_bytes_per_sequence: BeforeAfter
    parameters: BeforeAfter
    norm_epsilon: NormEpsilonReport
    layers: list[LayerReport]
    calibration: CalibrationReport
    recovery: RecoveryReport | None
    evaluation: EvaluationReport | None
    verification: VerificationReport | None
    engines: list[str]
    notes: list[str]
    timings_s: dict[str, float]
    versions: dict[str, str]
    selection: SelectionReport | None = None
    files: dict[str, FileRecord] = field(default_factory=dict)
    schema: int = SCHEMA

    def to_json(self) -> dict[str, Any]:
        data = asdict(self)
        return {"schema": data.pop("schema"), **data}

    @property
    def worst_rho(self) -> float:
        """The largest max rho of any head; infinite where a choice left dependent channels."""
        return max(float("inf") if rho is None else rho for layer in self.layers for rho in layer.max_rho)


def installed_versions() -> dict[str, str]:
    """Versions of the packages that a figure depends on, this one's included."""
    versions = {"python": platform.python_version()}
    for package in ("linear-attention-compressor", *_REPORTED_PACKAGES):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    return versions


def installed_hardware() -> dict[str, str | int | None]:
    """What a figure was measured on; `gpu` is None without one."""
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "cpu": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
    }


def chained_provenance(compression: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """What an already compressed source says of itself, its own sources included."""
    if compression is None:
        return None
    kept = (
        "base_model",
        "base_revision",
        "base_sha256",
        "method",
        "ratio",
        "key_dim",
        "norm_epsilon",
        "recovery",
        "base_compression",
    )
    return {name: compression.get(name) for name in kept}
