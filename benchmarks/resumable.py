"""Results of long measurements, written after every row and taken up again."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import Any

from benchmarks.environment import write_result
from compressor.errors import RequestError

Row = dict[str, Any]
Columns = Mapping[str, type | UnionType]
"""What a row has, and of which types."""


@dataclass(slots=True)
class Rows:
    """The rows that a result file holds under the name `under`, each known by what it says under `keys`.

    Rows of a file that stands at `path` are not measured again if they were measured under the same `settings`.
    """

    path: Path | None
    settings: Mapping[str, Any]
    keys: Sequence[str]
    under: str = "rows"
    rows: list[Row] = field(default_factory=list)

    def load(self) -> None:
        """Take up what the file holds.

        Raises:
            RequestError: the file is of other settings or no result file.
        """
        if self.path is None or not self.path.exists():
            return
        stored = read_result(self.path, dict.fromkeys(self.keys, object), under=self.under)
        different = different_settings(stored.settings, self.settings)
        if different:
            raise RequestError(
                f"{self.path} was measured with another {', '.join(different)}; name another --output to begin anew."
            )
        self.rows = stored.rows

    def measure(self, known_by: Row, work: Callable[[], Row]) -> Row:
        """The stored row, or the one that `work` fills in, with the seconds it took; it is written and printed."""
        for row in self.rows:
            if all(row[key] == known_by[key] for key in self.keys):
                return row
        started = time.perf_counter()
        row = {**known_by, **work()}
        row["seconds"] = round(time.perf_counter() - started, 2)
        self.rows.append(row)
        print(" ".join(f"{name}={value}" for name, value in row.items() if _is_short(value)), flush=True)
        write_result(self.path, {"settings": self.settings, self.under: self.rows})
        return row

    def missing(self, known_by: Sequence[Row]) -> list[Row]:
        """Those that no stored row is known by."""
        stored = {tuple(row[key] for key in self.keys) for row in self.rows}
        return [row for row in known_by if tuple(row[key] for key in self.keys) not in stored]

    def measured(self) -> list[Row]:
        """All rows.

        Raises:
            RequestError: there is none, since no model could be measured.
        """
        refuse_nothing_measured(self.rows)
        return self.rows


def refuse_nothing_measured(rows: Sequence[object]) -> None:
    """Raises RequestError where there is none, since no model could be measured."""
    if not rows:
        raise RequestError("nothing was measured: --models and --only name no folder that can be; name others.")


@dataclass(slots=True)
class Budget:
    """Seconds of wall time from here on, None for all that is needed.

    Rows of one `kind` are thought to take as long as the longest of it did, so that one is not begun to be cut off.
    """

    seconds: float | None
    started: float = field(default_factory=time.perf_counter)
    longest: dict[str, float] = field(default_factory=dict)

    def allows(self, kind: str) -> bool:
        """Whether another row of the kind is likely to end in time."""
        elapsed = time.perf_counter() - self.started
        return self.seconds is None or elapsed + self.longest.get(kind, 0.0) < self.seconds

    def took(self, kind: str, seconds: float) -> None:
        self.longest[kind] = max(seconds, self.longest.get(kind, 0.0))


def settings_of(arguments: argparse.Namespace, without: Sequence[str]) -> dict[str, Any]:
    """The options that decide a row, as JSON values; `without` those that only choose rows or name files."""
    values = {name: value for name, value in vars(arguments).items() if name not in without}
    as_json: dict[str, Any] = json.loads(json.dumps(values, default=str))
    return as_json


@dataclass(frozen=True, slots=True)
class StoredResult:
    """A result file as it was read."""

    path: Path
    settings: Mapping[str, Any]
    rows: list[Row]


def read_result(path: Path, columns: Columns, made_by: str = "this benchmark", under: str = "rows") -> StoredResult:
    """A result file that holds rows under the name `under`, which all have values of these types under `columns`.

    Raises:
        RequestError: it has not, or has no rows, or cannot be read.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"no JSON: {error}"
        raise RequestError(f"{path} cannot be read ({reason}); give a result file of {made_by}.") from error
    rows = content.get(under) if isinstance(content, dict) else None
    if not rows or not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise RequestError(f"{path} holds no {under}; give a result file of {made_by} that something was measured for.")
    wrong = [
        name for name, kind in columns.items() if not all(name in row and isinstance(row[name], kind) for row in rows)
    ]
    settings = content.get("settings", {})
    # A file that was put together of several holds a list.
    if wrong or not isinstance(settings, dict | list):
        raise RequestError(
            f"{path} is no result of {made_by}: {', '.join(wrong) or 'settings'} is missing or of another kind; "
            "give one that is."
        )
    return StoredResult(path, settings if isinstance(settings, dict) else {}, rows)


def stored_rows(
    files: Sequence[Path], columns: Columns, made_by: str = "this benchmark", under: str = "rows"
) -> list[Row]:
    """The rows of result files, one file after the other. Raises RequestError as `read_result`."""
    return [row for file in files for row in read_result(file, columns, made_by, under).rows]


def different_settings(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """The names of the settings that are not the same."""
    return sorted(name for name in {*one, *other} if one.get(name) != other.get(name))


def _is_short(value: object) -> bool:
    """A number, a few words, or some by name; no lists."""
    if isinstance(value, str):
        return len(value) < 80
    return not isinstance(value, list) and not (isinstance(value, dict) and not all(map(_is_short, value.values())))
