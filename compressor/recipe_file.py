"""Recipes on disk: YAML in which no key stands twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from compressor.errors import RequestError


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
    except ValueError as error:
        # What YAML takes by its form for a number or a date, and Python cannot hold.
        raise RequestError(
            f"recipe {path} has a number or a date that cannot be ({str(error).partition(';')[0]}); correct it, or "
            "write it in quotes where it is a word."
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
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is no word", key_node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> Any:
        value = super().construct_scalar(node)
        if "\0" in value:
            raise yaml.constructor.ConstructorError(
                None, None, "a word has a zero byte, which no path nor name can have", node.start_mark
            )
        return value
