"""The reference behind the signatures of the recurrences in transformers' modeling_qwen3_5 and its kin.

Their layers hand on whatever keyword arguments the model was called with; those that do not concern
the recurrence are dropped here, as transformers drops them before it calls a kernel.
"""

from __future__ import annotations

from torch import Tensor

from compressor.errors import RunError
from compressor.reference.recurrence import chunked_gated_delta_rule, recurrent_gated_delta_rule


def torch_chunk_gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    seq_idx: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, Tensor | None]:
    """Many tokens: query, key [B, T, H, K], value [B, T, HV, V], state [B, HV, K, V].

    Raises:
        RunError: packed sequences, which the convolution before it would not have kept apart.
    """
    if cu_seqlens is not None or seq_idx is not None:
        raise RunError(
            "the model got packed sequences (cu_seq_lens_q or seq_idx) on the CPU, where only padded batches are "
            "computed: pad the batch and give an attention mask, or run on a GPU."
        )
    output, state = chunked_gated_delta_rule(
        query, key, value, g, beta, initial_state=initial_state, use_qk_l2norm=use_qk_l2norm_in_kernel
    )
    return output, state if output_final_state else None


def torch_recurrent_gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **_: object,
) -> tuple[Tensor, Tensor | None]:
    """One token a sequence, after a prompt; shapes as in `torch_chunk_gated_delta_rule`."""
    output, state = recurrent_gated_delta_rule(
        query, key, value, g, beta, initial_state=initial_state, use_qk_l2norm=use_qk_l2norm_in_kernel
    )
    return output, state if output_final_state else None
