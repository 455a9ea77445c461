"""What `compress probe` can be asked, with its defaults; None takes what the model or the text gives."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from compressor.section import Section, Word, once

_Rank = Annotated[int, Field(ge=1)]

DEFAULT_TASKS = ("niah_single_1", "vt", "recall")
"""Forms whose answers stand in the prompt: what a state has to carry."""


class ProbeSection(Section):
    """What is measured."""

    text: str = Field(default="demo", min_length=1)
    length: int | None = Field(default=None, ge=2, le=2**24)
    """Tokens of each document; None: the model's context, or 2048 where its config names none."""
    documents: int = Field(default=8, ge=1, le=10**4)
    concatenate: bool = False
    """Join the text's documents and cut the whole, instead of reading each by itself."""
    every: int = Field(default=256, ge=1, le=2**16)
    """Tokens between two looks at the states, and between two cuts of the truncation experiment."""
    truncation: bool = True
    ranks: Annotated[list[_Rank], Field(min_length=1), AfterValidator(once)] | None = None
    retrieval: bool = True
    """Whether prompts are asked beside the text."""
    tasks: Annotated[list[Word], Field(min_length=1), AfterValidator(once)] | None = None
    task_length: int | None = Field(default=None, ge=1, le=2**24)
    samples: int = Field(default=24, ge=1, le=10**6)
    search_rank: int | None = Field(default=None, ge=1)
    """The rank of the search for the heads that carry a task; None searches none."""
    batch_size: int = Field(default=8, ge=1, le=10**6)
    allow_extrapolation: bool = False
