"""lm-eval's own wrapper of a transformers model, with what linear-attention models need of it.

Import this module only where lm-eval is installed.
"""

from __future__ import annotations

from collections import defaultdict

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM


class UnpaddedGeneration(HFLM):  # type: ignore[misc]  # lm-eval ships no types
    """HFLM whose generation batches hold prompts of one token length only.

    HFLM pads generation on the left. A linear-attention layer keeps what it read, so padding is right only where
    every layer leaves it out of convolution and state, during prefill and in every step from the cache; layers that
    fla mixes with softmax attention do not. Log-likelihoods are padded on the right, which no causal model sees.
    """

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        by_length: dict[int, list[int]] = defaultdict(list)
        for index, request in enumerate(requests):
            by_length[len(self.tok_encode(request.args[0]))].append(index)
        outputs: dict[int, str] = {}
        for indices in by_length.values():
            generated = super().generate_until([requests[index] for index in indices], disable_tqdm=True)
            outputs.update(zip(indices, generated, strict=True))
        return [outputs[index] for index in range(len(requests))]
