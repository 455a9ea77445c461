"""Paths that begin with `~`. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from compressor.errors import RequestError


def expanded(place: Path | str) -> Path:
    """With the home folder in place of `~` or `~user`.

    Raises:
        RequestError: there is no such user, or none of their home is known.
    """
    try:
        return Path(place).expanduser()
    except RuntimeError:
        user = Path(place).parts[0]
        raise RequestError(f"{place}: this machine knows no home folder of {user}; write the path out.") from None
