"""Tiny models made trainable, and values in their trained parameters as training might leave them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from compressor.recovery.student import Student, StudentSettings, prepare_student
from tests.families import TinyCheckpoint, tiny_checkpoint, tiny_tokens
from tests.tiny_models import read_weights

# alpha / rank is 1.75, so that neither a missing scale nor one of 2 passes. Two heads are narrower than the rank.
LORA = StudentSettings("lora", rank=4, alpha=7.0, targets=None, seed=0)
NARROW_LORA = replace(LORA, rank=2)
MIXERS = replace(LORA, trainable="mixers")
MODES = {"lora": LORA, "narrow_lora": NARROW_LORA, "mixers": MIXERS}


def tiny_student(
    name: str, folder: Path, settings: StudentSettings, dtype: torch.dtype = torch.float32
) -> tuple[TinyCheckpoint, Student]:
    """A student of a tiny checkpoint whose files have `dtype`; the model is float32."""
    return student_of(tiny_checkpoint(name, folder, dtype), settings)


def student_of(tiny: TinyCheckpoint, settings: StudentSettings) -> tuple[TinyCheckpoint, Student]:
    return tiny, prepare_student(tiny.architecture, tiny.model, tiny.mixers, settings)


def train_at_random(student: Student, seed: int = 0) -> None:
    """Move every trained parameter away from where it stood, B from zero too."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in student.trainable_parameters().values():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)


def file_dtypes(folder: Path) -> dict[str, torch.dtype]:
    return {name: tensor.dtype for name, tensor in read_weights(folder).items()}


def loss_of(model: torch.nn.Module) -> Tensor:
    """Cross-entropy of two sequences of a recurrent and of a chunked length, the second padded."""
    total = torch.zeros(())
    for length in (20, 100):
        ids = torch.stack([tiny_tokens(length, seed=1), tiny_tokens(length, seed=2)])
        mask = torch.ones_like(ids, dtype=torch.bool)
        mask[1, length - 5 :] = False
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1]
        counted = mask[:, 1:]
        total = total + torch.nn.functional.cross_entropy(logits[counted].float(), ids[:, 1:][counted])
    return total
