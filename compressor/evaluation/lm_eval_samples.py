"""Standard errors of lm-eval's metrics from its values a document; float64, no resampling.

lm-eval aggregates documents in four ways. With n documents, mean m(.) and documents' values `a`, or pairs `(a, b)` of
a log-likelihood and its words or bytes, they are the mean m(a), the perplexity exp(-m(a)), the weighted perplexity
exp(-sum a / sum b), and bits, -sum a / sum b / ln 2. Each is given here as n numbers whose mean is the metric and
whose spread gives its standard error to first order (the delta method; for the ratio Cochran 1977, Sampling
Techniques, chapter 6), so that two models on the same documents are compared by the differences of these numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev

_TOLERANCE = 1e-9


def document_values(samples: Sequence[float] | Sequence[tuple[float, float]], value: float) -> tuple[float, ...]:
    """One number a document, with mean `value`; empty where `value` is none of the four aggregates of `samples`."""
    if not samples:
        return ()
    if all(isinstance(sample, tuple) for sample in samples):
        return _of_pairs([sample for sample in samples if isinstance(sample, tuple)], value)
    scores = [float(sample) for sample in samples if not isinstance(sample, tuple)]
    mean = fmean(scores)
    if _equal(mean, value):
        return tuple(scores)
    if _equal(_exp(-mean), value):
        return tuple(value * (1 - (score - mean)) for score in scores)
    return ()


def standard_error(values: Sequence[float]) -> float | None:
    """Of the mean of `values`; None for fewer than two."""
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def _of_pairs(pairs: Sequence[tuple[float, float]], value: float) -> tuple[float, ...]:
    weight = math.fsum(b for _, b in pairs)
    if weight <= 0:
        return ()
    ratio = math.fsum(a for a, _ in pairs) / weight
    changes = [len(pairs) * (a - ratio * b) / weight for a, b in pairs]
    if _equal(_exp(-ratio), value):
        return tuple(value * (1 - change) for change in changes)
    if _equal(-ratio / math.log(2), value):
        return tuple(value - change / math.log(2) for change in changes)
    return ()


def _equal(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)


def _exp(exponent: float) -> float:
    """exp, infinite where it overflows: a broken model's perplexity."""
    return math.exp(exponent) if exponent < 700 else math.inf
