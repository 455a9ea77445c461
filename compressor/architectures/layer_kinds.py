"""Which kinds of layers the configs of transformers list; one layer may hold a recurrence and softmax attention."""

from __future__ import annotations

from transformers import PretrainedConfig

_SOFTMAX_KINDS = frozenset({"full_attention", "hybrid"})


def lists_softmax_layers(config: PretrainedConfig) -> bool | None:
    """Whether the decoder of `config` has softmax attention; None where it lists no kinds, as those of fla."""
    try:
        # Of some classes a property, which to_dict() leaves out.
        kinds = config.get_text_config(decoder=True).layer_types
    except AttributeError:
        return None
    return None if kinds is None else not _SOFTMAX_KINDS.isdisjoint(kinds)
