"""Tensors that the stock loader puts together from several of the files': experts side by side, convolutions in a row.

Names and shapes of such parts are not those of the model, so they are held against what they make together.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from compressor.checkpoint.headers import TensorIndex
from compressor.checkpoint.layout import listed
from compressor.errors import RequestError

Patterns = tuple[str, ...]
"""Ends of the names of all parts of one tensor, as transformers writes them: `*` stands for the number of a part."""


def refuse_broken_parts(
    index: TensorIndex,
    targets: Mapping[str, str],
    patterns: Mapping[str, Patterns],
    expected: Mapping[str, tuple[int, ...]],
) -> None:
    """Hold every tensor that is made of parts against its parts.

    Args:
        targets: name in the files -> name in the model, for the parts alone.
        patterns: name in the files -> the patterns of all parts beside it.
        expected: name in the model -> shape.

    Raises:
        RequestError: a part is missing, is too many, or has the wrong size.
    """
    members: dict[str, list[str]] = defaultdict(list)
    for name, target in targets.items():
        members[target].append(name)
    for target, parts in members.items():
        shape = expected[target]
        wanted = _names(parts[0], patterns[parts[0]], shape[0])
        absent, extra = [name for name in wanted if name not in parts], [name for name in parts if name not in wanted]
        if wanted and (absent or extra):
            facts = [f"{kind} {listed(names)}" for kind, names in (("missing", absent), ("unexpected", extra)) if names]
            raise RequestError(
                f"config says {shape} for {target}, which the files hold in parts: {', '.join(facts)}; use weights and "
                "config of one model."
            )
        shapes = {name: index.entries[name].shape for name in parts}
        elements = sum(math.prod(part) for part in shapes.values())
        if elements != math.prod(shape):
            odd = _rarest(shapes)
            raise RequestError(
                f"config says {shape} for {target}, {math.prod(shape)} elements, and its parts in the files have "
                f"{elements}: {odd} is {shapes[odd]}; use the config.json that belongs to these weights."
            )


def _names(part: str, patterns: Patterns, count: int) -> Sequence[str]:
    """Names of all parts beside `part`, of which there are `count` by each pattern with a number; none if it has none.

    A pattern that is more than names and `*` says nothing here.
    """
    for pattern in patterns:
        found = re.search(f"{re.escape(pattern).replace(re.escape('*'), '[0-9]+')}$", part)
        if found:
            stem = part[: found.start()]
            numbered = {each: range(count) if "*" in each else range(1) for each in patterns}
            return [stem + each.replace("*", str(number)) for each, numbers in numbered.items() for number in numbers]
    return ()


def _rarest(shapes: Mapping[str, tuple[int, ...]]) -> str:
    counts = Counter(shapes.values())
    return min(shapes, key=lambda name: counts[shapes[name]])
