"""The recipe: one strict, validated description of a run; YAML in, YAML out.

Every default of the product stands here and nowhere else. A recipe with several mistakes reports
all of them at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator

from compressor.abbreviation import cut_word, shown
from compressor.errors import RequestError
from compressor.evaluation_section import MOST_TOKENS, EvaluationSection
from compressor.export.sizes import parse_size
from compressor.section import Section, SettingsError, Word, accepted_by, describe, once
from compressor.selection.registry import check_selector, get_selector_entry
from compressor.width import known_allocation

DEFAULT_DATA_SET = "HuggingFaceFW/fineweb"
DEFAULT_DATA_SET_CONFIG = "sample-10BT"
DEMO_CALIBRATION: Mapping[str, Any] = {"source": "demo", "samples": 20}
"""For the bundled model: as many whole sequences as the bundled text has."""

NormEpsilon = Literal["keep", "scaled", "auto"]

_LEAST, _MOST = 1e-6, 1e6
"""Of factors of a training: what lies beyond leaves float32, or nothing of what it multiplies."""


def _size_as_word(value: Any) -> Any:
    """YAML reads a plain number of bytes as a number."""
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise ValueError(f"{shown(value)} is no size; write it as 500MB, 5GB, 2GiB or 1000000.")
    return value


def _refuse_unreal_size(size: str) -> None:
    if parse_size(size) >= 2**63:
        raise RequestError(f'size "{cut_word(size)}" is more than any machine holds; write it as 500MB, 5GB or 2GiB.')


_Size = Annotated[str, BeforeValidator(_size_as_word), AfterValidator(accepted_by(_refuse_unreal_size))]


class SelectionSection(Section):
    """Which channels are kept."""

    method: Annotated[str, AfterValidator(accepted_by(get_selector_entry))] = "drrqr"
    ratio: float | None = Field(default=None, ge=0, lt=1)
    """Share of the key/query channels of each head that is removed."""
    target_dim: int | None = Field(default=None, ge=1)
    """Channels of each head that are kept, taken as it is; instead of `ratio`."""
    target_state_bytes: _Size | None = None
    """Most bytes of a sequence's recurrent state, written as `ExportSection.max_shard_size`; instead of `ratio`."""
    round_to: int = Field(default=16, ge=1)
    """The kept width that `ratio` or `target_state_bytes` gives is a multiple of this."""
    allocation: Annotated[str, AfterValidator(accepted_by(known_allocation))] = Field(default="uniform", exclude=True)
    """There is nothing else that it could be: taken as the option is, and not written."""
    scoring: Literal["qk", "k", "q"] = "qk"
    f: float = Field(default=1.5, ge=1)
    """Bound of strong RRQR on max rho (Gu and Eisenstat 1996)."""
    norm_epsilon: NormEpsilon = "keep"
    """scaled: times d_k / k, which undoes the change of scale; auto: what diverges less from the original."""

    @model_validator(mode="after")
    def _one_width(self) -> Self:
        if [self.ratio, self.target_dim, self.target_state_bytes].count(None) != 2:
            raise SettingsError(
                "give exactly one of {ratio} (share removed), {target_dim} (channels kept) and {target_state_bytes} "
                "(of a sequence's state)",
                "ratio",
                "target_dim",
                "target_state_bytes",
            )
        return self

    @model_validator(mode="after")
    def _known_selector(self) -> Self:
        try:
            check_selector(self.method, self.scoring, self.f)
        except RequestError as error:
            raise SettingsError(f"{{scoring}}: {error}", "scoring") from None
        return self


