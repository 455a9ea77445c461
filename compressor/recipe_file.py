"""Recipes on disk: YAML in which no key stands twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from compressor.abbreviation import cut, shown
from compressor.errors import RequestError
from compressor.file_kinds import refuse_no_file

MOST_BYTES = 2**20
"""Of a recipe: longer files are something else, and YAML is read slowly."""


def load_settings(path: Path) -> dict[str, Any]:
    """The nested settings of a recipe file.

    Raises:
        RequestError: the file is missing, no file, too long, no YAML mapping, or names a key twice.
    """
    refuse_no_file(path, f"recipe {path}", "give the path of a YAML file")
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise RequestError(f"recipe {path} cannot be read: {error.strerror}; give the path of a YAML file.") from None
    if len(data) > MOST_BYTES:
        raise RequestError(f"recipe {path} has more than {MOST_BYTES:,} bytes and is none; give a file of settings.")
    try:
        content = yaml.load(data.decode("utf-8"), Loader=_UniqueKeyLoader)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"recipe {path} is not valid YAML: {cut(str(error), 500)}") from None
    except ValueError as error:
        # What YAML takes by its form for a number or a date, and Python cannot hold.
        reason = cut(str(error).partition(";")[0], 200)
        raise RequestError(
            f"recipe {path} has a number or a date that cannot be ({reason}); correct it, or write it in quotes where "
            "it is a word."
        ) from None
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
                raise yaml.constructor.ConstructorError(None, None, f"key {shown(key)} is no word", key_node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {shown(key)} is given twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> Any:
        value = super().construct_scalar(node)
        if "\0" in value:
            raise yaml.constructor.ConstructorError(
                None, None, "a word has a zero byte, which no path nor name can have", node.start_mark
            )
        return value
