"""Results of long measurements, written after every row and taken up again."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.environment import write_result

Row = dict[str, Any]


@dataclass(slots=True)
class Rows:
    """The rows of a result file, each known by what it says under `keys`.

    Rows of a file that stands at `path` are not measured again if they were measured under the same `settings`.
    """

    path: Path | None
    settings: Mapping[str, Any]
    keys: Sequence[str]
    rows: list[Row] = field(default_factory=list)

    def load(self) -> None:
        """Raises SystemExit where the file is of other settings."""
        if self.path is None or not self.path.exists():
            return
        stored = json.loads(self.path.read_text(encoding="utf-8"))
        different = sorted(
            name
            for name in {*stored["settings"], *self.settings}
            if stored["settings"].get(name) != self.settings.get(name)
        )
        if different:
            raise SystemExit(
                f"{self.path} was measured with another {', '.join(different)}; name another --output to begin anew."
            )
        self.rows = stored["rows"]

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
        write_result(self.path, {"settings": self.settings, "rows": self.rows})
        return row

    def missing(self, known_by: Sequence[Row]) -> list[Row]:
        """Those that no stored row is known by."""
        stored = {tuple(row[key] for key in self.keys) for row in self.rows}
        return [row for row in known_by if tuple(row[key] for key in self.keys) not in stored]


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


def stored_rows(files: Sequence[Path]) -> list[Row]:
    """The rows of result files, one file after the other."""
    return [row for file in files for row in json.loads(file.read_text(encoding="utf-8"))["rows"]]


def _is_short(value: object) -> bool:
    """A number, a few words, or some by name; no lists."""
    if isinstance(value, str):
        return len(value) < 80
    return not isinstance(value, list) and not (isinstance(value, dict) and not all(map(_is_short, value.values())))
