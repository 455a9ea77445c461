"""What a message about an output folder may advise: options that the verb which writes it has."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Advice:
    """Parts of sentences: where the folder is taken, how to run once more, and where a file grew too large."""

    taken: str
    again: str
    too_large: str


WITH_RESUME = Advice("pass --overwrite or choose another", "run again with --resume", "set a smaller --max-shard-size")
"""Of the verbs that write checkpoints."""

NEW_FOLDERS_ONLY = Advice("choose another", "run again", "choose an output folder elsewhere")
"""Of a verb that replaces nothing and keeps nothing to go on with."""
LESS_AT_ONCE = replace(WITH_RESUME, too_large="set a smaller --batch-size")
"""Of files that hold a batch each."""
