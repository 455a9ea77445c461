"""What a baseline needs to be put the same tokens as the model."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedTokenizerBase

from compressor.calibration.tokenizer import load_tokenizer
from compressor.errors import RequestError
from compressor.evaluation.tokenizer_identity import tokenizer_sha256
from compressor.preparation import ConfiguredModel

_TOKENIZER_NAMES = ("tokenizer", "tokenizer_config", "vocab", "tekken")
_TOKENIZER_SUFFIXES = (".model", ".tiktoken")


def require_same_tokens(
    model: ConfiguredModel,
    baseline: ConfiguredModel,
    tokenizer: PreTrainedTokenizerBase,
    trust_remote_code: bool,
    remedy: str = "evaluate each alone and use compress compare",
) -> str | None:
    """Whether `tokenizer`, the model's, is the baseline's too; a note where the baseline's folder has none.

    `remedy` is what to do instead, where they differ.

    Raises:
        RequestError: the two have vocabularies of different sizes, or encode text differently.
    """
    sizes = [each.config.get_text_config(decoder=True).vocab_size for each in (baseline, model)]
    if sizes[0] != sizes[1]:
        raise RequestError(
            f"--baseline {baseline.folder.name} has a vocabulary of {sizes[0]:,} tokens and the model one of "
            f"{sizes[1]:,}; {remedy}."
        )
    if not _has_tokenizer(baseline.folder.path):
        return f"--baseline {baseline.folder.name} has no tokenizer of its own: the model's was used for both"
    other = load_tokenizer(baseline.folder.path, trust_remote_code)
    if tokenizer_sha256(other) != tokenizer_sha256(tokenizer):
        raise RequestError(
            f"--baseline {baseline.folder.name} and the model {model.folder.name} have tokenizers that encode text "
            f"differently, so the same tokens are another text to each of them; {remedy}."
        )
    return None


def _has_tokenizer(folder: Path) -> bool:
    return any(path.stem in _TOKENIZER_NAMES or path.suffix in _TOKENIZER_SUFFIXES for path in folder.iterdir())
