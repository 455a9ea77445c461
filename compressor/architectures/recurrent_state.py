"""The recurrent state of every family in the cache that its stock class makes, always seen as [B, H_v, d_v, d_k].

Notation as in `architectures.base`. fla keeps a dictionary a layer, and its Gated DeltaNet and KDA the state
value-first; fla's DeltaNet and Gated DeltaProduct and transformers' Qwen3.5 keep it key-first, the last in a cache
layer of its own. Mamba-2 and its hybrids keep it value-first, [B, H, head_dim, state_size], in both libraries.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor
from transformers.cache_utils import DynamicLayer

from compressor.architectures.base import Mixer
from compressor.architectures.family import FLA_MAMBA2
from compressor.errors import RequestError

CacheOwner = Literal["fla", "transformers"]
_FLA_KEY = "recurrent_state"
_FLA_KEYS = "attn_state"


@dataclass(frozen=True, slots=True)
class StateLayout:
    """How one family holds its states: whose cache it is, and whether rows are value channels."""

    owner: CacheOwner
    value_first: bool

    def read(self, cache: Any, mixer: Mixer) -> Tensor:
        """The state of a mixer after all tokens that `cache` has seen: [B, H_v, d_v, d_k], a view of the cache.

        Raises:
            ValueError: the cache holds a state of another shape.
        """
        held: Tensor = (
            cache[mixer.layer][_FLA_KEY] if self.owner == "fla" else cache.layers[mixer.layer].recurrent_states[0]
        )
        state = held if self.value_first else held.transpose(2, 3)
        expected = (mixer.num_v_heads, mixer.head_v_dim, mixer.head_k_dim)
        if tuple(state.shape[1:]) != expected:
            raise ValueError(f"layer {mixer.layer} holds a state of {list(state.shape)}, not [B, *{list(expected)}]")
        return state

    def write(self, cache: Any, mixer: Mixer, state: Tensor) -> None:
        """Let the mixer go on from `state` [B, H_v, d_v, d_k], which is copied in the dtype that the cache holds."""
        self.read(cache, mixer).copy_(state)

    def forget_keys(self, cache: Any, window: int) -> None:
        """Leave softmax layers the keys and values of the last `window` tokens.

        Keys keep the rotation of their own positions. transformers counts positions by the keys that are there, so the
        model has to be given its position_ids from then on; fla counts the tokens it has seen.
        """
        if self.owner == "fla":
            for state in cache:
                if state[_FLA_KEYS] is not None:
                    state[_FLA_KEYS] = tuple(each[:, -window:].contiguous() for each in state[_FLA_KEYS])
            return
        for layer in cache.layers:
            if isinstance(layer, DynamicLayer) and layer.keys is not None and layer.values is not None:
                layer.keys, layer.values = (each[..., -window:, :].contiguous() for each in (layer.keys, layer.values))


_LAYOUTS: Mapping[str, StateLayout] = {
    "bamba": StateLayout("transformers", value_first=True),
    "delta_net": StateLayout("fla", value_first=False),
    "falcon_h1": StateLayout("transformers", value_first=True),
    "gated_deltanet": StateLayout("fla", value_first=True),
    "gated_deltaproduct": StateLayout("fla", value_first=False),
    "granitemoehybrid": StateLayout("transformers", value_first=True),
    "kda": StateLayout("fla", value_first=True),
    "mamba2": StateLayout("transformers", value_first=True),
    FLA_MAMBA2: StateLayout("fla", value_first=True),
    "nemotron_h": StateLayout("transformers", value_first=True),
    "olmo_hybrid": StateLayout("transformers", value_first=False),
    "qwen3_5": StateLayout("transformers", value_first=False),
    "qwen3_5_moe": StateLayout("transformers", value_first=False),
    "qwen3_5_moe_text": StateLayout("transformers", value_first=False),
    "qwen3_5_text": StateLayout("transformers", value_first=False),
    "qwen3_next": StateLayout("transformers", value_first=False),
    "zamba2": StateLayout("transformers", value_first=True),
}


def state_layout(model_type: str) -> StateLayout:
    """The layout of a family.

    Raises:
        RequestError: it is not known how that family holds its states.
    """
    layout = _LAYOUTS.get(model_type)
    if layout is None:
        known = ", ".join(name for name in _LAYOUTS if name != FLA_MAMBA2)
        raise RequestError(
            f"the states of a {model_type} model cannot be read from its cache (known: {known}); "
            "probe a model of one of these."
        )
    return layout
