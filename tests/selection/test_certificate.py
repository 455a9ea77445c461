"""The certificate of strong RRQR, and that a head's result is its own."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from torch import Tensor

from compressor.errors import RunError
from compressor.selection.diagnostics import diagnose
from compressor.selection.rrqr import certify, strong_rrqr
from tests.selection import oracle
from tests.selection.matrices import correlated, decaying, gaussian, gram, kahan


def test_certificate_fails_for_a_tampered_choice() -> None:
    matrices = torch.stack([correlated(40, 12, seed) for seed in range(3)])
    choice = strong_rrqr(gram(matrices), 6, 1.5)
    order = oracle.pivoted_columns(matrices[1].numpy(), 12)
    choice.indices[1] = torch.tensor(sorted(order[6:]))
    max_rho = diagnose(gram(matrices), choice.indices).max_rho
    truth = oracle.exchange_factors(matrices[1].numpy(), choice.indices[1].tolist()).max()
    assert float(max_rho[1]) == pytest.approx(truth, rel=1e-9)
    assert truth > 1.5
    with pytest.raises(RunError) as caught:
        certify(max_rho, 1.5, torch.zeros(3, dtype=torch.float64))
    assert str(caught.value) == (
        f"Stacked head 1 has max rho = {truth:.9g} above f = 1.5 at the end of the strong rank-revealing QR; "
        "choose a larger f or a smaller kept width."
    )


def test_certificate_takes_no_nan() -> None:
    with pytest.raises(RunError, match="Stacked head 0 has max rho = nan"):
        certify(torch.tensor([torch.nan]), 1.5, torch.zeros(1))


def mixed_heads() -> Tensor:
    """70 heads of all kinds: more than are worked on together."""
    kinds = [
        correlated(60, 16, 1),
        decaying(16, 4, 2),
        decaying(16, 14, 3),
        kahan(16, 0.9),
        kahan(16, 0.4),
        gaussian(40, 3, 4) @ gaussian(3, 16, 5),
        torch.zeros(4, 16, dtype=torch.float64),
    ]
    return torch.stack([gram(kind * (1 + index)) for index in range(10) for kind in kinds])


@pytest.mark.parametrize("f", [1.0, 1.5])
def test_a_head_does_not_depend_on_the_heads_beside_it(f: float) -> None:
    grams = mixed_heads()
    together = strong_rrqr(grams, 11, f)
    for head in range(len(grams)):
        alone = strong_rrqr(grams[head : head + 1], 11, f)
        assert torch.equal(alone.indices[0], together.indices[head])
        for field in fields(alone.diagnostics):
            torch.testing.assert_close(
                getattr(alone.diagnostics, field.name)[0], getattr(together.diagnostics, field.name)[head]
            )


def test_the_same_input_gives_the_same_choice() -> None:
    grams = mixed_heads()
    first, second = strong_rrqr(grams, 8, 1.0), strong_rrqr(grams.clone(), 8, 1.0)
    assert torch.equal(first.indices, second.indices)
    assert torch.equal(first.diagnostics.max_rho, second.diagnostics.max_rho)


def test_input_is_left_as_it_was() -> None:
    grams = mixed_heads()
    before = grams.clone()
    strong_rrqr(grams, 8, 1.0)
    assert torch.equal(grams, before)
