"""Calibration statistics in a file of the user's: one calibration for cuts of several widths and methods.

The file names the model, revision, widths, tokens and dtype it was made of, and is used for these alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from compressor.abbreviation import cut_word
from compressor.artifacts import CalibrationStatistics
from compressor.errors import RequestError
from compressor.export.files import new_file_mode, sync_file
from compressor.home_folders import expanded
from compressor.json_text import parse_json
from compressor.selection.request import Statistic
from compressor.statistics_content import TensorSizes, content_sha256, damage, lacking
from compressor.statistics_header import ANEW, STATISTICS_SCHEMA, damaged, read_header


@dataclass(frozen=True, slots=True)
class StatisticsIdentity:
    """What statistics are of. None where it is not yet known; `revision` None is also that of a local folder.

    `heads` are the key heads of a layer, `input_width` what the key and query projections read of a token;
    `model_sha256` covers weights and config, `tokens_sha256` every calibration token.
    """

    model: str
    revision: str | None
    key_dim: int
    heads: int
    input_width: int
    layers: tuple[int, ...]
    dtype: str
    model_sha256: str | None = None
    tokens_sha256: str | None = None

    @property
    def sizes(self) -> TensorSizes:
        return TensorSizes(len(self.layers), self.heads, self.key_dim, self.input_width)

    def metadata(self) -> dict[str, str]:
        return {
            "model": self.model,
            "revision": self.revision or "",
            "key_dim": str(self.key_dim),
            "heads": str(self.heads),
            "input_width": str(self.input_width),
            "layers": json.dumps(self.layers),
            "dtype": self.dtype,
            "model_sha256": self.model_sha256 or "",
            "tokens_sha256": self.tokens_sha256 or "",
        }


def model_sha256(weights_sha256: str, raw_config: Mapping[str, object]) -> str:
    """Of weights and config together: activations depend on both."""
    return hashlib.sha256(f"{weights_sha256}\n{json.dumps(raw_config, sort_keys=True)}".encode()).hexdigest()


def save_statistics(path: Path, identity: StatisticsIdentity, statistics: CalibrationStatistics) -> str | None:
    """Write a new file and rename it into place; returns what there is to say where that fails."""
    target = Path(os.path.realpath(expanded(path)))
    partial = target.with_name(f".{target.name}.partial-{uuid.uuid4().hex}")
    tensors = _tensors(statistics)
    metadata = {
        "schema": STATISTICS_SCHEMA,
        "tokens": str(statistics.tokens),
        "content_sha256": content_sha256(statistics.tokens, tensors),
        **identity.metadata(),
    }
    try:
        try:
            save_file(tensors, partial, metadata=metadata)
            partial.chmod(new_file_mode(partial.parent))
            sync_file(partial)
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)
    except (OSError, SafetensorError) as error:
        return (
            f"--save-statistics {path} could not be written ({error}), and the run goes on without it; to have the "
            "statistics, run again and name a file in a place with room."
        )
    return None


def refuse_other_statistics(path: Path, identity: StatisticsIdentity, needs: Collection[Statistic]) -> None:
    """Refuse a file of another model, revision, width or calibration, as far as `identity` knows it.

    Of the tensors, names, dtypes and shapes are looked at, and none is read.

    Raises:
        RequestError: what is refused, or a file that cannot be read, is damaged or lacks one of `needs`.
    """
    header = read_header(path)
    _refuse_other_identity(path, header.metadata, identity)
    problem = damage(header.tensors, identity.sizes)
    if problem is None and not header.metadata.get("tokens", "").isdecimal():
        problem = f'its number of tokens is "{cut_word(header.metadata.get("tokens", ""))}"'
    if problem is not None:
        raise damaged(path, problem)
    for statistic in lacking(header.tensors, needs):
        raise RequestError(
            f"--statistics {path} holds no {statistic} of the channels, which the chosen method reads; save it "
            "again with that method, or choose one that reads activations alone, such as drrqr."
        )


def load_statistics(path: Path) -> CalibrationStatistics:
    """What `save_statistics` wrote; see `refuse_other_statistics` first.

    Raises:
        RequestError: the file cannot be read, or its tensors are not those that were saved.
    """
    header = read_header(path)
    try:
        with safe_open(expanded(path), framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in header.tensors}
        layers, tokens = tuple(parse_json(header.metadata["layers"])), int(header.metadata["tokens"])
        found, saved = content_sha256(tokens, tensors), header.metadata.get("content_sha256", "")
        if found != saved:
            raise damaged(path, f'the SHA-256 of its tensors is {found} and not "{cut_word(saved)}", as it says')
        return CalibrationStatistics(layers=layers, tokens=tokens, **tensors)
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise damaged(path, str(error)) from error


def _refuse_other_identity(path: Path, metadata: Mapping[str, str], identity: StatisticsIdentity) -> None:
    asked = identity.metadata()
    have = {name: cut_word(metadata.get(name, "")) for name in asked}
    for name, words in (("key_dim", "heads with {} key channels"), ("heads", "layers with {} key heads")):
        if have[name] != asked[name]:
            raise RequestError(
                f"--statistics {path} is of {words.format(have[name])} and {identity.model} has {asked[name]}; {ANEW}."
            )
    if have["revision"] != asked["revision"]:
        raise RequestError(
            f"--statistics {path} is of {_revision(have)} and this is {_revision(asked)}; give that one with "
            f"--revision, or {ANEW}."
        )
    for name, what in (
        ("layers", "the positions of its linear layers differ"),
        ("input_width", "the width of its hidden states differs"),
        ("model_sha256", "the hash of weights and config differs"),
    ):
        if _differs(metadata, asked, name):
            raise RequestError(
                f"--statistics {path} is of another model than {identity.model} (of {have['model']}; {what}); {ANEW}."
            )
    if have["dtype"] != asked["dtype"]:
        raise RequestError(
            f"--statistics {path} was measured in {have['dtype']} and this run is in {asked['dtype']}; give --dtype "
            f"{have['dtype']}, or {ANEW}."
        )
    if _differs(metadata, asked, "tokens_sha256"):
        raise RequestError(
            f"--statistics {path} is of other calibration tokens than this run reads (their hash differs); give the "
            f"calibration options and the seed it was made with, or {ANEW}."
        )


def _differs(have: Mapping[str, str], asked: Mapping[str, str], name: str) -> bool:
    return bool(asked[name]) and have.get(name, "") != asked[name]


def _revision(identity: Mapping[str, str]) -> str:
    return f"{identity['model']} at revision {identity['revision'] or 'none (a folder)'}"


def _tensors(statistics: CalibrationStatistics) -> dict[str, Tensor]:
    found = {field.name: getattr(statistics, field.name) for field in fields(statistics)}
    return {name: value.contiguous() for name, value in found.items() if isinstance(value, torch.Tensor)}
