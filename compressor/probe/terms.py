"""What figures are called in tables and axes, and what the words mean."""

from __future__ import annotations

from compressor.evaluation.text_loss import COPY_DISTANCE
from compressor.probe.keys import KEY_WINDOW
from compressor.probe.spectra import RANK_FACTOR

LABELS = {
    "numerical_rank": "numerical rank",
    "entropy_effective_rank": "entropy effective rank",
    "stable_rank": "stable rank",
    "utilisation": "utilisation (stable rank / width)",
    "condition_number": "condition number",
}

CONDITION_BOUND = "1/sqrt(utilisation)"

TERMS = {
    "state": "the matrix that a head of linear attention keeps of the tokens read; its width is its smaller side",
    "numerical rank": f"singular values above {RANK_FACTOR} times the rounding error of the largest one",
    "entropy effective rank": "exp of the entropy of the singular values over their sum: so many equal ones have it",
    "stable rank": "sum of the squared singular values over the largest squared one",
    "utilisation": "stable rank over the width: 1 where all directions hold the same",
    "condition number": f"largest singular value over the smallest; no state has one below {CONDITION_BOUND}. A "
    "smallest one that does not count for the numerical rank is rounding, and all that is known is that the number is "
    "larger than that threshold allows: the table says so, and points of the figure that high mean no more",
    "horizon": "decay horizon: tokens after which a head keeps 1/e of what it wrote, at its mean decay",
    "mean key": "norm of the mean of all keys of length 1: near 1, all keys are alike",
    "keys in horizon": f"entropy effective rank of the keys within the horizon of the end, at most {KEY_WINDOW} keys",
    "decayed keys": "the same over all keys of a text, each weighted by what the decay leaves of it",
    "score": "share of the answers that are the most probable tokens, as compress evaluate scores the task; with few "
    "prompts, prompts that all agree give a standard error of 0",
    "answer loss": "nats a token of the answers",
    "segment": "tokens between two looks at the states, and between two cuts of them",
    "copied tokens": f"tokens that end a pair which last stood more than {COPY_DISTANCE} tokens before in the text",
    "rise": "loss with cut states less loss without, on the same tokens; standard errors are those of the differences, "
    "over texts or prompts, and a dash where there is one only",
    "states by SVD": "share of the cut states whose directions took an exact decomposition; the others came from a few "
    "iterations, within the same tolerance",
}
