"""What recovery may train, for families whose mixer is a direct child of its block, beside the norm in front of it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torch import nn
from transformers import PreTrainedModel

from compressor.architectures.base import Mixer, RecoveryTargets
from compressor.errors import RunError


def recovery_targets(
    model: PreTrainedModel,
    mixers: Sequence[Mixer],
    projections: Collection[str],
    per_head: Collection[str],
    block_norm: str,
) -> RecoveryTargets:
    """The mixers' linear modules of the names `projections`, `per_head` included, and every parameter beside them.

    A name may be dotted, `f_proj.1`.

    `block_norm` is the name, in a block, of the norm in front of the mixer. A parameter that the files hold in parts
    is left as it is.

    Raises:
        RunError: a projection is no plain linear module.
    """
    paths: list[str] = []
    whole: list[str] = []
    for mixer in mixers:
        parent = model.get_submodule(mixer.module)
        present = {name: module for name, module in parent.named_modules() if name in projections}
        _refuse_other_modules(mixer, present)
        paths += [f"{mixer.module}.{name}" for name in present]
        weights = {f"{name}.weight" for name in present}
        beside = [f"{mixer.module}.{name}" for name, _ in parent.named_parameters() if name not in weights]
        norm = f"{_block(mixer.module)}.{block_norm}"
        beside += [f"{norm}.{name}" for name, _ in model.get_submodule(norm).named_parameters()]
        in_parts = {f"{_block(mixer.module)}.{name}" for name, in_files in mixer.renamed if in_files is None}
        whole += [name for name in beside if name not in in_parts]
    narrow = tuple(path for path in paths if path.rpartition(".")[2] in per_head)
    return RecoveryTargets(tuple(paths), narrow, tuple(whole))


def tensor_name(parameter: str, mixers: Sequence[Mixer]) -> str:
    """Name, in the files, of a parameter of the model that lies in the block of one of `mixers`.

    Raises:
        ValueError: it lies in none of them, or the files hold it in parts.
    """
    for mixer in mixers:
        prefix = f"{_block(mixer.module)}."
        if parameter.startswith(prefix):
            own = parameter.removeprefix(prefix)
            name = dict(mixer.renamed).get(own, own)
            if name is None:
                raise ValueError(f"the files hold {parameter} in parts")
            return f"{_block(mixer.tensors)}.{name}"
    raise ValueError(f"{parameter} lies in no block of a linear-attention layer")


def _block(mixer: str) -> str:
    return mixer.rpartition(".")[0]


def _refuse_other_modules(mixer: Mixer, projections: Mapping[str, nn.Module]) -> None:
    for name, module in projections.items():
        if not isinstance(module, nn.Linear):
            raise RunError(
                f"{mixer.module}.{name} is a {type(module).__name__} and not a linear module; load the checkpoint "
                "without quantisation or adapters."
            )
