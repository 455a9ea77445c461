"""What a request for a selection may ask. Imports no torch, so that a wrong request is answered at once."""

import math
from typing import Literal, get_args

from compressor.errors import RequestError

Scoring = Literal["qk", "k", "q"]
"""The activations or weights that are scored: of keys and queries together, of keys, or of queries."""

SCORINGS: tuple[Scoring, ...] = get_args(Scoring)

Statistic = Literal["weight_l1", "energy", "wanda", "gradient"]
"""What `HeadStatistics` may hold of each channel beside the Gram matrices of the activations."""


def check_keep(keep: int, width: int) -> None:
    """Raises RequestError when `keep` channels of `width` cannot be kept."""
    if not 1 <= keep <= width:
        raise RequestError(f"Cannot keep {keep} of {width} key channels; choose a width from 1 to {width}.")


def check_f(f: float) -> None:
    """Raises RequestError when f cannot bound the exchange factors of a strong rank-revealing QR."""
    if not 1 <= f < math.inf:
        raise RequestError(
            f"f = {f} cannot bound the exchange factor rho; choose a finite f of at least 1, such as 1.5."
        )
