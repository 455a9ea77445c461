"""Where the betas of a model stand before it is trained."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.state_tracking.inspection import beta_distributions
from benchmarks.state_tracking.models import build_model
from compressor.errors import RequestError
from tests.evaluation.state_tracking.test_trainer import CPU, tiny


@pytest.mark.parametrize(("negative_eigenvalues", "beta"), [(True, 1.9), (True, 0.2), (False, 0.8)])
@pytest.mark.parametrize("family", [{}, {"family": "gated_deltaproduct", "num_householder": 3}])
def test_betas_start_where_they_are_told_to(family, negative_eigenvalues, beta):
    settings = tiny(hidden_size=128, depth=2, negative_eigenvalues=negative_eigenvalues, initial_beta=beta, **family)
    stock = replace(settings, initial_beta=None)
    model, without = (build_model(each, 16, seed=0, device=CPU) for each in (settings, stock))
    tokens = torch.randint(16, (8, 20), generator=torch.Generator().manual_seed(3))
    found = [b for b in beta_distributions(model, settings, tokens) if b.layer == 0]
    assert len(found) == 2 * settings.num_householder
    assert all(abs(b.quantiles[3] - beta) < 0.1 * settings.largest_beta for b in found)
    changed = {
        name for name, tensor in model.state_dict().items() if not torch.equal(tensor, without.state_dict()[name])
    }
    assert changed == {"model.embeddings.weight", "model.layers.0.attn.b_proj.weight"}


def test_betas_that_cannot_be_are_refused():
    for eigenvalues, beta, named in ((True, 2.0, "2, the range with negative eigenvalues on"), (False, 1.5, "1, the")):
        with pytest.raises(RequestError, match=f"an initial beta of {beta:g} is not between 0 and {named}"):
            tiny(negative_eigenvalues=eigenvalues, initial_beta=beta)
