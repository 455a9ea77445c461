"""Distillation and next-token loss of a student from its hidden states; the logits of all rows never exist at once.

    total = kl_weight * KL + cross_entropy_weight * CE
    KL = mean_n temperature^2 sum_v p_nv (log p_nv - log q_nv)      CE = mean_n -log softmax(s_n)[target_n]
    p_n = softmax(t_n / temperature)      q_n = softmax(s_n / temperature)      s, t: logits of student and teacher

Source: Hinton, Vinyals, Dean, "Distilling the Knowledge in a Neural Network" (arXiv:1503.02531), section 2, for the
temperature and its square; Hsu et al., "Liger Kernel" (arXiv:2410.10989), section 3.2, for taking the gradient of each
chunk of rows in the forward pass, so that no logits are kept for the backward pass.

Notation used for tensor shapes:
    N   rows (tokens)      V   vocabulary      d, d_t   widths of student and teacher      R   rows of a chunk

Logits are products in the dtype of hidden states and head, under autocast in autocast's dtype; softmaxes and sums are
float32, or float64 where the product is. Where a student is near its teacher, the rounding of bfloat16 logits is most
of the error of the KL's gradient, so GPUs, whose matrix units add in float32, write them in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from compressor.errors import RequestError

IGNORED = -100
"""Target of a row that does not count."""

LOGITS_PER_CHUNK = 2**26
"""Logits of each model alive at once: 256 MiB in float32."""

ROWS_OF_A_TILE = 128
"""What matrix units take at once: a chunk of more rows is a multiple, so that no tile is computed in vain."""


@dataclass(frozen=True, slots=True, eq=False)
class DistillationLoss:
    """Means over the rows that count, in nats a token; float32, or float64 for float64 tensors.

    Attributes:
        total: scalar, differentiable; kl_weight * kl + cross_entropy_weight * cross_entropy.
        kl: scalar, detached; KL(teacher || student) at the temperature, times the temperature squared.
        cross_entropy: scalar, detached; at temperature 1.
    """

    total: Tensor
    kl: Tensor
    cross_entropy: Tensor


def distillation_loss(
    student_hidden: Tensor,
    student_head: Tensor,
    teacher_hidden: Tensor | None,
    teacher_head: Tensor | None,
    targets: Tensor,
    kl_weight: float,
    cross_entropy_weight: float,
    temperature: float = 1.0,
    logits_per_chunk: int = LOGITS_PER_CHUNK,
) -> DistillationLoss:
    """Both losses from one product with the student's head. Gradients reach the student's two tensors alone.

    Args:
        student_hidden: [N, d], after the final norm.
        student_head: [V, d]; a bias is not supported.
        teacher_hidden: [N, d_t], after the final norm; None for no teacher, then the KL is 0.
        teacher_head: [V, d_t]; None with `teacher_hidden`.
        targets: int64 [N]; rows with IGNORED count for neither term.
        temperature: of both softmaxes of the KL.
        logits_per_chunk: a chunk has as many whole rows as fit, at least one and where it can a multiple of
            `ROWS_OF_A_TILE`; memory beside the gradients is about five tensors of this size in the working dtype.

    Raises:
        RequestError: no row counts, or the two heads have different vocabularies.
        ValueError: tensors differ in their rows, one of the teacher's is missing, or `temperature` or
            `logits_per_chunk` is not positive.
    """
    _check(student_hidden, student_head, teacher_hidden, teacher_head, targets, temperature, logits_per_chunk)
    rows = (targets != IGNORED).nonzero()[:, 0]  # the one time that the host waits for the device
    if len(rows) == 0:
        raise RequestError(
            f"all {len(targets)} targets of a batch are {IGNORED}, and a mean needs at least one other; "
            "leave out texts without a token to predict."
        )
    teacher = None if teacher_hidden is None or teacher_head is None else _projection(teacher_hidden, teacher_head)
    student = _projection(student_hidden, student_head)
    terms = _Terms(student, teacher, targets, kl_weight, cross_entropy_weight, temperature)
    gradients = _Gradients.zeros(student_hidden, student_head)
    chunks = rows.split(_rows_of_a_chunk(logits_per_chunk, len(student_head)))
    kl, cross_entropy = (total / len(rows) for total in _sum_over_chunks(terms, chunks, gradients))
    value = kl_weight * kl + cross_entropy_weight * cross_entropy
    total: Tensor = _KnownGradients.apply(  # type: ignore[no-untyped-call]
        value, student_hidden, student_head, gradients.hidden, gradients.head, len(rows)
    )
    return DistillationLoss(total=total, kl=kl, cross_entropy=cross_entropy)


def _rows_of_a_chunk(logits: int, vocabulary: int) -> int:
    rows = max(1, logits // vocabulary)
    return rows if rows < ROWS_OF_A_TILE else rows - rows % ROWS_OF_A_TILE


@dataclass(frozen=True, slots=True, eq=False)
class _Projection:
    """Hidden states [N, d] and the head [V, d] that makes logits of them, which is in the dtype of the product."""

    hidden: Tensor
    head: Tensor

    def rows(self, rows: Tensor) -> Tensor:
        """Hidden states [R, d] in the dtype of the product."""
        return self.hidden[rows].to(self.head.dtype)

    def log_probabilities(self, rows: Tensor) -> Tensor:
        """[R, V] in the working dtype."""
        working = torch.promote_types(self.head.dtype, torch.float32)
        if self.head.device.type == "cuda" and working != self.head.dtype:
            logits = torch.mm(self.rows(rows), self.head.T, out_dtype=working)
        else:
            logits = self.rows(rows) @ self.head.T
        return logits.log_softmax(-1, dtype=working)


@dataclass(frozen=True, slots=True, eq=False)
class _Terms:
    """What the sums are taken of: see `distillation_loss`."""

    student: _Projection
    teacher: _Projection | None
    targets: Tensor
    kl_weight: float
    cross_entropy_weight: float
    temperature: float


@dataclass(frozen=True, slots=True, eq=False)
class _Gradients:
    """Gradients of `total` times the number of rows that count; None where none is wanted.

    That factor keeps them of the size of the weights, so that no narrow dtype underflows.

    Attributes:
        hidden: [N, d] in the dtype of the hidden states.
        head: [V, d], a sum over all chunks and so float32 at least.
    """

    hidden: Tensor | None
    head: Tensor | None

    @classmethod
    def zeros(cls, hidden: Tensor, head: Tensor) -> _Gradients:
        enabled = torch.is_grad_enabled()
        sums = torch.promote_types(head.dtype, torch.float32)
        return cls(
            torch.zeros_like(hidden) if enabled and hidden.requires_grad else None,
            torch.zeros_like(head, dtype=sums) if enabled and head.requires_grad else None,
        )

    @property
    def wanted(self) -> bool:
        return self.hidden is not None or self.head is not None

    def add(self, student: _Projection, rows: Tensor, logits: Tensor) -> None:
        """Add what the gradient `logits` [R, V] gives. Rows of different calls must differ."""
        logits = logits.to(student.head.dtype)
        if self.hidden is not None:
            self.hidden.index_copy_(0, rows, (logits @ student.head).to(self.hidden.dtype))
        if self.head is not None:
            self.head.add_(logits.T @ student.rows(rows))


class _KnownGradients(torch.autograd.Function):
    """Passes a scalar on, and ties it to tensors to which its gradients, times `count`, are known already."""

    @staticmethod
    def forward(
        ctx: Any,
        value: Tensor,
        hidden: Tensor,
        head: Tensor,
        hidden_gradient: Tensor | None,
        head_gradient: Tensor | None,
        count: int,
    ) -> Tensor:
        ctx.save_for_backward(hidden_gradient, head_gradient)
        ctx.dtypes = (hidden.dtype, head.dtype)
        ctx.count = count
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, output_gradient: Tensor) -> tuple[Tensor | None, ...]:
        scale = output_gradient / ctx.count
        hidden, head = (
            None if gradient is None else (gradient * scale).to(dtype)
            for gradient, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        )
        return None, hidden, head, None, None, None


def _projection(hidden: Tensor, head: Tensor) -> _Projection:
    """In the dtype that a linear layer would have: autocast lowers everything but float64."""
    dtype = torch.promote_types(hidden.dtype, head.dtype)
    device = hidden.device.type
    if torch.is_autocast_enabled(device) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
    return _Projection(hidden.detach(), head.detach().to(dtype))


@torch.no_grad()
def _sum_over_chunks(terms: _Terms, chunks: tuple[Tensor, ...], gradients: _Gradients) -> tuple[Tensor, Tensor]:
    """Sums of KL and cross-entropy over the rows of all `chunks`, whose gradients are added to `gradients`."""
    sums = []
    with torch.autocast(terms.student.hidden.device.type, enabled=False):
        for rows in chunks:
            kl, cross_entropy, gradient = _chunk(terms, rows, gradients.wanted)
            if gradient is not None:
                gradients.add(terms.student, rows, gradient)
            del gradient  # before the next chunk makes its own
            sums.append(torch.stack([kl, cross_entropy]))
        kl, cross_entropy = torch.stack(sums).sum(0).unbind()
    return kl, cross_entropy


def _chunk(terms: _Terms, rows: Tensor, wants_gradient: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Sums of KL and cross-entropy over `rows`, and the gradient [R, V] of their weighted sum to the logits.

    The gradient is None if none is wanted, or it is zero.
    """
    log_student = terms.student.log_probabilities(rows)
    cross_entropy, gradient = _cross_entropy(
        log_student, terms.targets[rows], terms.cross_entropy_weight if wants_gradient else 0.0
    )
    if terms.teacher is None:
        return torch.zeros_like(cross_entropy), cross_entropy, gradient
    log_teacher = terms.teacher.log_probabilities(rows)
    kl, kl_gradient = _divergence(
        log_teacher, log_student, terms.temperature, terms.kl_weight if wants_gradient else 0.0
    )
    if gradient is None or kl_gradient is None:
        return kl, cross_entropy, gradient if kl_gradient is None else kl_gradient
    return kl, cross_entropy, gradient.add_(kl_gradient)


