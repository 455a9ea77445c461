"""The recipe: one strict, validated description of a run; YAML in, YAML out.

Every default of the product stands here and nowhere else. A recipe with several mistakes reports
all of them at once.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from compressor.errors import RequestError
from compressor.export.sizes import parse_size
from compressor.selection.registry import check_selector

DEFAULT_DATA_SET = "HuggingFaceFW/fineweb"
DEFAULT_DATA_SET_CONFIG = "sample-10BT"
DEMO_CALIBRATION: Mapping[str, Any] = {"source": "demo", "samples": 20}
"""For the bundled model: as many whole sequences as the bundled text has."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class SelectionSection(_Section):
    """Which channels are kept."""

    method: str = "drrqr"
    ratio: float | None = Field(default=None, ge=0, lt=1)
    """Share of the key/query channels of each head that is removed."""
    target_dim: int | None = Field(default=None, ge=1)
    """Channels of each head that are kept, taken as it is; instead of `ratio`."""
    round_to: int = Field(default=16, ge=1)
    """The kept width that `ratio` gives is rounded to a multiple of this."""
    scoring: Literal["qk", "k", "q"] = "qk"
    f: float = Field(default=1.5, ge=1)
    """Bound of strong RRQR on max rho (Gu and Eisenstat 1996)."""
    norm_epsilon: Literal["keep", "scaled"] = "keep"

    @model_validator(mode="after")
    def _one_width(self) -> Self:
        if (self.ratio is None) == (self.target_dim is None):
            raise ValueError("give exactly one of ratio (share removed) and target_dim (channels kept)")
        return self

    @model_validator(mode="after")
    def _known_method(self) -> Self:
        try:
            check_selector(self.method, self.scoring, self.f)
        except RequestError as error:
            raise ValueError(str(error)) from None
        return self


class CalibrationSection(_Section):
    """The text and the prompts whose activations are measured."""

    source: str = Field(default=DEFAULT_DATA_SET, min_length=1)
    """`demo`, a .txt/.jsonl/.parquet file, a folder of them, or a Hub data set id."""
    column: str = "text"
    config: str | None = None
    split: str = "train"
    samples: int = Field(default=128, ge=1)
    sequence_length: int = Field(default=2048, ge=1)
    batch_size: int = Field(default=8, ge=1)
    retrieval_share: float = Field(default=0.0, ge=0, le=1)
    """Share of the samples that are retrieval prompts with their answers instead of text."""

    @property
    def retrieval_samples(self) -> int:
        return round(self.retrieval_share * self.samples)

    @model_validator(mode="before")
    @classmethod
    def _default_config(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and data.get("source", DEFAULT_DATA_SET) == DEFAULT_DATA_SET:
            return {"config": DEFAULT_DATA_SET_CONFIG, **data}
        return data


class RuntimeSection(_Section):
    """Where and how the model runs while it is measured."""

    seed: int = Field(default=0, ge=0, le=2**63 - 1)
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """auto: bfloat16 on a GPU, float32 on a CPU."""
    device: str = Field(default="auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    trust_remote_code: bool = False


class EvaluationSection(_Section):
    """What is measured of a model. None takes the suite's own value."""

    suite: Literal["quick", "full"] = "quick"
    tasks: list[str] | None = Field(default=None, min_length=1)
    """Prompt forms by name; `lm_eval:NAME` and all after it are tasks of lm-eval."""
    lengths: list[Annotated[int, Field(ge=1)]] | None = Field(default=None, min_length=1)
    """Tokens of prompt and output together."""
    samples: int | None = Field(default=None, ge=1)
    """Prompts of each task at each length."""
    mode: Literal["teacher-forced", "generation"] | None = None
    texts: list[str] = []
    """Held-out text: .txt/.jsonl/.parquet files, folders, Hub data sets, or demo."""
    windows: int | None = Field(default=None, ge=1)
    """Most windows read of each text."""
    window_length: int | None = Field(default=None, ge=2)
    windowing: Literal["disjoint", "sliding", "rolling"] = "disjoint"
    """sliding: overlapping windows; rolling: as lm-eval's loglikelihood_rolling."""
    stride: int | None = Field(default=None, ge=1)
    """New tokens of each sliding window; half the window by default."""
    batch_size: int = Field(default=32, ge=1)
    haystack: str | None = None
    """Text file that text haystacks are cut from; the bundled text by default."""
    completion: str | None = None
    """JSON or JSONL file with the fields text and value; the bundled passages by default."""
    lm_eval_tasks: str | None = None
    """Folder of further task YAML files for lm-eval."""
    allow_extrapolation: bool = False
    """Ask beyond the context length that the config names."""

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> EvaluationSection:
        """Validate settings named as the fields.

        Raises:
            RequestError: lists every mistake, with its value and what is allowed.
        """
        try:
            return cls.model_validate(settings)
        except ValidationError as error:
            raise RequestError("\n".join(_describe(error))) from None


class ExportSection(_Section):
    """What is written and checked at the end."""

    max_shard_size: str = "5GB"
    """Bytes, or a number with kB, MB, GB, TB, KiB, MiB, GiB or TiB."""
    evaluate: bool = True
    verify: bool = True

    @field_validator("max_shard_size")
    @classmethod
    def _size(cls, value: str) -> str:
        try:
            parse_size(value)
        except RequestError as error:
            raise ValueError(str(error)) from None
        return value


class Recipe(_Section):
    """A whole run. `model` None is the bundled demo model."""

    model: str | None = Field(default=None, min_length=1)
    revision: str | None = Field(default=None, min_length=1)
    output_dir: str | None = Field(default=None, min_length=1)
    selection: SelectionSection
    calibration: CalibrationSection
    runtime: RuntimeSection = RuntimeSection()
    evaluation: EvaluationSection = EvaluationSection()
    export: ExportSection = ExportSection()

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any], origin: str = "the request") -> Recipe:
        """Validate nested settings, as a recipe file or `nest_flat_settings` gives them.

        Raises:
            RequestError: lists every mistake, with its value and what is allowed.
        """
        sections = dict(settings)
        sections.setdefault("selection", {})
        if sections.get("model") is None:
            sections["calibration"] = {**DEMO_CALIBRATION, **(sections.get("calibration") or {})}
        sections.setdefault("calibration", {})
        try:
            return cls.model_validate(sections)
        except ValidationError as error:
            raise RequestError("\n".join(f"{origin}: {line}" for line in _describe(error))) from None

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.model_dump(), sort_keys=False, allow_unicode=True)


