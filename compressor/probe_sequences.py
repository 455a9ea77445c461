"""What a truncation experiment changes anything for; options that would change nothing are refused."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from compressor.errors import RequestError
from compressor.evaluation.prompt_sets import PromptSet
from compressor.probe.segments import segments_of
from compressor.probe_section import ProbeSection


@dataclass(frozen=True, slots=True, eq=False)
class Sequences:
    """Documents int64 [T], and prompts, that are read in segments."""

    documents: tuple[Tensor, ...]
    prompt_sets: tuple[PromptSet, ...]

    def __bool__(self) -> bool:
        return bool(self.documents or self.prompt_sets)

    @property
    def text_tokens(self) -> int:
        return sum(len(document) for document in self.documents)

    @property
    def prompt_tokens(self) -> int:
        return sum(prompts.tokens for prompts in self.prompt_sets)

    def of_segments(self, count: int, every: int) -> Sequences:
        """All documents if one is read in at least `count` segments of `every` tokens, else none; prompts likewise."""
        long = any(segments_of(len(document), every) >= count for document in self.documents)
        return Sequences(
            self.documents if long else (),
            tuple(
                prompts
                for prompts in self.prompt_sets
                if any(segments_of(len(tokens.whole), every) >= count for tokens in prompts.encoded)
            ),
        )


def refuse_without_cuts(section: ProbeSection) -> None:
    """Raises:
    RequestError: an option of the truncation experiment or of its prompts was given where there is none.
    """
    no_tasks = None if section.retrieval else "no-tasks"
    no_cuts = None if section.truncation else "no-truncation"
    nothing = no_cuts if section.search_rank is None else None
    for field, against in (
        ("ranks", no_cuts),
        ("retrieval", nothing),
        ("tasks", no_tasks or nothing),
        ("task_length", no_tasks or nothing),
        ("samples", no_tasks or nothing),
    ):
        if field in section.model_fields_set and against is not None:
            option = "no-tasks" if field == "retrieval" else field.replace("_", "-")
            raise RequestError(f"--{option} would change nothing with --{against}; leave one of the two out.")


def refuse_nothing_to_cut(section: ProbeSection, cut: Sequences) -> None:
    """Raises:
    RequestError: an option was given for cuts, or for prompts, that turn out to be none.
    """
    for field in ("ranks", "search_rank"):
        if field in section.model_fields_set and not cut:
            raise RequestError(
                f"--{field.replace('_', '-')} would change nothing: all is read in one segment of {section.every} "
                "tokens, and states are cut between segments; raise --length, lower --every, or ask for tasks."
            )
    if "samples" in section.model_fields_set and not cut.prompt_sets:
        raise RequestError(
            f"--samples would change nothing: no prompt is longer than one segment of {section.every} tokens; raise "
            "--task-length, or lower --every."
        )


def notes_on_cuts(section: ProbeSection, asked: Sequences, cut: Sequences, windowed: Sequences | None) -> list[str]:
    """What is not measured, of `asked`, since it would repeat other figures."""
    if not section.truncation and section.search_rank is None:
        return []
    every, notes = section.every, []
    if not cut.documents:
        notes.append(f"text is not cut: no document goes beyond its first segment (--every {every})")
    for prompts in asked.prompt_sets:
        if prompts not in cut.prompt_sets:
            notes.append(
                f"not measured: {prompts.task.name}, whose prompts end in their first segment of {every} tokens"
            )
    if section.truncation and windowed is not None:
        same = [
            name
            for name, before, after in (
                ("text", cut.documents, windowed.documents),
                ("tasks", cut.prompt_sets, windowed.prompt_sets),
            )
            if len(after) < len(before)
        ]
        if same:
            notes.append(
                f"no windowed figures of {' and '.join(same)}: two segments of {every} tokens lie inside the window of "
                f"the softmax layers, so they would equal the others; it takes more than {2 * every + 1} tokens"
            )
    return notes
