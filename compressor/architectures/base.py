"""What every model family answers about itself, and nothing about how pruning works.

Notation used for tensor shapes:
    H_k  key/query heads of one mixer        d_k  key/query channels of one head
    H_v  value heads (a multiple of H_k)     d_v  value channels of one head
    B    sequences in a batch                T    tokens of a sequence
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from compressor.architectures.config_fields import FieldRule
from compressor.errors import RequestError

Stream = Literal["query", "key"]
_MAX_CHANNELS = 1_000_000


@dataclass(frozen=True)
class Mixer:
    """One linear-attention layer of a checkpoint.

    `module` is its dotted path in the stock class, `tensors` the prefix of its tensor names in the
    files. `convolution_width` counts all channels of its short convolutions, 0 without one.
    `keys_per_token` is n_h of DeltaProduct, whose state takes that many updates a token.
    `renamed` are parameters that the files hold by another name, or at None in parts, both below the layer's block.
    """

    layer: int
    module: str
    tensors: str
    num_k_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int
    convolution_width: int
    convolution_size: int
    keys_per_token: int = 1
    renamed: tuple[tuple[str, str | None], ...] = ()

    def __post_init__(self) -> None:
        """Raises RequestError where the config's numbers make no mixer."""
        for name in ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim", "keys_per_token"):
            value = vars(self)[name]
            if type(value) is not int or value < 1:
                raise RequestError(
                    f"config.json gives layer {self.layer} {name} = {value!r}; it must be a whole number of at least 1."
                )
        widest = max(
            self.keys_per_token * self.num_k_heads * self.head_k_dim,
            self.num_v_heads * max(self.head_k_dim, self.head_v_dim),
        )
        if widest > _MAX_CHANNELS:
            raise RequestError(
                f"config.json gives layer {self.layer} {widest} channels of all its heads (num_k_heads = "
                f"{self.num_k_heads}, num_v_heads = {self.num_v_heads}, head_k_dim = {self.head_k_dim}, head_v_dim = "
                f"{self.head_v_dim}, keys_per_token = {self.keys_per_token}), more than {_MAX_CHANNELS}; use "
                "the config.json that belongs to these weights."
            )
        if self.num_v_heads % self.num_k_heads:
            raise RequestError(
                f"config.json gives layer {self.layer} {self.num_v_heads} value heads for {self.num_k_heads} key "
                "heads; each key head must serve as many value heads as the others."
            )

    @property
    def state_elements(self) -> int:
        """Elements of the recurrent state of one sequence: H_v * d_v * d_k."""
        return self.num_v_heads * self.head_v_dim * self.head_k_dim


@dataclass(frozen=True)
class ChannelMap:
    """Which slices along `dim` of one tensor belong to which key or query channel.

    `rows` is int64 [H_k, d_k, copies]: one channel can own several slices of a tensor.
    `is_projection` marks the weights that produce the channel, which weight-based scores read;
    convolutions and biases only follow the choice. `slices` is how many the tensor must have along
    `dim`, for one that the stock loader puts together with others and so takes at any size.
    """

    tensor: str
    stream: Stream
    rows: Tensor
    is_projection: bool
    dim: int = 0
    slices: int | None = None


@dataclass(frozen=True, slots=True)
class RecoveryTargets:
    """What recovery may train of a model's linear-attention layers; softmax layers have no part in it.

    Attributes:
        projections: paths of the linear modules, each of which the stock layer calls as a module: a kernel that read
            the weight itself would pass an adapter by.
        per_head: those of the projections that give one or two numbers a head, as gates do: few low ranks fit them.
        whole: full names of the parameters beside the projections' weights: convolutions, the output norm, decays,
            biases, and the norm in front of the mixer.
    """

    projections: tuple[str, ...]
    per_head: tuple[str, ...]
    whole: tuple[str, ...]


class RecurrenceTap:
    """Sees, and may replace, what enters and leaves the recurrence of every mixer.

    The base class changes nothing. `query` and `key` arrive after convolution and activation and
    before any normalisation, as [B, T, H_k, d_k]; a mixer that removes padding itself passes
    [1, tokens, H_k, d_k]. `output` is [B, T, H_v, d_v], before the output norm. With several keys a
    token `on_key` is called once for each: for the first of all tokens, then for the second.
    """

    def on_query(self, layer: int, query: Tensor) -> Tensor:
        return query

    def on_key(self, layer: int, key: Tensor) -> Tensor:
        return key

    def on_output(self, layer: int, output: Tensor) -> Tensor:
        return output


