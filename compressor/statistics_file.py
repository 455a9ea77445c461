"""Calibration statistics in a file of the user's: one calibration for cuts of several widths and methods.

The file names the model, revision, key width, tokens and dtype it was made of, and is used for these alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from compressor.artifacts import CalibrationStatistics
from compressor.errors import RequestError, RunError
from compressor.export.locks import lock_file_of
from compressor.export.placement import lies_in
from compressor.export.trial import file_problem
from compressor.file_kinds import kind_of
from compressor.home_folders import expanded
from compressor.selection.request import Statistic

STATISTICS_SCHEMA = "1"
_TENSORS_OF: dict[Statistic, str] = {"energy": "energy", "wanda": "input_squares", "gradient": "gradient"}


@dataclass(frozen=True, slots=True)
class StatisticsIdentity:
    """What statistics are of. None where it is not yet known; `revision` None is also that of a local folder.

    `model_sha256` covers weights and config, `tokens_sha256` every calibration token.
    """

    model: str
    revision: str | None
    key_dim: int
    layers: tuple[int, ...]
    dtype: str
    model_sha256: str | None = None
    tokens_sha256: str | None = None

    def metadata(self) -> dict[str, str]:
        return {
            "model": self.model,
            "revision": self.revision or "",
            "key_dim": str(self.key_dim),
            "layers": json.dumps(self.layers),
            "dtype": self.dtype,
            "model_sha256": self.model_sha256 or "",
            "tokens_sha256": self.tokens_sha256 or "",
        }


def model_sha256(weights_sha256: str, raw_config: Mapping[str, object]) -> str:
    """Of weights and config together: activations depend on both."""
    return hashlib.sha256(f"{weights_sha256}\n{json.dumps(raw_config, sort_keys=True)}".encode()).hexdigest()


def refuse_place(path: Path, outputs: Sequence[Path], model: Path, texts: Iterable[Path], overwrite: bool) -> None:
    """Refuse, before any work, a file to save to that would not be there at the end, or that is not ours to replace.

    Raises:
        RequestError: there is no such folder; the file exists and not `overwrite`, or holds no statistics; it lies in
            the folders `outputs` or `model` or among the `texts` that are read, or nothing can be written there.
    """
    given = expanded(path)
    _refuse_folders(path, given, outputs, model, texts)
    real = Path(os.path.realpath(given))
    if real.is_dir():
        raise RequestError(f"--save-statistics {path} is a folder; name a file, such as {path}/statistics.safetensors.")
    if real.exists() and not real.is_file():
        raise RequestError(f"--save-statistics {path} is a device or a pipe, not a file; name a file.")
    if not real.parent.is_dir():
        raise RequestError(f"--save-statistics {path}: there is no folder {real.parent}; make it first.")
    problem = file_problem(real.parent)
    if problem is not None:
        raise RequestError(
            f"--save-statistics {path}: {real.parent} cannot be written to ({problem}); name another folder."
        )
    if real.exists() and not overwrite:
        raise RequestError(f"--save-statistics {path} exists; give --overwrite to replace it, or name another file.")
    if real.exists() and not _is_ours(real):
        raise RequestError(
            f"--save-statistics {path} exists and holds no statistics, and --overwrite replaces only those; name "
            "another file."
        )


def _refuse_folders(path: Path, given: Path, outputs: Sequence[Path], model: Path, texts: Iterable[Path]) -> None:
    if lies_in(given, model):
        raise RequestError(
            f"--save-statistics {path} lies in the model's folder, whose files this run reads; name a file elsewhere."
        )
    for text in texts:
        if os.path.realpath(given) == os.path.realpath(text):
            raise RequestError(f"--save-statistics {path} is a text that this run reads; name another file.")
        if text.is_dir() and lies_in(given, text):
            raise RequestError(
                f"--save-statistics {path} lies in {text}, a folder of texts that this run reads; name a file "
                "elsewhere."
            )
    for output in outputs:
        if lies_in(given, lock_file_of(output).parent):
            raise RequestError(
                f"--save-statistics {path} lies in the folder that --resume goes on with; name a file elsewhere."
            )
        if Path(os.path.realpath(given)) == output or lies_in(given, output):
            raise RequestError(
                f"--save-statistics {path} lies in the output folder {output}, beside whose weights no other may "
                "stand; name a file elsewhere."
            )


def save_statistics(path: Path, identity: StatisticsIdentity, statistics: CalibrationStatistics) -> None:
    """Write a new file and rename it into place.

    Raises:
        RunError: it cannot be written.
    """
    target = Path(os.path.realpath(expanded(path)))
    partial = target.with_name(f".{target.name}.partial-{uuid.uuid4().hex}")
    metadata = {"schema": STATISTICS_SCHEMA, "tokens": str(statistics.tokens), **identity.metadata()}
    try:
        save_file(_tensors(statistics), partial, metadata=metadata)
        partial.replace(target)
    except (OSError, SafetensorError) as error:
        raise RunError(f"--save-statistics {path} could not be written ({error}); name another file.") from error
    finally:
        partial.unlink(missing_ok=True)


def refuse_other_statistics(path: Path, identity: StatisticsIdentity, needs: Collection[Statistic]) -> None:
    """Refuse a file of another model, revision, width or calibration, as far as `identity` knows it.

    Raises:
        RequestError: what is refused, or a file that cannot be read or lacks one of `needs`.
    """
    metadata, names = _read_header(path)
    asked = identity.metadata()
    have = {name: metadata.get(name, "") for name in asked}
    remedy = "leave --statistics out to calibrate anew"
    if have["key_dim"] != asked["key_dim"]:
        raise RequestError(
            f"--statistics {path} is of heads with {have['key_dim']} key channels and {identity.model} has "
            f"{asked['key_dim']}; {remedy}."
        )
    if have["revision"] != asked["revision"]:
        raise RequestError(
            f"--statistics {path} is of {_revision(have)} and this is {_revision(asked)}; give that one with "
            f"--revision, or {remedy}."
        )
    if have["layers"] != asked["layers"] or _differs(have, asked, "model_sha256"):
        raise RequestError(
            f"--statistics {path} is of another model than {identity.model} (of {have['model']}; the hash of weights "
            f"and config differs); {remedy}."
        )
    if have["dtype"] != asked["dtype"]:
        raise RequestError(
            f"--statistics {path} was measured in {have['dtype']} and this run is in {asked['dtype']}; give --dtype "
            f"{have['dtype']}, or {remedy}."
        )
    if _differs(have, asked, "tokens_sha256"):
        raise RequestError(
            f"--statistics {path} is of other calibration tokens than this run reads (their hash differs); give the "
            f"calibration options and the seed it was made with, or {remedy}."
        )
    for statistic, field in _TENSORS_OF.items():
        if statistic in needs and f"{field}_q" not in names:
            raise RequestError(
                f"--statistics {path} holds no {statistic} of the channels, which the chosen method reads; save it "
                "again with that method, or choose one that reads activations alone, such as drrqr."
            )


def load_statistics(path: Path) -> CalibrationStatistics:
    """What `save_statistics` wrote; see `refuse_other_statistics` first.

    Raises:
        RequestError: the file cannot be read.
    """
    metadata, names = _read_header(path)
    try:
        with safe_open(expanded(path), framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in names}
        layers, tokens = tuple(json.loads(metadata["layers"])), int(metadata["tokens"])
        return CalibrationStatistics(layers=layers, tokens=tokens, **tensors)
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise _unreadable(path, str(error)) from error


def _read_header(path: Path) -> tuple[dict[str, str], list[str]]:
    file_path = expanded(path)
    if not file_path.is_file():
        kind = kind_of(file_path)
        found = "there is no such file" if kind is None else f"that is {kind}, not a file"
        raise RequestError(f"--statistics {path}: {found}; give one that --save-statistics wrote.")
    try:
        with safe_open(file_path, framework="pt") as file:
            metadata, names = dict(file.metadata() or {}), list(file.keys())
    except (SafetensorError, OSError) as error:
        raise _unreadable(path, str(error)) from error
    if metadata.get("schema") != STATISTICS_SCHEMA:
        raise _unreadable(path, f"schema {metadata.get('schema')} instead of {STATISTICS_SCHEMA}")
    return metadata, names


def _is_ours(path: Path) -> bool:
    try:
        with safe_open(path, framework="pt") as file:
            return "tokens_sha256" in (file.metadata() or {})
    except (SafetensorError, OSError):
        return False


def _unreadable(path: Path, reason: str) -> RequestError:
    return RequestError(
        f"--statistics {path} cannot be read ({reason}); give a file that --save-statistics of this version wrote."
    )


def _differs(have: Mapping[str, str], asked: Mapping[str, str], field: str) -> bool:
    return bool(asked[field]) and have[field] != asked[field]


def _revision(identity: Mapping[str, str]) -> str:
    return f"{identity['model']} at revision {identity['revision'] or 'none (a folder)'}"


def _tensors(statistics: CalibrationStatistics) -> dict[str, Tensor]:
    found = {field.name: getattr(statistics, field.name) for field in fields(statistics)}
    return {name: value.contiguous() for name, value in found.items() if isinstance(value, torch.Tensor)}
