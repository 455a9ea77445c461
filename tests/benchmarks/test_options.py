"""What the options of all benchmarks may be, asked for without one."""

from __future__ import annotations

from argparse import Namespace

import pytest

from benchmarks.options import check_options
from compressor.errors import RequestError


def test_nothing_is_named_twice_but_what_means_two_things() -> None:
    check_options(Namespace(train_lengths=[8, 8], ratios=[0.25, 0.5], ratio=0.5, device="cpu"))
    with pytest.raises(RequestError, match=r"^--norm-epsilon: keep is named twice; leave one out\.$"):
        check_options(Namespace(norm_epsilon=["keep", "scaled", "keep"]))
