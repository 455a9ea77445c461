"""What passes between stages, and its files.

A statistics file carries the key of the request that made it (model, tokens, dtype), so that a
resumed run never uses sums of another request; a broken file reads as absent.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

SELECTION_SCHEMA = 1


@dataclass(frozen=True)
class CalibrationProgress:
    """Sums over the first `batches` batches, of queries first and of keys.

    grams: float64 [2, L, H_k, d_k, d_k]; tokens: int64 [2, L]; and, where they were asked for, energies: float64
    [2, L, H_k, d_k], input_squares: float64 [2, L, inputs].
    """

    batches: int
    grams: Tensor
    tokens: Tensor
    energies: Tensor | None = None
    input_squares: Tensor | None = None

    def tensors(self) -> dict[str, Tensor]:
        """The sums that there are, by name."""
        sums = {
            "grams": self.grams,
            "tokens": self.tokens,
            "energies": self.energies,
            "input_squares": self.input_squares,
        }
        return {name: tensor for name, tensor in sums.items() if tensor is not None}


@dataclass(frozen=True)
class CalibrationStatistics:
    """What calibration has summed of all key heads, over `tokens` tokens.

    gram_q, gram_k: float64 [L, H_k, d_k, d_k], second moments of the activations.

    What not every method reads is None where it was not asked for:
    energy_q, energy_k: float64 [L, H_k, d_k], of activations scaled to an L2 norm of 1 a token and head.
    input_squares_q, input_squares_k: float64 [L, inputs], sums of squares of what the projections read.
    gradient_q, gradient_k: float64 [L, H_k, d_k], sums of |W dL/dW| over the weights that make a channel.
    """

    layers: tuple[int, ...]
    gram_q: Tensor
    gram_k: Tensor
    tokens: int
    energy_q: Tensor | None = None
    energy_k: Tensor | None = None
    input_squares_q: Tensor | None = None
    input_squares_k: Tensor | None = None
    gradient_q: Tensor | None = None
    gradient_k: Tensor | None = None


@dataclass(frozen=True)
class Selection:
    """The kept channels: `kept` maps a layer to sorted int64 [H_k, k]."""

    head_k_dim: int
    kept: Mapping[int, Tensor]

    @property
    def width(self) -> int:
        return next(iter(self.kept.values())).shape[1]

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SELECTION_SCHEMA,
            "key_dim": {"before": self.head_k_dim, "after": self.width},
            "layers": {str(layer): indices.tolist() for layer, indices in self.kept.items()},
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Selection:
        kept = {int(layer): torch.tensor(rows, dtype=torch.int64) for layer, rows in data["layers"].items()}
        return cls(head_k_dim=int(data["key_dim"]["before"]), kept=kept)


@dataclass(frozen=True)
class ProgressFile:
    """The calibration sums of one request on disk."""

    path: Path
    key: str

    def save(self, progress: CalibrationProgress) -> None:
        """Replace the file in one step, so that a kill leaves the old or the new one."""
        temporary = self.path.with_suffix(".partial")
        metadata = {"key": self.key, "batches": str(progress.batches), "format": "pt"}
        tensors = {name: tensor.cpu() for name, tensor in progress.tensors().items()}
        save_file(tensors, temporary, metadata=metadata)
        temporary.replace(self.path)

    def load(self) -> tuple[CalibrationProgress | None, str | None]:
        """The stored sums, or None and the reason they cannot be used (None when there is no file)."""
        if not self.path.exists():
            return None, None
        try:
            with safe_open(self.path, framework="pt") as file:
                metadata = file.metadata() or {}
                if metadata.get("key") != self.key:
                    return None, f"{self.path} belongs to another model, seed or calibration (hash differs): not used"
                sums = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (no mapping)
                progress = CalibrationProgress(
                    batches=int(metadata["batches"]),
                    grams=sums["grams"],
                    tokens=sums["tokens"],
                    energies=sums.get("energies"),
                    input_squares=sums.get("input_squares"),
                )
        except (SafetensorError, OSError, KeyError, ValueError) as error:
            return None, f"{self.path} cannot be read ({error}): calibrating again"
        return progress, None


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