def _cross_entropy(log_student: Tensor, targets: Tensor, weight: float) -> tuple[Tensor, Tensor | None]:
    """Sum over rows, and its gradient to the logits times `weight`, None for 0: weight * (softmax(s) - onehot)."""
    targets = targets[:, None]
    loss = log_student.gather(1, targets).sum().neg()
    if weight == 0:
        return loss, None
    gradient = log_student.exp()
    gradient.scatter_(1, targets, gradient.gather(1, targets) - 1)
    return loss, gradient.mul_(weight)


def _divergence(
    log_teacher: Tensor, log_student: Tensor, temperature: float, weight: float
) -> tuple[Tensor, Tensor | None]:
    """Sum over rows, and its gradient to the logits times `weight`, None for 0: weight * temperature * (q - p).

    Both arguments are overwritten.
    """
    if temperature != 1:  # log-probabilities and logits differ by a constant a row, and so have the same softmax
        for values in (log_teacher, log_student):
            values.div_(temperature).sub_(values.logsumexp(-1, keepdim=True))
    teacher = log_teacher.exp()
    loss = log_teacher.sub_(log_student).mul_(teacher).sum() * temperature**2
    if weight == 0:
        return loss, None
    gradient = log_student.exp_().sub_(teacher)
    factor = weight * temperature
    return loss, gradient if factor == 1 else gradient.mul_(factor)  # 1 spares a pass over them all


def _check(
    student_hidden: Tensor,
    student_head: Tensor,
    teacher_hidden: Tensor | None,
    teacher_head: Tensor | None,
    targets: Tensor,
    temperature: float,
    logits_per_chunk: int,
) -> None:
    if temperature <= 0 or logits_per_chunk < 1:
        raise ValueError(f"temperature {temperature} and logits_per_chunk {logits_per_chunk} must be above 0.")
    if (teacher_hidden is None) != (teacher_head is None):
        raise ValueError("a teacher needs both its hidden states and its head; give both or neither.")
    counts = [len(tensor) for tensor in (student_hidden, targets, teacher_hidden) if tensor is not None]
    if len(set(counts)) > 1:
        raise ValueError(f"hidden states and targets must have the same number of rows, not {counts}.")
    if teacher_head is not None and len(teacher_head) != len(student_head):
        raise RequestError(
            f"the teacher's head knows {len(teacher_head)} tokens and the student's {len(student_head)}; "
            "distil from a model with the same vocabulary."
        )
