"""The model's own tokenizer, from its folder alone."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from compressor.errors import RequestError
from compressor.json_text import parse_json

_FILE_PATTERNS = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
    "tekken.json",
    "*.tiktoken",
    "*.model",
)


def load_tokenizer(folder: Path, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a checkpoint folder; no connection is tried.

    Import the library of the checkpoint's family first: transformers looks the config's
    `model_type` up, and logs a warning where it does not know it.

    Raises:
        RequestError: the folder has no tokenizer files, or they are broken, or they need code of
            their own and `trust_remote_code` is off.
    """
    if not any(True for pattern in _FILE_PATTERNS for _ in folder.glob(pattern)):
        raise RequestError(
            f"the folder {folder} has no tokenizer (tokenizer.json, tokenizer.model, vocab.json ...); "
            "copy the files of the model's tokenizer into it."
        )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (folder / name).exists():
            _require_json_object(folder / name)
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        if "trust_remote_code" in reason:
            raise RequestError(
                f"the tokenizer in {folder} needs Python code of its own; read that code, "
                "then allow it with --trust-remote-code."
            ) from error
        raise RequestError(
            f"the folder {folder} has no tokenizer that can be loaded ({type(error).__name__}: {reason}); "
            "copy the files of the model's tokenizer into it again."
        ) from error


def _require_json_object(path: Path) -> None:
    data = path.read_bytes()
    if data.startswith(b"version https://git-lfs"):
        raise RequestError(f"{path} is a Git LFS pointer ({len(data)} bytes), not a tokenizer; run git lfs pull.")
    try:
        value = parse_json(data)
    except ValueError as error:
        raise RequestError(f"{path} is not JSON ({error}); fetch it again.") from error
    if not isinstance(value, dict):
        raise RequestError(f"{path} holds no JSON object; fetch it again.")
