"""README.md of an output folder: what was cut, how well it went, how to load it and how to make it again."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

import yaml

from compressor.export.base_card import TEXT_GENERATION, BaseLicense

# Both families load through transformers' Auto classes, and the Hub has no library of fla's.
_LIBRARY = "transformers"
_FLA_TAG = "flash-linear-attention"
_UNKNOWN = "not measured"
# What stands for the checkpoint's place in the commands of engines, and the line of Python that names it.
_PLACE = "MODEL"
_PLACE_NOTE = f"{_PLACE} stands for the path of this folder, or its id on the Hub."
_NAME_NOTE = "# the path of this folder, or its id on the Hub"
_NAME_LINE = re.compile(rf"^name = \"(.*)\"  {re.escape(_NAME_NOTE)}$", re.MULTILINE)
_ENGINES = re.compile(r"^## Engines\n.*?(?=^## |\Z)", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class ModelCardFacts:
    """What the card says. None is for what is unknown or was not measured, and is printed so.

    `base_name` is for readers, `base_model` the Hub id (None for a local folder). `ratio` is the share
    of key/query channels removed. `figures` are rows of name, base model, this model and difference; none
    where nothing was measured. `needs_fla` is for families whose classes flash-linear-attention
    registers. `engine_notes` (`MODEL` in them is the checkpoint) and `versions` (name, version) are printed one a
    line. `calibration_retrieval_share` is the share of the calibration sequences that are retrieval
    prompts instead of text, `pipeline_tag` the Hub's name of the task.
    """

    model_name: str
    base_name: str
    base_model: str | None
    base_revision: str | None
    license: BaseLicense | None
    model_type: str
    needs_fla: bool
    trust_remote_code: bool
    method: str
    scoring: str
    ratio: float
    max_rho: float | None
    key_dim_before: int
    key_dim_after: int
    state_bytes_before: int
    state_bytes_after: int
    parameters_before: int
    parameters_after: int
    norm_epsilon: str
    norm_epsilon_before: float | None
    norm_epsilon_after: float | None
    calibration_source: str
    calibration_tokens: int
    calibration_sequence_length: int
    calibration_seed: int
    calibration_sha256: str | None
    figures: tuple[tuple[str, str, str, str], ...]
    recovery: str | None
    engine_notes: tuple[str, ...]
    versions: tuple[tuple[str, str], ...]
    calibration_retrieval_share: float = 0.0
    loading_note: str = ""
    pipeline_tag: str = TEXT_GENERATION


def render_model_card(facts: ModelCardFacts) -> str:
    """The text of README.md: the Hub's YAML metadata, then sections in the order of the functions below."""
    sections = [
        _summary(facts),
        _change_table(facts),
        _how_it_was_made(facts),
        _figures(facts),
        _loading(facts),
        _engines(facts),
        _limitations(facts),
        _reproduction(facts),
    ]
    metadata = yaml.safe_dump(_metadata(facts), sort_keys=False, allow_unicode=True)
    return f"---\n{metadata}---\n\n" + "\n\n".join(section for section in sections if section) + "\n"


def card_of_repository(card: str, repo_id: str) -> str:
    """The card with the Hub id in its load lines and engine commands; what an author changed there stays as it is."""
    line = f"name = {json.dumps(repo_id)}  {_NAME_NOTE}"
    named = _NAME_LINE.search(card)
    # Of a folder that was pushed before, under another id.
    places = [_PLACE, *([named[1]] if named is not None and "/" in named[1] else [])]
    card = _NAME_LINE.sub(lambda _: line, card)
    return _ENGINES.sub(lambda match: _with_place(match.group(), places, repo_id), card)


def _with_place(section: str, places: Sequence[str], repo_id: str) -> str:
    words = "|".join(map(re.escape, places))
    return re.sub(rf"(?<![\w/.-])(?:{words})(?![\w/-])", repo_id, section.replace(f"{_PLACE_NOTE}\n\n", ""))


def _metadata(facts: ModelCardFacts) -> dict[str, object]:
    metadata: dict[str, object] = {}
    if facts.base_model is not None:
        metadata["base_model"] = facts.base_model
    if facts.license is not None:
        metadata["license"] = facts.license.identifier
        if facts.license.name is not None:
            metadata["license_name"] = facts.license.name
        if facts.license.link is not None:
            metadata["license_link"] = facts.license.link
    metadata["library_name"] = _LIBRARY
    metadata["pipeline_tag"] = facts.pipeline_tag
    tags = ["linear-attention", "state-compression", "pruning", facts.model_type]
    metadata["tags"] = [*tags, _FLA_TAG] if facts.needs_fla else tags
    return metadata


def _summary(facts: ModelCardFacts) -> str:
    base = _code(facts.base_name)
    if facts.base_model is not None:
        base = f"[{facts.base_model}](https://huggingface.co/{facts.base_model})"
    revision = "" if facts.base_revision is None else f" at revision {_code(facts.base_revision)}"
    return (
        f"# {_line(facts.model_name)}\n\n"
        f"{base}{revision} with a smaller linear-attention state: every key head keeps {facts.key_dim_after} of its "
        f"{facts.key_dim_before} key/query channels. It is an ordinary {_code(facts.model_type)} checkpoint; stock "
        "libraries load it, and no code of the tool that made it is needed.\n\n"
        "What the base model is for, what it was trained on and how it may be used stands in the model card of the "
        "base model and holds here too."
    )


