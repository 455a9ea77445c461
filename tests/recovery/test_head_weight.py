"""Logits of the losses are those of the stock class, which may multiply them by a factor of its config."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from compressor.recovery.objective import HiddenStates, Objective, head_weight
from tests.families import MAMBA2_HYBRIDS, SUPPORTED_VARIANTS, in_float64, open_tiny, tiny_tokens
from tests.recovery.runs import SETTINGS
from tests.tiny_models import save_tiny

FACTORS: Mapping[str, Mapping[str, Any]] = {
    "granite": {"logits_scaling": 6.0},
    "falcon_h1": {"lm_head_multiplier": 0.3},
}


@pytest.mark.parametrize("name", [*SUPPORTED_VARIANTS, *MAMBA2_HYBRIDS])
def test_the_head_gives_the_logits_of_the_stock_class(name: str, tmp_path: Path) -> None:
    tiny = open_tiny(save_tiny(name, tmp_path, overrides=FACTORS.get(name, {})))
    ids = tiny_tokens(20)[None]
    with torch.no_grad():
        hidden = HiddenStates(tiny.architecture.decoder(tiny.model))(ids)
        logits = tiny.model(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(hidden @ head_weight(tiny.model, tiny.architecture).T, logits)


@pytest.mark.parametrize("name", FACTORS)
def test_losses_are_those_of_the_logits(name: str, tmp_path: Path) -> None:
    tiny, other = (open_tiny(save_tiny(name, tmp_path / part, overrides=FACTORS[name])) for part in ("a", "b"))
    student, teacher = in_float64(other.model), in_float64(tiny.model)
    with torch.no_grad():
        for parameter in other.architecture.decoder(student).parameters():
            parameter.mul_(1.1)
    ids = torch.stack([tiny_tokens(20, 0), tiny_tokens(20, 1)])
    states = HiddenStates(tiny.architecture.decoder(student))
    loss = Objective(student, states, teacher, tiny.architecture, tiny.mixers, SETTINGS)(ids)
    with torch.no_grad():
        log_p, log_q = (
            model(input_ids=ids, use_cache=False).logits[:, :-1].flatten(0, 1).log_softmax(-1)
            for model in (teacher, student)
        )
    divergence = (log_p.exp() * (log_p - log_q)).sum(-1).mean()
    entropy = -log_q.gather(1, ids[:, 1:].flatten()[:, None]).mean()
    torch.testing.assert_close(
        loss.terms[1:3], torch.stack([divergence, entropy]), rtol=1e-5, atol=0, check_dtype=False
    )
