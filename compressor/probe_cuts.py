"""The truncation experiment and the search for heads, on the sequences of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from compressor.evaluation.forward import TokenFigures
from compressor.probe.experiment import RankOnText, answer_losses, truncate_on_tasks, truncate_on_text
from compressor.probe.head_search import HeadSearch, measurements, search_heads
from compressor.probe.results import Truncation
from compressor.probe.states import Probed
from compressor.probe.truncation import Cut, Reading, measure_cut
from compressor.probe_plan import ProbePlan
from compressor.probe_sequences import Sequences
from compressor.progress import Advance, StageReporter


def truncate_states(
    probed: Probed,
    plan: ProbePlan,
    cut: Sequences,
    dense: Sequence[TokenFigures] | None,
    reading: Reading,
    reporter: StageReporter,
) -> Truncation:
    """Of the sequences `cut`; `dense` are the documents' losses with nothing cut, None where they are still to be
    measured."""
    passes = len(plan.ranks) + (dense is None)
    tokens = passes * cut.text_tokens + (1 + len(plan.ranks)) * cut.prompt_tokens
    text: tuple[RankOnText, ...] = ()
    with reporter.stage("truncation" if reading.window is None else "windowed", tokens) as advance:
        if cut.documents:
            if dense is None:
                dense = measure_cut(probed, cut.documents, None, reading, advance).figures
            text = truncate_on_text(probed, cut.documents, dense, plan.ranks, reading, advance)
        tasks = truncate_on_tasks(probed, cut.prompt_sets, plan.ranks, reading, advance)
    return Truncation(reading.segment, reading.window, text, tasks)


def search_states(probed: Probed, plan: ProbePlan, reading: Reading, reporter: StageReporter) -> tuple[HeadSearch, ...]:
    """On every task, and on the text."""
    rank, cuts = plan.section.search_rank, plan.cut
    if rank is None:
        return ()

    def losses(sequences: tuple[Tensor, ...], advance: Advance, cut: Cut | None) -> Tensor:
        figures = measure_cut(probed, sequences, cut, reading, advance).figures
        return torch.stack([figure.losses.double().mean() for figure in figures])

    def of_answers(index: int, advance: Advance, cut: Cut | None) -> Tensor:
        prompts = cuts.prompt_sets[index]
        sequences = [tokens.whole for tokens in prompts.encoded]
        return answer_losses(prompts, measure_cut(probed, sequences, cut, reading, advance).figures)

    found = []
    with reporter.stage("search", measurements(probed) * (cuts.prompt_tokens + cuts.text_tokens)) as advance:
        for index, prompts in enumerate(cuts.prompt_sets):
            found.append(search_heads(probed, prompts.task.name, partial(of_answers, index, advance), rank))
        if cuts.documents:
            found.append(search_heads(probed, "text", partial(losses, cuts.documents, advance), rank))
    return tuple(found)
