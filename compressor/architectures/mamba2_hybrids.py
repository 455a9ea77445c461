"""Hybrids of Mamba-2 and softmax attention, as transformers lays each of them out (see `mamba2_hybrid_layout`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, final

import transformers
from transformers import PretrainedConfig, PreTrainedModel

from compressor.architectures.base import Mixer
from compressor.architectures.config_fields import Count, Exactly, FieldRule, Number, Numbers, chunk
from compressor.architectures.mamba2_hybrid_layout import Mamba2Hybrid, Scan
from compressor.errors import RequestError


@final
class Bamba(Mamba2Hybrid):
    """Layers of Mamba-2 and of softmax attention, each with an MLP behind it."""

    model_types: ClassVar[tuple[str, ...]] = ("bamba",)
    display_name: ClassVar[str] = "Bamba (transformers)"
    modeling: ClassVar[str] = "transformers.models.bamba.modeling_bamba"
    stack_norm: ClassVar[str] = "BambaRMSNorm"
    mixer_paths: ClassVar[Mapping[str, str]] = {"linear_attention": "mamba"}

    def stock_classes(self) -> tuple[type[PretrainedConfig], type[PreTrainedModel]]:
        from transformers import BambaConfig, BambaForCausalLM

        return BambaConfig, BambaForCausalLM

    def scan(self, config: PretrainedConfig) -> Scan:
        return _expanded_scan(config)


@final
class GraniteMoeHybrid(Mamba2Hybrid):
    """As Bamba, with experts beside a shared MLP, and a factor on all that is added to the residual stream."""

    model_types: ClassVar[tuple[str, ...]] = ("granitemoehybrid",)
    display_name: ClassVar[str] = "Granite 4.0 hybrid (transformers)"
    modeling: ClassVar[str] = "transformers.models.granitemoehybrid.modeling_granitemoehybrid"
    stack_norm: ClassVar[str] = "GraniteMoeHybridRMSNorm"
    mixer_paths: ClassVar[Mapping[str, str]] = {"linear_attention": "mamba"}

    def stock_classes(self) -> tuple[type[PretrainedConfig], type[PreTrainedModel]]:
        from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

        return GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

    def scan(self, config: PretrainedConfig) -> Scan:
        return _expanded_scan(config)

    def residual_block(self, config: PretrainedConfig, mixer: Mixer) -> str | None:
        return None

    def field_rules(self, config: PretrainedConfig) -> tuple[FieldRule, ...]:
        return (
            *super().field_rules(config),
            *(Number(field) for field in ("embedding_multiplier", "residual_multiplier")),
            Number("logits_scaling", positive=True),
            Count("num_experts_per_tok", of="num_local_experts"),
        )

    def logit_factor(self, config: PretrainedConfig) -> float:
        return 1.0 / config.logits_scaling


@final
class NemotronH(Mamba2Hybrid):
    """Every layer is one of Mamba-2, softmax attention, MLP or experts, as `layers_block_type` lists them.

    Published files call the decoder `backbone`, the stock class calls it `model`. Its passes over several tokens raise
    step sizes to `time_step_min`, those over one token behind a cache do not (transformers 5.17 to 5.23).
    """

    model_types: ClassVar[tuple[str, ...]] = ("nemotron_h",)
    display_name: ClassVar[str] = "Nemotron-H (transformers)"
    modeling: ClassVar[str] = "transformers.models.nemotron_h.modeling_nemotron_h"
    stack_norm: ClassVar[str] = "NemotronHRMSNorm"
    block_norm: ClassVar[str] = "norm"
    mixer_paths: ClassVar[Mapping[str, str]] = {"linear_attention": "mixer"}
    published_stack: ClassVar[str] = "backbone.layers."
    state_field: ClassVar[str] = "ssm_state_size"
    chunk_field: ClassVar[str] = "chunk_size"
    epsilon_field: ClassVar[str] = "layer_norm_epsilon"

    def stock_classes(self) -> tuple[type[PretrainedConfig], type[PreTrainedModel]]:
        from transformers import NemotronHConfig, NemotronHForCausalLM

        return NemotronHConfig, NemotronHForCausalLM

    def scan(self, config: PretrainedConfig) -> Scan:
        return Scan(
            num_groups=config.n_groups,
            num_heads=config.mamba_num_heads,
            head_dim=config.mamba_head_dim,
            state_size=config.ssm_state_size,
            inner_width=config.mamba_num_heads * config.mamba_head_dim,
            convolution_size=config.conv_kernel,
        )

    def field_rules(self, config: PretrainedConfig) -> tuple[FieldRule, ...]:
        router = (
            Count("n_group", of="n_routed_experts"),
            Count("topk_group", of="n_group"),
            Count("num_experts_per_tok", of="n_routed_experts"),
        )
        return super().field_rules(config) + (router if "moe" in config.layer_types else ())


@final
class FalconH1(Mamba2Hybrid):
    """Mamba-2 and softmax attention side by side in every layer, their outputs added, each times a factor.

    The rows that `in_proj` gives are multiplied by five factors, of gate, x, B, C and step sizes, whose places the
    stock class finds from the config, and so from the cut width. Scores from weights alone do not see them.
    """

    model_types: ClassVar[tuple[str, ...]] = ("falcon_h1",)
    display_name: ClassVar[str] = "Falcon-H1 (transformers)"
    modeling: ClassVar[str] = "transformers.models.falcon_h1.modeling_falcon_h1"
    stack_norm: ClassVar[str] = "FalconH1RMSNorm"
    mixer_paths: ClassVar[Mapping[str, str]] = {"hybrid": "mamba"}

    def stock_classes(self) -> tuple[type[PretrainedConfig], type[PreTrainedModel]]:
        from transformers import FalconH1Config, FalconH1ForCausalLM

        return FalconH1Config, FalconH1ForCausalLM

    def scan(self, config: PretrainedConfig) -> Scan:
        return _expanded_scan(config, config.mamba_d_ssm)

    def field_rules(self, config: PretrainedConfig) -> tuple[FieldRule, ...]:
        return (
            *super().field_rules(config),
            *(Number(f"{place}_multiplier") for place in _MULTIPLIED),
            Numbers("mlp_multipliers", 2),
            Numbers("ssm_multipliers", 5),
        )

    def refuse_unsupported(self, config: PretrainedConfig, tensor_names: Sequence[str]) -> None:
        refuse_mixed_sequences(config, transformers.__version__)

    def residual_block(self, config: PretrainedConfig, mixer: Mixer) -> str | None:
        return None

    def logit_factor(self, config: PretrainedConfig) -> float:
        factor: float = config.lm_head_multiplier
        return factor


def refuse_mixed_sequences(config: PretrainedConfig, version: str) -> None:
    """`version` of transformers. Its gated norm drops the dimension of the tokens where there is one token.

    Raises:
        RequestError: generation for several sequences would add what belongs to one of them to the others.
    """
    major, minor = (int(part) for part in version.split(".")[:2])
    if config.mamba_rms_norm and (major, minor) < (5, 23):
        raise RequestError(
            f"transformers {version} mixes the sequences of a batch when a Falcon-H1 with mamba_rms_norm generates; "
            "install transformers 5.23."
        )


@final
class Zamba2(Mamba2Hybrid):
    """Mamba-2 layers, some of which first read what a transformer block gives that several of them share.

    The output norm has a fixed epsilon. Passes over several tokens raise step sizes to `time_step_min`, those over one
    token behind a cache do not (transformers 5.17 to 5.23).
    """

    model_types: ClassVar[tuple[str, ...]] = ("zamba2",)
    display_name: ClassVar[str] = "Zamba2 (transformers)"
    modeling: ClassVar[str] = "transformers.models.zamba2.modeling_zamba2"
    stack_norm: ClassVar[str] = "Zamba2RMSNorm"
    mixer_paths: ClassVar[Mapping[str, str]] = {"linear_attention": "mamba", "hybrid": "mamba_decoder.mamba"}
    norm_epsilon_in_config: ClassVar[bool] = False
    fixed_norm_epsilon: ClassVar[float] = 1e-5
    chunk_field: ClassVar[str] = "chunk_size"

    def stock_classes(self) -> tuple[type[PretrainedConfig], type[PreTrainedModel]]:
        from transformers import Zamba2Config, Zamba2ForCausalLM

        return Zamba2Config, Zamba2ForCausalLM

    def scan(self, config: PretrainedConfig) -> Scan:
        return Scan(
            num_groups=config.mamba_ngroups,
            num_heads=config.n_mamba_heads,
            head_dim=config.mamba_headdim,
            state_size=config.mamba_d_state,
            inner_width=int(config.mamba_expand * config.hidden_size),
            convolution_size=config.mamba_d_conv,
        )

    def field_rules(self, config: PretrainedConfig) -> tuple[FieldRule, ...]:
        hybrids = [layer for layer, kind in enumerate(config.layer_types) if kind == "hybrid"]
        return chunk(self.chunk_field), Count("num_mem_blocks"), Exactly("hybrid_layer_ids", hybrids)


_MULTIPLIED = ("embedding", "lm_head", "key", "attention_in", "attention_out", "ssm_in", "ssm_out")
"""What Falcon-H1 has one factor for, each in a field of its own."""


def _expanded_scan(config: PretrainedConfig, inner_width: int | None = None) -> Scan:
    """Of the fields that Bamba and its kin have; `inner_width` None takes it from the hidden size."""
    return Scan(
        num_groups=config.mamba_n_groups,
        num_heads=config.mamba_n_heads,
        head_dim=config.mamba_d_head,
        state_size=config.mamba_d_state,
        inner_width=int(config.mamba_expand * config.hidden_size) if inner_width is None else inner_width,
        convolution_size=config.mamba_d_conv,
    )
