"""Texts that hold NUL characters, as files do whose end was never written."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from compressor.errors import RequestError
from compressor.evaluation.measure import NamedWindows

_NUL = "\x00"


def nul_notes(texts: Sequence[NamedWindows], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """What to say of texts with NUL characters in what is read of them, as the tokenizer gives it back.

    Raises:
        RequestError: nothing but NUL characters and white space is read of a text.
    """
    notes = []
    for text in texts:
        tokens = [window.tokens.tolist() for window in text.windows]
        read = "".join(tokenizer.batch_decode(tokens, clean_up_tokenization_spaces=False))
        nul = read.count(_NUL)
        if nul and not read.replace(_NUL, "").strip():
            raise RequestError(
                f"the text {text.name} has only NUL characters and white space in the {len(read):,} characters that "
                "are read of it; give the file as it was before it was damaged, or another text."
            )
        if nul:
            notes.append(
                f"text {text.name}: {nul:,} of {len(read):,} characters that are read are NUL, which raises the loss; "
                "remove them from the file"
            )
    return notes
