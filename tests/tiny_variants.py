"""The tiny checkpoints by name: `VARIANTS`. See tests/tiny_models.py, which builds them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Variant:
    """Stock config class, stock model class (both by import path) and the config fields of one tiny model."""

    config_class: str
    model_class: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    published_names: bool = True
    """Whether `save_tiny` writes the names of published files, where the stock class has others of its own."""


_FLA = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_heads": 2,
    "intermediate_size": 48,
    "initializer_range": 0.2,
}
_GATED_DELTANET = _FLA | {"head_dim": 16, "expand_v": 1.0}
_QWEN_LINEAR = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 48,
    "initializer_range": 0.2,
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 12,
}
_QWEN_WITH_EXPERTS = {key: value for key, value in _QWEN_LINEAR.items() if key != "intermediate_size"} | _EXPERTS
_OLMO_HYBRID = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "intermediate_size": 48,
    "initializer_range": 0.2,
    "pad_token_id": None,
    "eos_token_id": None,
}
_MAMBA2 = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_heads": 4,
    "head_dim": 16,
    "state_size": 16,
    "n_groups": 2,
    "num_hidden_layers": 2,
    "initializer_range": 0.2,
}
_MAMBA2_HYBRID = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 48,
    "initializer_range": 0.2,
}
_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
    "patch_size": 4,
}


def _gated_deltanet(**fields: Any) -> Variant:
    return Variant("fla.models:GatedDeltaNetConfig", "fla.models:GatedDeltaNetForCausalLM", _GATED_DELTANET | fields)


def _gated_deltaproduct(**fields: Any) -> Variant:
    """Two keys a token, eigenvalues in [-1, 1] and a forget gate, as trained models have."""
    common = _GATED_DELTANET | {"num_householder": 2, "allow_neg_eigval": True, "use_forget_gate": True}
    return Variant("fla.models:GatedDeltaProductConfig", "fla.models:GatedDeltaProductForCausalLM", common | fields)


def _delta_net(**fields: Any) -> Variant:
    return Variant("fla.models:DeltaNetConfig", "fla.models:DeltaNetForCausalLM", _FLA | fields)


def _olmo_hybrid(published_names: bool, **fields: Any) -> Variant:
    return Variant(
        "transformers:OlmoHybridConfig",
        "transformers:OlmoHybridForCausalLM",
        _OLMO_HYBRID | fields,
        published_names,
    )


def _mamba2(**fields: Any) -> Variant:
    return Variant(
        "transformers.models.mamba2.configuration_mamba2:Mamba2Config",
        "transformers.models.mamba2.modeling_mamba2:Mamba2ForCausalLM",
        _MAMBA2 | fields,
    )


def _fla_mamba2(**fields: Any) -> Variant:
    return Variant("fla.models:Mamba2Config", "fla.models:Mamba2ForCausalLM", _MAMBA2 | fields)


VARIANTS: dict[str, Variant] = {
    "gated_deltanet": _gated_deltanet(),
    "gated_deltanet_grouped": _gated_deltanet(num_v_heads=4),
    "gated_deltanet_wide_values": _gated_deltanet(expand_v=2.0),
    "gated_deltanet_no_short_conv": _gated_deltanet(use_short_conv=False),
    "gated_deltanet_no_gate": _gated_deltanet(use_gate=False),
    "gated_deltanet_tied": _gated_deltanet(tie_word_embeddings=True),
    "gated_deltanet_negative_eigenvalues": _gated_deltanet(allow_neg_eigval=True),
    "gated_deltanet_hybrid": _gated_deltanet(num_hidden_layers=3, attn={"layers": [1], "num_heads": 2}),
    "delta_net": _delta_net(),
    "delta_net_sum_norm": _delta_net(qk_norm="sum", qk_activation="elu"),
    "delta_net_relu": _delta_net(qk_activation="relu"),
    "delta_net_elu": _delta_net(qk_activation="elu"),
    "delta_net_identity": _delta_net(qk_activation="identity"),
    "delta_net_gate": _delta_net(use_gate=True),
    "delta_net_no_beta": _delta_net(use_beta=False),
    "delta_net_no_short_conv": _delta_net(use_short_conv=False),
    "delta_net_tied": _delta_net(tie_word_embeddings=True),
    "gated_deltaproduct": _gated_deltaproduct(),
    "gated_deltaproduct_one_key": _gated_deltaproduct(num_householder=1, allow_neg_eigval=False),
    "gated_deltaproduct_three_keys": _gated_deltaproduct(num_householder=3, expand_v=2.0),
    "gated_deltaproduct_no_gates": _gated_deltaproduct(use_output_gate=False, use_forget_gate=False),
    "gated_deltaproduct_no_short_conv": _gated_deltaproduct(use_short_conv=False),
    "gated_deltaproduct_tied": _gated_deltaproduct(tie_word_embeddings=True),
    "gated_deltaproduct_hybrid": _gated_deltaproduct(num_hidden_layers=3, attn={"layers": [1], "num_heads": 2}),
    "kda": Variant(
        "fla.models:KDAConfig", "fla.models:KDAForCausalLM", _GATED_DELTANET | {"num_v_heads": 4, "expand_v": 1.25}
    ),
    "q35": Variant("transformers:Qwen3_5TextConfig", "transformers:Qwen3_5ForCausalLM", _QWEN_LINEAR),
    "qw": Variant(
        "transformers:Qwen3_5Config",
        "transformers:Qwen3_5ForConditionalGeneration",
        {
            "text_config": _QWEN_LINEAR | {"tie_word_embeddings": True},
            "vision_config": _VISION,
            "tie_word_embeddings": True,
        },
    ),
    "qn": Variant(
        "transformers:Qwen3NextConfig", "transformers:Qwen3NextForCausalLM", _QWEN_LINEAR | {"num_experts": 0}
    ),
    "qn_tied": Variant(
        "transformers:Qwen3NextConfig",
        "transformers:Qwen3NextForCausalLM",
        _QWEN_LINEAR | {"num_experts": 0, "linear_value_head_dim": 24, "tie_word_embeddings": True},
    ),
    "qn_experts": Variant(
        "transformers:Qwen3NextConfig",
        "transformers:Qwen3NextForCausalLM",
        _QWEN_LINEAR | _EXPERTS | {"mlp_only_layers": [1]},
    ),
    "q35_experts": Variant(
        "transformers:Qwen3_5MoeTextConfig", "transformers:Qwen3_5MoeForCausalLM", _QWEN_WITH_EXPERTS
    ),
    "qw_experts": Variant(
        "transformers:Qwen3_5MoeConfig",
        "transformers:Qwen3_5MoeForConditionalGeneration",
        {
            "text_config": _QWEN_WITH_EXPERTS | {"tie_word_embeddings": True},
            "vision_config": _VISION,
            "tie_word_embeddings": True,
        },
    ),
    "oh": _olmo_hybrid(published_names=False, linear_num_value_heads=4, linear_value_head_dim=24),
    "oh_parts": _olmo_hybrid(published_names=True, linear_num_value_heads=2, linear_value_head_dim=16),
    "nh": Variant(
        "transformers:NemotronHConfig",
        "transformers:NemotronHForCausalLM",
        {
            "vocab_size": 64,
            "hidden_size": 32,
            "layers_block_type": ["linear_attention", "mlp", "linear_attention", "full_attention"],
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "ssm_state_size": 16,
            "n_groups": 2,
            "intermediate_size": 48,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "chunk_size": 32,
            "time_step_min": 1e-6,
            "initializer_range": 0.2,
        },
    ),
    "m2": _mamba2(),
    "m2_one_group": _mamba2(n_groups=1),
    "m2_tied": _mamba2(tie_word_embeddings=True),
    "m2_no_conv_bias": _mamba2(use_conv_bias=False),
    "m2_biases": _mamba2(use_bias=True, residual_in_fp32=False),
    "m2_fla": _fla_mamba2(),
    "m2_fla_one_group": _fla_mamba2(n_groups=1, norm_before_gate=True),
    "m2_fla_no_norm": _fla_mamba2(rmsnorm=False, D_has_hdim=True, use_conv_bias=False),
    "m2_fla_tied": _fla_mamba2(tie_word_embeddings=True),
    "bamba": Variant(
        "transformers:BambaConfig", "transformers:BambaForCausalLM", _MAMBA2_HYBRID | {"attn_layer_indices": [1]}
    ),
    "granite": Variant(
        "transformers:GraniteMoeHybridConfig",
        "transformers:GraniteMoeHybridForCausalLM",
        _MAMBA2_HYBRID
        | {
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "num_local_experts": 0,
            "shared_intermediate_size": 12,
            "residual_multiplier": 0.5,
        },
    ),
    "falcon_h1": Variant(
        "transformers:FalconH1Config",
        "transformers:FalconH1ForCausalLM",
        _MAMBA2_HYBRID
        | {
            "num_hidden_layers": 2,
            "mamba_d_ssm": 64,
            "mamba_rms_norm": True,
            "ssm_multipliers": [0.8, 1.25, 0.5, 1.5, 0.7],
            "ssm_in_multiplier": 1.2,
            "ssm_out_multiplier": 0.6,
        },
    ),
    "zamba2": Variant(
        "transformers:Zamba2Config",
        "transformers:Zamba2ForCausalLM",
        {
            "vocab_size": 64,
            "hidden_size": 32,
            "num_hidden_layers": 4,
            "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
            "n_mamba_heads": 4,
            "mamba_d_state": 16,
            "mamba_ngroups": 2,
            "chunk_size": 32,
            "num_attention_heads": 2,
            "intermediate_size": 48,
            "adapter_rank": 4,
            "use_mem_rope": True,
            "time_step_min": 1e-6,
            "initializer_range": 0.2,
        },
    ),
}
