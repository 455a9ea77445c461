"""JSON that anybody may have written. Imports no torch."""

from __future__ import annotations

import json
from typing import Any


def parse_json(text: str | bytes) -> Any:
    """The value that `text` holds.

    Raises:
        ValueError: it is no JSON, or nested more deeply than Python can read.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError(str(error)) from error