def _change_table(facts: ModelCardFacts) -> str:
    rows = [
        ("Key/query width of a head", facts.key_dim_before, facts.key_dim_after),
        ("State bytes per sequence (fp32, convolution state apart)", facts.state_bytes_before, facts.state_bytes_after),
        ("Parameters", facts.parameters_before, facts.parameters_after),
    ]
    lines = ["## What was cut", "", "| | before | after | change |", "|---|---:|---:|---:|"]
    lines += [f"| {name} | {old:,} | {new:,} | {_change(old, new)} |" for name, old, new in rows]
    return "\n".join(lines)


def _how_it_was_made(facts: ModelCardFacts) -> str:
    rho = _UNKNOWN if facts.max_rho is None else f"{facts.max_rho:.4f}"
    epsilon = f"{facts.norm_epsilon}"
    if facts.norm_epsilon_before is not None and facts.norm_epsilon_after is not None:
        epsilon += f" ({facts.norm_epsilon_before:g} before, {facts.norm_epsilon_after:g} after)"
    digest = "" if facts.calibration_sha256 is None else f", SHA-256 of its tokens {_code(facts.calibration_sha256)}"
    return "\n".join(
        [
            "## How it was made",
            "",
            f"- Method: {_code(facts.method)}, scored on {_code(facts.scoring)}; worst `rho` over all heads: {rho}",
            f"- Ratio: {facts.ratio:g} (the share of key/query channels removed)",
            f"- Norm epsilon: {epsilon}",
            f"- Calibration: {facts.calibration_tokens:,} tokens of {_calibration_data(facts)}, in sequences of "
            f"at most {facts.calibration_sequence_length:,} tokens, seed {facts.calibration_seed}{digest}",
            f"- Recovery: {'none' if facts.recovery is None else _line(facts.recovery)}",
        ]
    )


def _calibration_data(facts: ModelCardFacts) -> str:
    text, prompts = _code(facts.calibration_source), "retrieval prompts with their answers"
    share = facts.calibration_retrieval_share
    if share in (0, 1):
        return prompts if share else text
    return f"{text} and, in {share:.0%} of the sequences, {prompts}"


def _figures(facts: ModelCardFacts) -> str:
    lines = ["## Figures", ""]
    if facts.figures:
        lines += ["| | base model | this model | difference ± standard error |", "|---|---:|---:|---:|"]
        lines += ["| " + " | ".join(_line(cell) for cell in row) + " |" for row in facts.figures]
    else:
        lines += ["Perplexity, divergence and memory (retrieval) were not measured."]
    lines += ["", "`compression.json` has every figure, per layer and head; `selection.json` has the kept channels."]
    return "\n".join(lines)


def _loading(facts: ModelCardFacts) -> str:
    lines = ["## Loading", "", "```python"]
    if facts.needs_fla:
        lines += ["import fla  # registers the model classes of flash-linear-attention"]
    arguments = ", trust_remote_code=True" if facts.trust_remote_code else ""
    lines += [
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        f"name = {json.dumps(facts.model_name, ensure_ascii=False)}  {_NAME_NOTE}",
        f'model = AutoModelForCausalLM.from_pretrained(name, dtype="auto"{arguments})',
        f"tokenizer = AutoTokenizer.from_pretrained(name{arguments})",
        "```",
        *(["", facts.loading_note] if facts.loading_note else []),
    ]
    return "\n".join(lines)


def _engines(facts: ModelCardFacts) -> str:
    if not facts.engine_notes:
        return ""
    notes = [_line(note) for note in facts.engine_notes]
    places = [_PLACE_NOTE, ""] if any(_PLACE in note for note in notes) else []
    return "\n".join(["## Engines", "", *places, *(f"- {note}" for note in notes)])


def _limitations(facts: ModelCardFacts) -> str:
    recovery = (
        "No recovery training was done after the cut; quality is that of the remaining channels as they were."
        if facts.recovery is None
        else f"Recovery after the cut: {_line(facts.recovery)}."
    )
    return "\n".join(
        [
            "## Limitations",
            "",
            "- Perplexity does not see memory loss: a smaller state can forget what stands far back in the context "
            "while perplexity hardly moves. Measure retrieval on your own long inputs before you rely on it.",
            f"- {recovery}",
            *_width_limitation(facts),
            "- Biases and failures of the base model remain.",
        ]
    )


def _width_limitation(facts: ModelCardFacts) -> list[str]:
    if facts.key_dim_after == facts.key_dim_before:
        return []
    return [
        f"- Only keys and queries have {facts.key_dim_after} channels a head now, values as many as before: an engine "
        "that was written for other widths refuses the checkpoint or needs a flag."
    ]


def _reproduction(facts: ModelCardFacts) -> str:
    lines = [
        "## Making it again",
        "",
        "`recipe.yaml` beside this file is the run, fully resolved:",
        "",
        "```bash",
        "compress --recipe recipe.yaml",
        "```",
    ]
    if facts.versions:
        lines += ["", "Made with " + ", ".join(f"{name} {version}" for name, version in facts.versions) + "."]
    return "\n".join(lines)


def _change(before: int, after: int) -> str:
    return "" if before == 0 else f"{100 * (after - before) / before:+.1f}%"


def _line(text: str) -> str:
    """One line that breaks no table."""
    return " ".join(text.split()).replace("|", r"\|")


def _code(text: str) -> str:
    return f"`{' '.join(text.split()).replace('`', chr(39))}`"
