"""The model that recovery trains: which of its parameters, and how they go back into the checkpoint."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from compressor.architectures.base import Architecture, Mixer, RecoveryTargets
from compressor.errors import RequestError, RunError
from compressor.recovery.lora import Adapter, base_weight, insert_adapters, write_adapters, write_tensors

Trainable = Literal["lora", "mixers"]

ReadTensor = Callable[[str], Tensor]
"""From the name of a tensor in the checkpoint's files to its values, on the CPU."""

WHOLE_FILE = "whole_parameters.safetensors"


@dataclass(frozen=True, slots=True)
class StudentSettings:
    """How the recurrent layers are trained.

    Attributes:
        trainable: "lora" trains adapters on the projections, and whole what no adapter fits: convolutions, norms,
            decays, biases. "mixers" trains every parameter of these layers whole.
        rank: of the adapters.
        alpha: an adapter's output is multiplied by alpha / rank.
        targets: last names of the modules that get an adapter. None stands for all projections; those to one number
            a head that are narrower than `rank` are then trained whole.
        seed: of the adapters' first values.
    """

    trainable: Trainable
    rank: int
    alpha: float
    targets: tuple[str, ...] | None
    seed: int


@dataclass(frozen=True, slots=True)
class StudentSummary:
    """What is trained, for the report.

    Attributes:
        trainable_parameters: elements, those of the adapters included.
        lora_modules: last names of the modules with an adapter, by layer; empty without adapters.
        whole_parameters: elements of what is trained as it is.
    """

    trainable_parameters: int
    lora_modules: Mapping[int, tuple[str, ...]]
    whole_parameters: int


@dataclass(frozen=True, slots=True, eq=False)
class Student:
    """A model whose trained parameters are float32 and alone require a gradient; see `prepare_student`.

    `whole` holds, by their names in the model before adapters came, the parameters that are trained as they are.
    """

    model: PreTrainedModel
    settings: StudentSettings
    architecture: Architecture
    mixers: tuple[Mixer, ...]
    adapters: tuple[Adapter, ...]
    whole: Mapping[str, nn.Parameter]

    def trainable_parameters(self) -> dict[str, nn.Parameter]:
        """All trained parameters; the names and their order depend on the checkpoint and the settings alone."""
        adapters = {
            f"{adapter.path}.{name}.weight": parameter
            for adapter in self.adapters
            for name, parameter in (("lora_A", adapter.a), ("lora_B", adapter.b))
        }
        return {**adapters, **self.whole}

    def take_exact(self, read: ReadTensor) -> None:
        """Give what is trained as it is the values of the files, where the model was loaded in less than float32.

        Raises:
            ValueError: the files hold one of these parameters in parts.
        """
        with torch.no_grad():
            for parameter_name, parameter in self.whole.items():
                parameter.copy_(read(self.architecture.tensor_name(parameter_name, self.mixers)))

    def merged_tensors(self, dtypes: Mapping[str, torch.dtype], read: ReadTensor | None = None) -> dict[str, Tensor]:
        """The trained tensors by their names in the files, on the CPU: each computed in float32 and rounded once.

        `dtypes` are those of the checkpoint's tensors, by name. `read` None takes the weights beside the adapters
        from the model, which then must hold them as the files do.

        Raises:
            RunError: the checkpoint has no tensor of a trained parameter's name.
        """
        names = {adapter.path: self._tensor_name(f"{adapter.path}.weight", dtypes) for adapter in self.adapters}
        merged = {}
        for adapter in self.adapters:
            name = names[adapter.path]
            weight = base_weight(self.model, adapter) if read is None else read(name)
            merged[name] = adapter.merged(weight, dtypes[name])
        for parameter_name, parameter in self.whole.items():
            name = self._tensor_name(parameter_name, dtypes)
            merged[name] = parameter.detach().to("cpu", dtypes[name], copy=True)
        return merged

    def save_adapter(self, folder: Path) -> None:
        """Write what was trained into the new or empty `folder`, which must not hold the model's own weights.

        `adapter_config.json` and `adapter_model.safetensors` are peft's format: `PeftModel.from_pretrained` puts
        them on the checkpoint as it was before recovery. What was trained beside the adapters stands in
        `whole_parameters.safetensors`, which no loader reads by itself: whole tensors in float32 by their names in
        the checkpoint's files, to be loaded in place of the checkpoint's.

        Raises:
            RequestError: no adapters were trained.
        """
        if not self.adapters:
            raise RequestError(
                "save_adapter: trainable mixers trains no adapter; use trainable lora, or leave save_adapter "
                "out: the exported checkpoint has all that was trained."
            )
        folder.mkdir(parents=True, exist_ok=True)
        write_adapters(folder, self.adapters, self.settings.rank, self.settings.alpha)
        whole = {
            self.architecture.tensor_name(name, self.mixers): parameter.detach().cpu().contiguous()
            for name, parameter in self.whole.items()
        }
        write_tensors(folder / WHOLE_FILE, whole)

    def summary(self) -> StudentSummary:
        modules = {
            mixer.layer: tuple(
                adapter.path.rpartition(".")[2]
                for adapter in self.adapters
                if adapter.path.startswith(f"{mixer.module}.")
            )
            for mixer in self.mixers
        }
        return StudentSummary(
            trainable_parameters=_elements(self.trainable_parameters()),
            lora_modules=modules if self.adapters else {},
            whole_parameters=_elements(self.whole),
        )

    def _tensor_name(self, parameter: str, dtypes: Mapping[str, torch.dtype]) -> str:
        name = self.architecture.tensor_name(parameter, self.mixers)
        if name not in dtypes:
            raise RunError(f"{parameter} was trained and the checkpoint has no tensor {name} to take it.")
        return name


