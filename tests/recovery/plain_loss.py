"""Random batches for the distillation loss, and the plain formula on all logits that it is held against."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from compressor.recovery.losses import IGNORED, DistillationLoss, distillation_loss

ROWS, VOCABULARY, WIDTH, TEACHER_WIDTH = 23, 37, 12, 20


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Arguments of `distillation_loss`."""

    student_hidden: Tensor
    student_head: Tensor
    teacher_hidden: Tensor | None
    teacher_head: Tensor | None
    targets: Tensor

    def to(self, dtype: torch.dtype) -> Batch:
        teacher = (None if t is None else t.to(dtype) for t in (self.teacher_hidden, self.teacher_head))
        return Batch(self.student_hidden.to(dtype), self.student_head.to(dtype), *teacher, self.targets)

    def cuda(self) -> Batch:
        teacher = (None if t is None else t.cuda() for t in (self.teacher_hidden, self.teacher_head))
        return Batch(self.student_hidden.cuda(), self.student_head.cuda(), *teacher, self.targets.cuda())

    def trained(self, head: bool = True) -> Batch:
        """A copy whose student, with or without its head, takes gradients."""
        return replace(
            self,
            student_hidden=self.student_hidden.detach().clone().requires_grad_(),
            student_head=self.student_head.detach().clone().requires_grad_(head),
        )

    def loss(self, kl: float, cross_entropy: float, temperature: float = 1.0, rows: int = 4) -> DistillationLoss:
        """In chunks of `rows` rows."""
        tensors = (self.student_hidden, self.student_head, self.teacher_hidden, self.teacher_head, self.targets)
        return distillation_loss(*tensors, kl, cross_entropy, temperature, rows * len(self.student_head))


def make_batch(
    rows: int = ROWS, vocabulary: int = VOCABULARY, width: int = WIDTH, teacher_width: int = TEACHER_WIDTH
) -> Batch:
    """Float32, with logits of standard deviation 2; every fifth row is ignored."""
    generator = torch.Generator().manual_seed(rows)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    targets = torch.randint(vocabulary, (rows,), generator=generator)
    targets[2::5] = IGNORED
    return Batch(
        normal(rows, width),
        2 * normal(vocabulary, width) / width**0.5,
        normal(rows, teacher_width),
        2 * normal(vocabulary, teacher_width) / teacher_width**0.5,
        targets,
    )


def plain(batch: Batch, kl_weight: float, cross_entropy_weight: float, temperature: float = 1.0) -> DistillationLoss:
    """From all logits at once, in the dtype of `batch`."""
    counted = batch.targets != IGNORED
    logits = batch.student_hidden[counted] @ batch.student_head.T
    cross_entropy = F.cross_entropy(logits, batch.targets[counted])
    kl = torch.zeros_like(cross_entropy)
    if batch.teacher_hidden is not None and batch.teacher_head is not None:
        teacher = F.log_softmax(batch.teacher_hidden[counted] @ batch.teacher_head.T / temperature, -1)
        student = F.log_softmax(logits / temperature, -1)
        kl = F.kl_div(student, teacher, reduction="batchmean", log_target=True) * temperature**2
    return DistillationLoss(kl_weight * kl + cross_entropy_weight * cross_entropy, kl, cross_entropy)


def results(batch: Batch, loss: DistillationLoss) -> dict[str, Tensor]:
    """Float64 losses and gradients; the gradient of what takes none is left out."""
    loss.total.backward()
    named = {"total": loss.total, "kl": loss.kl, "cross_entropy": loss.cross_entropy}
    named |= {"hidden": batch.student_hidden.grad, "head": batch.student_head.grad}
    return {name: value.detach().double() for name, value in named.items() if value is not None}


def errors(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Norm of the difference over the norm of the expected; the difference where nothing is expected."""
    assert actual.keys() == expected.keys()
    return {name: float((actual[name] - expected[name]).norm() / (expected[name].norm() or 1.0)) for name in expected}