class Architecture(ABC):
    """One model family. Subclasses are final and hold no state.

    `config` is the stock config object (class defaults filled in) and `raw_config` the parsed
    config.json: values are read from the first, cuts are written to a copy of the second, so that
    an exported config differs from its source in the cut fields alone.
    """

    model_types: ClassVar[tuple[str, ...]]
    display_name: ClassVar[str]
    output_projection_name: ClassVar[str]
    """Of the linear module behind the recurrence, in the mixer."""
    load_line: ClassVar[str]
    """The import that a plain script needs before it can load a checkpoint of this family."""
    needs_fla: ClassVar[bool]
    kernels_take_float32: ClassVar[bool]
    """Whether the GPU kernels accept float32 activations."""
    scales_by_width: ClassVar[bool] = True
    """Whether the recurrence multiplies queries by head_k_dim**-0.5, so that a cut changes the size of its outputs."""
    normalizes_keys: ClassVar[bool] = True
    """Whether each token's queries and keys are divided by their L2 norms, so that channels share a length of one."""
    norm_epsilon_in_config: ClassVar[bool] = True
    """Whether the output norm's epsilon is a field of config.json, so that an export can scale it."""
    loading_note: ClassVar[str] = ""
    """What the model card says about loading beside the import, one or more sentences of Markdown."""

    @abstractmethod
    def import_stock_classes(self) -> None:
        """Import what registers the stock classes with transformers."""

    @abstractmethod
    def enable_cpu_backend(self) -> None:
        """Let the stock classes run on CPU tensors although GPU-only kernels are importable."""

    @abstractmethod
    def load_config(self, folder: Path) -> PretrainedConfig: ...

    @abstractmethod
    def model_class(self, raw_config: Mapping[str, Any]) -> type[PreTrainedModel]:
        """The stock class that the config names, or the family's causal language model."""

    @abstractmethod
    def mixers(self, config: PretrainedConfig, tensor_names: Sequence[str]) -> tuple[Mixer, ...]:
        """All linear-attention layers, in order; empty when the config has none."""

    @abstractmethod
    def channel_maps(self, mixer: Mixer) -> tuple[ChannelMap, ...]:
        """Every tensor of the mixer that may carry key/query channels; absent ones are skipped."""

    def field_rules(self, config: PretrainedConfig) -> tuple[FieldRule, ...]:
        """What the decoder's config must hold, beside the sizes of a mixer, for its layers to run."""
        return ()

    @abstractmethod
    def refuse_unsupported(self, config: PretrainedConfig, tensor_names: Sequence[str]) -> None:
        """Raise RequestError for members of the family that cannot be cut, with the reason."""

    @abstractmethod
    def cut_config(
        self, raw_config: Mapping[str, Any], config: PretrainedConfig, keep: int, norm_epsilon: float | None
    ) -> dict[str, Any]:
        """A copy of `raw_config` for `keep` key channels a head; `norm_epsilon` None keeps the field.

        Raises:
            RequestError: the config's fields cannot express that width.
        """

    def output_scale(self, head_k_dim: int, keep: int) -> float:
        """What a cut from `head_k_dim` to `keep` channels multiplies every mixer output by, beside what it removes."""
        return math.sqrt(head_k_dim / keep) if self.scales_by_width else 1.0

    @abstractmethod
    def norm_epsilon(self, config: PretrainedConfig) -> float:
        """The epsilon of the mixers' output norm."""

    @abstractmethod
    def norms_sharing_epsilon(self, model: PreTrainedModel) -> dict[str, nn.Module]:
        """The norms, by module path, that read the same field but are not a mixer's output norm."""

    @abstractmethod
    def tapped(
        self, model: PreTrainedModel, mixers: Sequence[Mixer], tap: RecurrenceTap
    ) -> AbstractContextManager[None]:
        """While active, every forward pass of `model` goes through `tap`."""

    def output_projection(self, mixer: Mixer) -> str:
        """Path, in the model, of the linear module from the normed, gated recurrence output to the hidden size."""
        return f"{mixer.module}.{self.output_projection_name}"

    def output_projection_tensor(self, mixer: Mixer) -> str:
        """Name, in the files, of that module's weight."""
        return f"{mixer.tensors}.{self.output_projection_name}.weight"

    def residual_block(self, config: PretrainedConfig, mixer: Mixer) -> str | None:
        """Path of the block that adds the mixer's output to its own first input; None where more is done to it."""
        return mixer.module.rpartition(".")[0]

    @abstractmethod
    def recovery_targets(self, model: PreTrainedModel, mixers: Sequence[Mixer]) -> RecoveryTargets:
        """What of `model`, which holds no adapters yet and may be on the meta device, recovery may train."""

    @abstractmethod
    def tensor_name(self, parameter: str, mixers: Sequence[Mixer]) -> str:
        """Name, in the files, of a parameter of the model that lies in the block of one of `mixers`.

        Raises:
            ValueError: it lies in none of them.
        """

    @abstractmethod
    def decoder(self, model: PreTrainedModel) -> nn.Module:
        """The stack without the language-model head; takes input_ids, attention_mask, use_cache."""

    def logit_factor(self, config: PretrainedConfig) -> float:
        """What the stock class multiplies by what the head gives of the decoder's hidden states."""
        return 1.0


def head_major_rows(num_heads: int, head_dim: int, offset: int = 0, copies: int = 1) -> Tensor:
    """Rows of a projection that lays heads one after the other: int64 [num_heads, head_dim, copies].

    With several copies, those of all heads come before the next ones.
    """
    rows = offset + torch.arange(copies * num_heads * head_dim)
    return rows.reshape(copies, num_heads, head_dim).permute(1, 2, 0)
