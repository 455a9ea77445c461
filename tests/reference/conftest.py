"""Fixtures of the reference's tests."""

from __future__ import annotations

import pytest

from compressor.reference.backend import enable_for_fla


@pytest.fixture(scope="session")
def fla_on_cpu() -> None:
    """fla computes CPU tensors from now on."""
    enable_for_fla()
