"""config.json as it stands in the folder, not as a config class reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from compressor.errors import RequestError
from compressor.json_text import parse_json

CONFIG_FILE = "config.json"
# Fields of the configs that the mamba_ssm package writes.
_STATE_SPACES_FIELDS = frozenset({"d_model", "n_layer", "ssm_cfg"})


def read_config(path: Path) -> dict[str, Any]:
    """The object in the file `path`, keys in order, values as spelled.

    An infinite number may be the bare word `Infinity` (older transformers) or the object
    `{"__float__": "Infinity"}` (transformers 5): the first becomes a float, the second stays an object,
    so that `dump_config` writes each as it was.

    Raises:
        RequestError: no readable JSON object, or one without `model_type`.
    """
    config = read_json_object(path)
    if isinstance(config.get("model_type"), str) and config["model_type"]:
        return config
    if config.keys() & _STATE_SPACES_FIELDS:
        raise RequestError(
            f"{path} has no model_type: this is the original state-spaces layout; "
            "convert the checkpoint to the Hugging Face layout first."
        )
    raise RequestError(f"{path} has no model_type, by which transformers finds the class; add it.")


def dump_config(config: dict[str, Any]) -> str:
    """JSON text of `config`: two spaces of indentation, keys in their order, characters unescaped, a final newline."""
    return json.dumps(config, indent=2, ensure_ascii=False) + "\n"


def decoder_config(raw_config: dict[str, Any]) -> dict[str, Any]:
    """The part that describes the language model: `text_config` of a multimodal wrapper, else all of it."""
    text_config = raw_config.get("text_config")
    return text_config if isinstance(text_config, dict) else raw_config


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a checkpoint.

    Raises:
        RequestError: the file cannot be read, is not UTF-8, not JSON (with the line), or holds no object.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise RequestError(f"{path} cannot be read ({error.strerror}); check the file and its permissions.") from error
    except UnicodeDecodeError as error:
        raise RequestError(f"{path} is not UTF-8 text (byte {error.start}); download it again.") from error
    if text.startswith("version https://git-lfs"):
        raise RequestError(f"{path} is a Git LFS pointer, not the file itself; run git lfs pull.")
    try:
        value = parse_json(text)
    except json.JSONDecodeError as error:
        raise RequestError(
            f"{path} is not valid JSON (line {error.lineno}, column {error.colno}: {error.msg}); "
            "correct it or download it again."
        ) from error
    except ValueError as error:  # a number of thousands of digits, thousands of open brackets
        raise RequestError(f"{path} is not valid JSON ({error}); download it again.") from error
    if not isinstance(value, dict):
        raise RequestError(f"{path} holds a JSON {type(value).__name__}, not an object; download it again.")
    return value
