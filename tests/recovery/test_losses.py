"""The loss over chunks against the plain formula on all logits, with autograd, in float64."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from compressor.errors import RequestError
from compressor.recovery.losses import IGNORED, DistillationLoss
from tests.recovery.plain_loss import ROWS, TEACHER_WIDTH, WIDTH, errors, make_batch, plain, results
from tests.recovery.recorder import Recorder

FLOAT32_ERROR = 2e-6
BFLOAT16_ERROR = 0.01


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("weights", [(1.0, 0.5), (1.0, 0.0), (0.0, 1.0), (0.0, 0.0)], ids=str)
@pytest.mark.parametrize("rows", [1, 4, ROWS])
@pytest.mark.parametrize("head", [True, False], ids=["head", "frozen head"])
def test_values_and_gradients(temperature: float, weights: tuple[float, float], rows: int, head: bool) -> None:
    batch, exact = make_batch().trained(head), make_batch().to(torch.float64).trained(head)
    actual = results(batch, batch.loss(*weights, temperature, rows))
    assert ("head" in actual) == head
    expected = results(exact, plain(exact, *weights, temperature))
    assert max(errors(actual, expected).values()) < FLOAT32_ERROR


@pytest.mark.parametrize("teacher_width", [8, WIDTH])
def test_teachers_of_any_width(teacher_width: int) -> None:
    batch = make_batch(teacher_width=teacher_width)
    exact = batch.to(torch.float64).trained()
    batch = batch.trained()
    assert max(errors(results(batch, batch.loss(1, 1)), results(exact, plain(exact, 1, 1))).values()) < FLOAT32_ERROR


def test_without_a_teacher_only_the_cross_entropy_counts() -> None:
    batch = replace(make_batch(), teacher_hidden=None, teacher_head=None)
    exact = batch.to(torch.float64).trained()
    batch = batch.trained()
    loss = batch.loss(1.0, 0.5)
    assert float(loss.kl) == 0
    assert max(errors(results(batch, loss), results(exact, plain(exact, 1.0, 0.5))).values()) < FLOAT32_ERROR


def test_all_rows_count() -> None:
    batch = replace(make_batch(), targets=torch.arange(ROWS))
    exact = batch.to(torch.float64).trained()
    batch = batch.trained()
    assert max(errors(results(batch, batch.loss(1, 1)), results(exact, plain(exact, 1, 1))).values()) < FLOAT32_ERROR


def test_a_student_that_is_its_teacher_has_no_divergence() -> None:
    batch = make_batch()
    batch = replace(batch, teacher_hidden=batch.student_hidden, teacher_head=batch.student_head).trained()
    loss = batch.loss(1.0, 0.0, 2.0)
    loss.total.backward()
    assert float(loss.kl) == 0
    assert batch.student_hidden.grad is not None
    assert not bool(batch.student_hidden.grad.any())


def test_ignored_rows_reach_nothing() -> None:
    """What a model makes of padding may be anything."""
    batch = make_batch()
    ignored = batch.targets == IGNORED
    clean, spoilt = batch.trained(), batch.trained()
    assert spoilt.teacher_hidden is not None
    with torch.no_grad():
        spoilt.student_hidden[ignored] = torch.nan
        spoilt = replace(spoilt, teacher_hidden=spoilt.teacher_hidden.masked_fill(ignored[:, None], torch.inf))
    actual, expected = (results(one, one.loss(1.0, 0.5)) for one in (spoilt, clean))
    assert max(errors(actual, expected).values()) == 0
    assert not bool(actual["hidden"][ignored].any())


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_gradients_against_finite_differences(temperature: float) -> None:
    batch = make_batch(rows=6, vocabulary=7, width=3, teacher_width=4).to(torch.float64).trained()

    def total(hidden: Tensor, head: Tensor) -> Tensor:
        return replace(batch, student_hidden=hidden, student_head=head).loss(0.7, 0.3, temperature).total

    assert torch.autograd.gradcheck(total, (batch.student_hidden, batch.student_head))


def test_gradients_scale_with_what_follows_and_accumulate() -> None:
    batch = make_batch().trained()
    expected = results(batch, batch.loss(1.0, 0.5))
    scaled = batch.trained()
    (scaled.loss(1.0, 0.5).total * 3).backward()
    twice = batch.trained()
    for _ in range(2):
        twice.loss(1.0, 0.5).total.backward()
    for name, once in (("hidden", expected["hidden"]), ("head", expected["head"])):
        for other, factor in ((scaled, 3), (twice, 2)):
            gradient = (other.student_hidden if name == "hidden" else other.student_head).grad
            assert gradient is not None
            torch.testing.assert_close(gradient.double(), factor * once, rtol=1e-6, atol=1e-9)


def test_a_second_backward_pass_repeats_the_first() -> None:
    batch = make_batch().trained()
    total = batch.loss(1.0, 0.5).total
    first, second = (
        torch.autograd.grad(total, (batch.student_hidden, batch.student_head), retain_graph=True) for _ in range(2)
    )
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_gradients_pass_through_what_made_the_hidden_states_and_stop_at_the_teacher() -> None:
    batch = make_batch()
    assert batch.teacher_hidden is not None
    teacher_hidden = batch.teacher_hidden.clone().requires_grad_()
    scale = torch.ones(WIDTH, requires_grad=True)
    loss = replace(batch, student_hidden=batch.student_hidden * scale, teacher_hidden=teacher_hidden).loss(1.0, 0.5)
    loss.total.backward()
    expected = results(trained := batch.trained(), trained.loss(1.0, 0.5))["hidden"]
    assert scale.grad is not None
    torch.testing.assert_close(scale.grad.double(), (expected * batch.student_hidden).sum(0), rtol=1e-5, atol=1e-7)
    assert teacher_hidden.grad is None
    assert not loss.kl.requires_grad
    assert not loss.cross_entropy.requires_grad


def test_without_gradients() -> None:
    batch = make_batch().trained()
    expected = batch.loss(1.0, 0.5)
    with torch.no_grad():
        actual = batch.loss(1.0, 0.5)
    assert not actual.total.requires_grad
    assert torch.equal(actual.total, expected.total)


@pytest.mark.parametrize("rows", [1, 32])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_bfloat16_is_as_exact_as_its_logits(temperature: float, rows: int) -> None:
    """Against float64 on the same numbers; gradients have the dtype of the tensors."""
    batch = make_batch(rows=300, vocabulary=2001, width=64, teacher_width=96).to(torch.bfloat16).trained()
    exact = batch.to(torch.float64).trained()
    loss = batch.loss(1.0, 0.5, temperature, rows)
    assert loss.total.dtype == torch.float32
    actual = errors(results(batch, loss), results(exact, plain(exact, 1.0, 0.5, temperature)))
    assert batch.student_hidden.grad is not None
    assert batch.student_head.grad is not None
    assert batch.student_hidden.grad.dtype == batch.student_head.grad.dtype == torch.bfloat16
    assert max(actual.values()) < BFLOAT16_ERROR


def test_under_autocast_products_are_bfloat16_and_gradients_float32() -> None:
    batch = make_batch(rows=300, vocabulary=2001, width=64, teacher_width=96)
    exact, batch = batch.to(torch.float64).trained(), batch.trained()
    with torch.autocast("cpu", torch.bfloat16), Recorder() as recorder:
        loss = batch.loss(1.0, 0.5, rows=32)
        actual = results(batch, loss)
    assert recorder.product_dtypes == {torch.bfloat16}
    assert loss.total.dtype == torch.float32
    assert batch.student_hidden.grad is not None
    assert batch.student_hidden.grad.dtype == torch.float32
    assert max(errors(actual, results(exact, plain(exact, 1.0, 0.5))).values()) < BFLOAT16_ERROR


def test_autocast_leaves_float64() -> None:
    batch = make_batch().to(torch.float64).trained()
    with torch.autocast("cpu", torch.bfloat16):
        total = batch.loss(1.0, 0.5).total
    assert torch.equal(total, batch.loss(1.0, 0.5).total)


def test_float16_gradients_do_not_underflow() -> None:
    """Divided by the rows in float16, they would; a loss is scaled up for what lies below it."""
    batch = make_batch(rows=2000).to(torch.float16).trained()
    exact = batch.to(torch.float64).trained()
    (batch.loss(1e-3, 1e-3).total * 2.0**14).backward()
    (plain(exact, 1e-3, 1e-3).total * 2.0**14).backward()
    assert batch.student_hidden.grad is not None
    assert exact.student_hidden.grad is not None
    error = (batch.student_hidden.grad.double() - exact.student_hidden.grad).norm() / exact.student_hidden.grad.norm()
    assert float(error) < 2e-3


@pytest.mark.parametrize(("temperature", "chunks_alive"), [(1.0, 4), (2.0, 5)])
def test_memory_is_that_of_a_few_chunks(temperature: float, chunks_alive: int) -> None:
    rows, vocabulary, chunk_rows = 128, 1001, 32
    counted = replace(make_batch(rows, vocabulary, 2, 2), targets=torch.arange(rows))
    with Recorder() as over_chunks:
        (batch := counted.trained()).loss(1.0, 0.5, temperature, chunk_rows).total.backward()
    assert batch.student_head.grad is not None
    with Recorder() as only_evaluated, torch.no_grad():
        batch.loss(1.0, 0.5, temperature, chunk_rows)
    with Recorder() as at_once:
        plain(counted.trained(), 1.0, 0.5, temperature).total.backward()
    assert at_once.largest == rows * vocabulary
    assert over_chunks.largest == chunk_rows * vocabulary
    assert over_chunks.peak_bytes < (chunks_alive + 0.5) * 4 * chunk_rows * vocabulary  # half: heads and hidden states
    assert only_evaluated.peak_bytes < over_chunks.peak_bytes - 0.9 * 4 * chunk_rows * vocabulary
    assert at_once.peak_bytes > 3 * 4 * rows * vocabulary


def test_each_head_is_multiplied_once_a_chunk() -> None:
    batch = replace(make_batch(), targets=torch.arange(ROWS))
    with Recorder() as recorder:
        batch.trained(head=False).loss(1.0, 0.5, rows=ROWS).total.backward()
    assert recorder.products == 3  # logits of student and teacher, gradient of the hidden states
    with Recorder() as recorder, torch.no_grad():
        batch.trained().loss(1.0, 0.5, rows=ROWS)
    assert recorder.products == 2


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"targets": torch.full((ROWS,), IGNORED)}, RequestError, "all 23 targets of a batch are -100"),
        ({"teacher_head": torch.zeros(36, TEACHER_WIDTH)}, RequestError, "head knows 36 tokens and the student's 37"),
        ({"teacher_head": None}, ValueError, "give both or neither"),
        ({"teacher_hidden": None}, ValueError, "give both or neither"),
        ({"targets": torch.zeros(22, dtype=torch.int64)}, ValueError, "rows, not [23, 22, 23]"),
        ({"teacher_hidden": torch.zeros(24, TEACHER_WIDTH)}, ValueError, "rows, not [23, 23, 24]"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Tensor | None], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        replace(make_batch(), **changes).loss(1.0, 0.5)


def test_settings_that_mean_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="temperature 0.0 and logits_per_chunk 148 must be above 0"):
        make_batch().loss(1.0, 0.5, temperature=0.0)
    with pytest.raises(ValueError, match="temperature 1.0 and logits_per_chunk 0 must be above 0"):
        make_batch().loss(1.0, 0.5, rows=0)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [64, 1000])
def test_agrees_with_the_fused_losses_of_fla(rows: int) -> None:
    """Theirs means over rows too; their divergence takes every row, and so gets only those that count."""
    from fla.modules import FusedKLDivLoss, FusedLinearCrossEntropyLoss

    batch = make_batch(rows=1000, vocabulary=4001, width=64, teacher_width=96).cuda()
    ours, theirs = batch.trained(), batch.trained()
    actual = results(ours, ours.loss(1.0, 0.5, rows=rows))
    assert theirs.teacher_hidden is not None
    counted = theirs.targets != IGNORED
    kl = FusedKLDivLoss()(
        theirs.student_hidden[counted], theirs.teacher_hidden[counted], theirs.student_head, theirs.teacher_head
    )
    cross_entropy = FusedLinearCrossEntropyLoss()(theirs.student_hidden, theirs.targets, theirs.student_head)
    expected = results(theirs, DistillationLoss(kl + 0.5 * cross_entropy, kl, cross_entropy))
    assert max(errors(actual, expected).values()) < 1e-4


@pytest.mark.gpu
def test_memory_on_a_gpu() -> None:
    """64 chunks of 64 MiB; the logits of all rows would be 4 GiB."""
    rows, vocabulary, chunk_rows = 2**14, 2**16, 2**8
    batch = make_batch(rows, vocabulary, 64, 64).cuda().trained(head=False)
    batch.loss(1.0, 0.5, rows=1).total.backward()  # the workspace of matrix products
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    batch.loss(1.0, 0.5, rows=chunk_rows).total.backward()
    assert torch.cuda.max_memory_allocated() - before < 6 * 4 * chunk_rows * vocabulary