class CalibrationSection(Section):
    """The text and the prompts whose activations are measured."""

    source: str = Field(default=DEFAULT_DATA_SET, min_length=1)
    """`demo`, a .txt/.jsonl/.parquet file, a folder of them, or a Hub data set id."""
    column: Word = "text"
    config: Word | None = None
    split: Word = "train"
    samples: int = Field(default=128, ge=1, le=10**9)
    sequence_length: int = Field(default=2048, ge=1, le=MOST_TOKENS)
    batch_size: int = Field(default=8, ge=1)
    retrieval_share: float | None = Field(default=None, ge=0, le=1)
    """Share of the samples that are retrieval prompts with their answers instead of text; None: half, or none where
    the sequences are too short for a prompt."""
    low_memory: bool = False
    """Layer by layer, with one layer's weights in memory and the activations between layers on disk."""

    @property
    def retrieval_samples(self) -> int:
        """Once the share is known."""
        return round((self.retrieval_share or 0.0) * self.samples)

    @model_validator(mode="before")
    @classmethod
    def _default_config(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and data.get("source", DEFAULT_DATA_SET) == DEFAULT_DATA_SET:
            return {"config": DEFAULT_DATA_SET_CONFIG, **data}
        return data


class RuntimeSection(Section):
    """Where and how the model runs while it is measured."""

    seed: int = Field(default=0, ge=0, le=2**63 - 1)
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """auto: bfloat16 on a GPU, float32 on a CPU."""
    device: str = Field(default="auto", pattern=r"^(auto|cpu|cuda(:\d{1,3})?)$")
    device_map: Literal["auto"] | None = None
    """auto: spread over all GPUs by accelerate, for a model larger than one."""
    trust_remote_code: bool = False


class RecoverySection(Section):
    """How quality is won back after the cut. The defaults of the training are those of the source paper."""

    refit: bool = True
    """Refit every mixer's output projection in closed form to the original's outputs."""
    train: bool = False
    """Then train, with the original as teacher."""
    source: str | None = Field(default=None, min_length=1)
    """Text to train on, named as the calibration's; None takes the calibration's own."""
    column: Word = "text"
    config: Word | None = None
    split: Word = "train"
    sequences: int = Field(default=32_768, ge=1, le=10**9)
    """Sequences to train on; the text is read again from its beginning where it has fewer."""
    sequence_length: int = Field(default=2048, ge=2, le=MOST_TOKENS)
    batch_size: int = Field(default=16, ge=1)
    """Sequences of one step."""
    micro_batch_size: int | None = Field(default=None, ge=1)
    """Sequences at once, where a step's need too much memory."""
    retrieval_share: float = Field(default=0.25, ge=0, le=1)
    """Share of the sequences that are retrieval prompts with their answers."""
    trainable: Literal["lora", "mixers"] = "lora"
    """lora: adapters on the mixers' projections, convolutions and norms whole; mixers: all of the mixers' weights."""
    rank: int = Field(default=32, ge=1)
    alpha: float = Field(default=64.0, ge=_LEAST, le=_MOST)
    """An adapter's output is multiplied by alpha / rank."""
    targets: Annotated[list[Word], Field(min_length=1), AfterValidator(once)] | None = None
    """Last names of the modules that get an adapter; None: all projections of the mixers."""
    save_adapter: str | None = Field(default=None, min_length=1)
    """New folder for the adapter as it was before it was merged, in peft's format; None keeps none."""
    learning_rate: float = Field(default=1e-4, gt=0, le=1)
    final_learning_rate: float = Field(default=1e-5, ge=0, le=1)
    warmup_share: float = Field(default=0.05, ge=0, le=1)
    weight_decay: float = Field(default=0.0, ge=0, le=1)
    gradient_norm: float = Field(default=1.0, ge=_LEAST)
    """Longer gradients are scaled down to it."""
    kl_weight: float = Field(default=1.0, ge=0, le=_MOST)
    """Of KL(teacher || student)."""
    cross_entropy_weight: float = Field(default=0.0, ge=0, le=_MOST)
    """Of the loss on the text itself."""
    temperature: float = Field(default=1.0, ge=0.01, le=100)
    """Of both distributions of the KL."""
    matching_weight: float = Field(default=0.0, ge=0, le=_MOST)
    """Of the match of every mixer's outputs with the teacher's."""
    checkpoint_every: int = Field(default=200, ge=1)
    """Steps between two checkpoints, which --resume goes on from."""
    evaluate_every: int = Field(default=0, ge=0)
    """Steps between two looks at held-out perplexity and the quick prompts; 0: only at the end."""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass: less memory, more time."""
    tracker: Literal["tensorboard", "trackio", "wandb"] | None = None
    seed: int | None = Field(default=None, ge=0, le=2**63 - 1)
    """None: the run's."""

    @property
    def steps(self) -> int:
        return -(-self.sequences // self.batch_size)


class ExportSection(Section):
    """What is written and checked at the end."""

    max_shard_size: _Size = "5GB"
    """Bytes, or a number with kB, MB, GB, TB, KiB, MiB, GiB or TiB."""
    link: bool = False
    """Hard-link weight files of the source that need no change: the same bytes on the disk, under two names."""
    evaluate: bool = True
    verify: bool = True


class Recipe(Section):
    """A whole run. `model` None is the bundled demo model."""

    model: str | None = Field(default=None, min_length=1)
    revision: str | None = Field(default=None, min_length=1)
    output_dir: str | None = Field(default=None, min_length=1)
    selection: SelectionSection
    calibration: CalibrationSection
    runtime: RuntimeSection = RuntimeSection()
    recovery: RecoverySection = RecoverySection()
    evaluation: EvaluationSection = EvaluationSection()
    export: ExportSection = ExportSection()

    @classmethod
    def from_settings(
        cls, settings: Mapping[str, Any], origin: str = "the request", name: Callable[[str], str] = str
    ) -> Recipe:
        """Validate nested settings, as a recipe file or `nest_flat_settings` gives them.

        Messages begin with `origin` and call a setting `name(setting)`.

        Raises:
            RequestError: lists every mistake, with its value and what is allowed.
        """
        sections = dict(settings)
        sections.setdefault("selection", {})
        given = sections.get("calibration") or {}
        if sections.get("model") is None and isinstance(given, Mapping):
            sections["calibration"] = {**DEMO_CALIBRATION, **given}
        sections.setdefault("calibration", {})
        try:
            return cls.model_validate(sections)
        except ValidationError as error:
            raise RequestError("\n".join(f"{origin}: {line}" for line in describe(error, cls, name))) from None

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.model_dump(), sort_keys=False, allow_unicode=True)


SECTIONS: Mapping[str, type[Section]] = {
    "selection": SelectionSection,
    "calibration": CalibrationSection,
    "runtime": RuntimeSection,
    "recovery": RecoverySection,
    "evaluation": EvaluationSection,
    "export": ExportSection,
}