SECTIONS: Mapping[str, type[_Section]] = {
    "selection": SelectionSection,
    "calibration": CalibrationSection,
    "runtime": RuntimeSection,
    "evaluation": EvaluationSection,
    "export": ExportSection,
}
_FLAT_NAMES = {"calibration": ("calibration", "source"), "calibration_samples": ("calibration", "samples")}
_FLAT_NAMES |= {f"calibration_{name}": ("calibration", name) for name in ("column", "config", "split")}


def nest_flat_settings(flat: Mapping[str, Any], base: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Put settings named as on the command line (ratio, calibration_samples, ...) into their sections.

    They replace those of `base`; giving a ratio drops the base's target_dim and the other way round.
    """
    nested: dict[str, Any] = {
        key: dict(value) if isinstance(value, Mapping) else value for key, value in (base or {}).items()
    }
    for name, value in flat.items():
        section, field = _FLAT_NAMES.get(name) or (_section_of(name), name)
        target = nested.setdefault(section, {}) if section else nested
        if not isinstance(target, dict):
            continue
        target[field] = value
        other = {"ratio": "target_dim", "target_dim": "ratio"}.get(field)
        if other and other not in flat:
            target.pop(other, None)
    return nested


def load_settings(path: Path) -> dict[str, Any]:
    """The nested settings of a recipe file.

    Raises:
        RequestError: the file is missing, is no YAML mapping, or names a key twice.
    """
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=_UniqueKeyLoader)
    except OSError as error:
        raise RequestError(f"recipe {path} cannot be read: {error.strerror}; give the path of a YAML file.") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"recipe {path} is not valid YAML: {error}") from None
    if not isinstance(content, dict):
        raise RequestError(f"recipe {path} holds no settings; start from one of the files in recipes/.")
    return content


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML lets a later key replace an earlier one without a word; here that is a mistake."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is no word", key_node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def _section_of(name: str) -> str | None:
    return next((section for section, model in SECTIONS.items() if name in model.model_fields), None)


def _describe(error: ValidationError) -> list[str]:
    lines = []
    for problem in error.errors():
        path = ".".join(str(part) for part in problem["loc"])
        message = problem["msg"].removeprefix("Value error, ")
        if problem["type"] == "extra_forbidden":
            lines.append(f"{path} is not a setting{_did_you_mean(problem['loc'])}")
        elif problem["type"] == "value_error":
            lines.append(f"{path}: {message}" if path else message)
        else:
            lines.append(f"{path}: {message} (got {problem['input']!r})")
    return lines


def _did_you_mean(location: tuple[int | str, ...]) -> str:
    model = SECTIONS.get(str(location[0]), Recipe) if len(location) > 1 else Recipe
    names = list(model.model_fields)
    nearest = difflib.get_close_matches(str(location[-1]), names, n=1)
    return f"; did you mean {nearest[0]}?" if nearest else f"; known here: {', '.join(names)}."