def prepare_student(
    architecture: Architecture, model: PreTrainedModel, mixers: Sequence[Mixer], settings: StudentSettings
) -> Student:
    """Make `model` trainable in place: adapters inserted, all but the recurrent layers frozen.

    The trained parameters become float32 and the others keep their dtype: a model that was loaded in less than
    float32 has to run under autocast from here on. The model computes what it did: the adapters begin at zero. The
    global random generator is not used.

    Raises:
        RequestError: see `check_student_settings`.
    """
    plan = _plan(architecture, model, mixers, settings)
    parameters = dict(model.named_parameters())
    whole = {name: parameters[name] for name in plan.whole}
    adapters: tuple[Adapter, ...] = ()
    model.requires_grad_(False)
    if plan.adapted:
        generator = torch.Generator().manual_seed(settings.seed)
        adapters = insert_adapters(model, plan.adapted, settings.rank, settings.alpha, generator)
    for parameter in whole.values():
        parameter.data = parameter.data.to(torch.float32)
        parameter.requires_grad_(True)
    return Student(model, settings, architecture, tuple(mixers), adapters, whole)


def check_student_settings(
    architecture: Architecture, model: PreTrainedModel, mixers: Sequence[Mixer], settings: StudentSettings
) -> None:
    """Refuse what shapes alone show to be impossible; `model` may be on the meta device.

    Raises:
        RequestError: rank or alpha out of range, a rank larger than a projection, a target that the model does
            not have or that no adapter fits, or nothing to train.
    """
    _plan(architecture, model, mixers, settings)


@dataclass(frozen=True, slots=True)
class _Plan:
    """Paths of the modules that get adapters, full names of the parameters that are trained as they are."""

    adapted: tuple[str, ...]
    whole: tuple[str, ...]


def _plan(
    architecture: Architecture, model: PreTrainedModel, mixers: Sequence[Mixer], settings: StudentSettings
) -> _Plan:
    available = architecture.recovery_targets(model, mixers)
    if not available.projections:
        raise RequestError(
            f"this {model.config.model_type} model has no linear-attention layer that recovery could train; run "
            "without recovery."
        )
    if settings.trainable == "mixers":
        _refuse_needless_targets(settings)
        return _Plan((), available.whole + _weights(available.projections))
    _refuse_bad_numbers(settings)
    if settings.targets is None:
        narrow = [path for path in available.per_head if _smaller_side(model, path) < settings.rank]
        adapted = tuple(path for path in available.projections if path not in narrow)
        plan = _Plan(adapted, available.whole + _weights(narrow))
    else:
        _refuse_bad_targets(model, available, settings.targets)
        adapted = tuple(path for path in available.projections if path.rpartition(".")[2] in settings.targets)
        plan = _Plan(adapted, available.whole)
    _refuse_large_rank(model, plan.adapted, settings.rank)
    return plan


def _refuse_needless_targets(settings: StudentSettings) -> None:
    if settings.targets is not None:
        raise RequestError(
            f"recovery targets ({', '.join(settings.targets)}) choose modules for LoRA, and trainable mixers trains "
            "every parameter of the mixers; leave one of the two out."
        )


def _refuse_bad_numbers(settings: StudentSettings) -> None:
    if settings.rank < 1:
        raise RequestError(f"a LoRA rank of {settings.rank} trains nothing; use a whole number of at least 1.")
    if not 0 < settings.alpha < math.inf:
        raise RequestError(f"a LoRA alpha of {settings.alpha:g} is not above 0 and finite; twice the rank is usual.")


def _refuse_bad_targets(model: PreTrainedModel, available: RecoveryTargets, targets: Sequence[str]) -> None:
    """Names that match nothing come first: they are the likelier mistake."""
    allowed = sorted({path.rpartition(".")[2] for path in available.projections})
    if not targets:
        raise RequestError(f"recovery has an empty list of targets; name some of {', '.join(allowed)}, or give none.")
    present = {path.rpartition(".")[2] for path, _ in model.named_modules() if path}
    for name in targets:
        if name not in present:
            nearest = difflib.get_close_matches(name, allowed, n=1)
            hint = f"did you mean {nearest[0]}?" if nearest else f"allowed: {', '.join(allowed)}."
            raise RequestError(f"{name or 'an empty name'} matches no module of this model; {hint}")
    for name in targets:
        if name not in allowed:
            raise RequestError(
                f"recovery cannot train {name} in {model.config.model_type}; allowed: {', '.join(allowed)} (the "
                "mixers' convolutions and norms are trained without being named)."
            )


def _refuse_large_rank(model: PreTrainedModel, paths: Sequence[str], rank: int) -> None:
    for path in paths:
        side = _smaller_side(model, path)
        if rank > side:
            raise RequestError(
                f"a LoRA rank of {rank} is over {side}, the smaller side of {path}; use a rank of at most {side}, "
                "other targets, or trainable mixers."
            )


def _smaller_side(model: PreTrainedModel, path: str) -> int:
    return min(model.get_parameter(f"{path}.weight").shape)


def _weights(paths: Sequence[str]) -> tuple[str, ...]:
    return tuple(f"{path}.weight" for path in paths)


def _elements(parameters: Mapping[str, nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters.values())
