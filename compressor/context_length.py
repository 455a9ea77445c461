"""How many tokens the configs of models say that they read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PretrainedConfig

from compressor.errors import RequestError
from compressor.naming import Naming


@dataclass(frozen=True, slots=True)
class ContextLength:
    """`tokens` that `owner`'s config names."""

    tokens: int
    owner: str

    def refuse_beyond(self, lengths: Sequence[int], setting: str, name: Naming) -> None:
        """Raises:
        RequestError: one of the lengths, which `setting` gives, is longer.
        """
        longest = max(lengths, default=0)
        if longest > self.tokens:
            raise RequestError(
                f"{name(setting, longest)} is over the {self.tokens} tokens of context that {self.owner}'s config "
                f"names; ask for {self.tokens} or fewer, or add {name('allow_extrapolation', True)}."
            )


def context_length(config: PretrainedConfig, baseline: PretrainedConfig | None) -> ContextLength | None:
    """The smaller of the two contexts; None where no config names one.

    Raises:
        RequestError: a config's value is no number of tokens.
    """
    named = [_named(config, "the model")]
    if baseline is not None:
        named.append(_named(baseline, "the baseline"))
    return min((context for context in named if context is not None), key=lambda context: context.tokens, default=None)


def refuse_sequences_beyond(sequence_length: int, given: str, config: PretrainedConfig) -> None:
    """What a model is calibrated or trained on has to fit its context; messages call it as it was `given`.

    Raises:
        RequestError: it does not, or the config's value is no number of tokens.
    """
    context = context_length(config, None)
    if context is not None and sequence_length > context.tokens:
        raise RequestError(f"{given} is over the model's {context.tokens} positions; use {context.tokens} or fewer.")


def _named(config: PretrainedConfig, owner: str) -> ContextLength | None:
    value: object = config.get_text_config(decoder=True).to_dict().get("max_position_embeddings")
    if value is None:
        return None
    if type(value) is not int or value < 1:
        raise RequestError(
            f"{owner}'s config.json gives max_position_embeddings = {value!r}; it must be a whole number of at least 1."
        )
    return ContextLength(value, owner)
