"""Which family a config belongs to: its `model_type`, or which of two libraries means what both call `mamba2`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from compressor.errors import RequestError

FLA_MAMBA2 = "mamba2 (fla)"
"""fla's Mamba-2. It has transformers' model_type, class name and tensor names, and other config fields."""

_VISION_NOTE = (
    "These lines load the text model alone; `AutoModelForImageTextToText.from_pretrained` loads it with its vision "
    "tower."
)
_MULTIMODAL = ("qwen3_5", "qwen3_5_moe")

_OF_FLA = ("norm_eps", "rmsnorm", "dt_limit", "A_init_range", "D_has_hdim", "fuse_norm", "fuse_cross_entropy")
_OF_TRANSFORMERS = (
    "layer_norm_epsilon",
    "time_step_rank",
    "time_step_min",
    "time_step_max",
    "time_step_floor",
    "time_step_limit",
)
# Both are written out by the class that saves a config, whatever their values.


def vision_note(model_type: str) -> str:
    """What AutoModelForCausalLM leaves out of a checkpoint of this `model_type`; empty where that is nothing."""
    return _VISION_NOTE if model_type in _MULTIMODAL else ""


def family_of(raw_config: Mapping[str, Any]) -> str:
    """The name by which adapters, state layouts and decays are found, from a parsed config.json with a `model_type`.

    A `mamba2` config with no field that only one library knows is transformers', which needs no import.

    Raises:
        RequestError: a `mamba2` config has fields of both libraries.
    """
    model_type = str(raw_config["model_type"])
    if model_type != "mamba2":
        return model_type
    fla, transformers = ([name for name in names if name in raw_config] for names in (_OF_FLA, _OF_TRANSFORMERS))
    if fla and transformers:
        raise RequestError(
            f"config.json has {fla[0]}, a field of fla's Mamba-2, and {transformers[0]}, a field of transformers' "
            "Mamba-2, so it does not say which of the two made the checkpoint; remove the fields of the other one."
        )
    return FLA_MAMBA2 if fla else model_type
