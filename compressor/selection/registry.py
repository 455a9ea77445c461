"""The list of selection methods. Imports no torch: a wrong name is answered at once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from typing import TYPE_CHECKING, cast

from compressor.errors import RequestError
from compressor.selection.request import SCORINGS, Scoring, Statistic, check_f

if TYPE_CHECKING:
    from compressor.selection.base import Selector


@dataclass(frozen=True)
class SelectorEntry:
    """One method: where its class is, where it was published, and whether `scoring` means anything to it.

    `needs` names what it reads of each channel beside the Gram matrices, so that what is dear is not collected for
    nothing. A method that `needs_model` runs it anew instead of choosing from statistics: `class_name` is then None,
    and `module` what does so. `candidates` are the methods that a method tries, to take what diverges least, and
    `unnormalized_candidates` those that it tries too where keys and queries are not normalised.
    """

    name: str
    module: str
    class_name: str | None
    paper: str
    description: str
    has_scoring: bool
    needs: frozenset[Statistic] = frozenset()
    needs_model: bool = False
    candidates: tuple[str, ...] = ()
    unnormalized_candidates: tuple[str, ...] = ()


ENTRIES = (
    SelectorEntry(
        name="drrqr",
        module="compressor.selection.drrqr",
        class_name="DrrqrSelector",
        paper="https://arxiv.org/abs/2602.04852",
        description="strong rank-revealing QR of key and query activations, certified",
        has_scoring=True,
    ),
    SelectorEntry(
        name="l1",
        module="compressor.selection.l1",
        class_name="L1Selector",
        paper="https://arxiv.org/abs/1608.08710",
        description="largest L1 norm of the projection weights, no activations (baseline)",
        has_scoring=True,
        needs=frozenset({"weight_l1"}),
    ),
    SelectorEntry(
        name="energy",
        module="compressor.selection.energy",
        class_name="EnergySelector",
        paper="https://arxiv.org/abs/1611.06440",
        description="largest energy of the normalised key and query activations",
        has_scoring=True,
        needs=frozenset({"energy"}),
    ),
    SelectorEntry(
        name="s-wanda",
        module="compressor.selection.wanda",
        class_name="StructuredWandaSelector",
        paper="https://arxiv.org/abs/2306.11695",
        description="largest sums of weights times input norms (baseline)",
        has_scoring=True,
        needs=frozenset({"wanda"}),
    ),
    SelectorEntry(
        name="gradient",
        module="compressor.selection.gradient",
        class_name="GradientSelector",
        paper="https://arxiv.org/abs/2305.11627",
        description="largest sums of weights times the loss's gradient, which takes backward passes (baseline)",
        has_scoring=True,
        needs=frozenset({"gradient"}),
    ),
    SelectorEntry(
        name="ghost",
        module="compressor.selection.ghost",
        class_name="GhostSelector",
        paper="https://arxiv.org/abs/2602.11408",
        description="largest products of written and read energy, for state-space models (baseline)",
        has_scoring=False,
    ),
    SelectorEntry(
        name="random",
        module="compressor.selection.random",
        class_name="RandomSelector",
        paper="https://arxiv.org/abs/2602.04852",
        description="channels drawn at random (baseline)",
        has_scoring=False,
    ),
    SelectorEntry(
        name="fisher",
        module="compressor.fisher.progressive",
        class_name=None,
        paper="https://arxiv.org/abs/2204.09656",
        description="removed in stages by gradients and Fisher matrices of the divergence, which takes backward passes",
        has_scoring=False,
        needs_model=True,
    ),
    SelectorEntry(
        name="auto",
        module="compressor.choosing",
        class_name=None,
        paper="https://arxiv.org/abs/2602.04852",
        description="drrqr, energy and fisher, on Mamba-2 ghost and gradient too, each cut and refitted; what diverges "
        "least on held-out data stays",
        has_scoring=False,
        candidates=("drrqr", "energy", "fisher"),
        unnormalized_candidates=("ghost", "gradient"),
    ),
)


def index_entries(entries: Iterable[SelectorEntry]) -> dict[str, SelectorEntry]:
    """Entries by name. Raises ValueError when a name is listed twice."""
    index: dict[str, SelectorEntry] = {}
    for entry in entries:
        if entry.name in index:
            raise ValueError(
                f"The method {entry.name!r} is listed twice, for {index[entry.name].class_name} and "
                f"{entry.class_name}; give one of them another name."
            )
        index[entry.name] = entry
    return index


_INDEX = index_entries(ENTRIES)


def method_names() -> tuple[str, ...]:
    """Names of all methods, in the order of the list."""
    return tuple(_INDEX)


def selector_names() -> tuple[str, ...]:
    """Names of the methods that choose from statistics alone, in the order of the list."""
    return tuple(name for name, entry in _INDEX.items() if entry.class_name is not None)


def candidate_methods(name: str, normalizes_keys: bool) -> tuple[str, ...]:
    """What a method tries: itself, but for `auto`, which tries more in families that do not normalise keys and queries.

    Raises RequestError as `get_selector_entry`.
    """
    entry = get_selector_entry(name)
    return (*entry.candidates, *(() if normalizes_keys else entry.unnormalized_candidates)) or (name,)


def get_selector_entry(name: str) -> SelectorEntry:
    """The entry of a method. Raises RequestError with the nearest name and the list when there is none."""
    if name in _INDEX:
        return _INDEX[name]
    nearest = get_close_matches(name.lower(), _INDEX, n=1)
    hint = f"did you mean {nearest[0]}? " if nearest else ""
    raise RequestError(f"Unknown method {name!r}: {hint}Known methods: {', '.join(_INDEX)}.")


_WITHOUT_SCORING = {
    "random": "which scores no channel",
    "fisher": "which masks a channel of keys and queries at once",
    "auto": "which tries methods that have none",
    "ghost": "which multiplies what keys write by what queries read",
}


def check_selector(name: str, scoring: Scoring, f: float) -> None:
    """Check a request without importing the method. Raises RequestError."""
    entry = get_selector_entry(name)
    if scoring not in SCORINGS:
        raise RequestError(f"Unknown scoring {scoring!r}; choose one of {', '.join(SCORINGS)}.")
    if scoring != "qk" and not entry.has_scoring:
        raise RequestError(
            f"Scoring {scoring!r} means nothing to the method {name}, {_WITHOUT_SCORING[name]}; leave it at 'qk'."
        )
    check_f(f)


def build_selector(name: str, scoring: Scoring, f: float) -> Selector:
    """The selector of a method, imported only now.

    Raises RequestError as `check_selector` does, and for a method that does not choose from statistics alone.
    """
    check_selector(name, scoring, f)
    entry = get_selector_entry(name)
    if entry.class_name is None:
        raise RequestError(
            f"The method {name} runs the model and chooses nothing from statistics alone; choose one of "
            f"{', '.join(selector_names())}, or run `compress --method {name}`."
        )
    selector_class = cast("type[Selector]", getattr(import_module(entry.module), entry.class_name))
    return selector_class(scoring, f)
