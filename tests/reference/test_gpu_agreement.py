"""The reference on a CPU against fla's kernels on a GPU: logits of the trained models.

Prompts above 64 tokens take the chunked kernels, shorter ones and single tokens the recurrent ones
(Qwen3.5: single tokens only). In float32 the kernels are exact only with TRITON_F32_DEFAULT=ieee,
which must be in the environment before they are compiled.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime.autotuner import Autotuner

from compressor.reference.backend import enable_for_fla, enable_for_transformers
from compressor.reference.recurrence import chunked_gated_delta_rule, recurrent_gated_delta_rule
from tests.reference.formulas import relative_error

pytestmark = pytest.mark.gpu

MODELS = ["gdn-tiny", "gdn-28m", "deltanet-14m", "deltaproduct-14m", "qwen35-18m"]
REFUSING_FLOAT32 = {"deltanet-14m", "deltaproduct-14m"}
TOLERANCE = {torch.bfloat16: 1e-2, torch.float32: 1e-4}
EXACT = pytest.mark.skipif(os.environ.get("TRITON_F32_DEFAULT") != "ieee", reason="TRITON_F32_DEFAULT is not ieee")
DTYPES = [torch.bfloat16, pytest.param(torch.float32, marks=EXACT)]
CHUNKED = [
    *((name, torch.bfloat16) for name in MODELS),
    # fla's chunked delta rule and delta product refuse float32.
    *(pytest.param(name, torch.float32, marks=EXACT) for name in MODELS if name not in REFUSING_FLOAT32),
]


@pytest.fixture(autouse=True)
def few_tile_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tile shape is seconds of compilation, and agreement must not depend on which one is fastest."""
    prune = Autotuner.prune_configs
    monkeypatch.setattr(Autotuner, "prune_configs", lambda self, arguments: prune(self, arguments)[:2])


@pytest.fixture(autouse=True)
def exact_matrix_products() -> Iterator[None]:
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield
    torch.set_float32_matmul_precision(precision)


def load(folder: Path, dtype: torch.dtype, device: str) -> Any:
    enable_for_fla()
    enable_for_transformers("transformers.models.qwen3_5.modeling_qwen3_5")
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()


def read_tokens(folder: Path, text: Path, shape: tuple[int, int]) -> Tensor:
    from tokenizers import Tokenizer

    count = shape[0] * shape[1]
    encoded = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text.read_text(encoding="utf-8")[: 8 * count])
    return torch.tensor(encoded.ids[:count]).view(shape)


def one_pass(model: Any, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
    mask = None if mask is None else mask.to(model.device)
    with torch.no_grad():
        return model(tokens.to(model.device), attention_mask=mask, use_cache=False).logits.float().cpu()


def prompt_then_single_tokens(model: Any, tokens: Tensor, prompt: int) -> Tensor:
    tokens = tokens.to(model.device)
    with torch.no_grad():
        outputs = model(tokens[:, :prompt], use_cache=True)
        parts = [outputs.logits]
        for t in range(prompt, tokens.shape[1]):
            outputs = model(tokens[:, t : t + 1], past_key_values=outputs.past_key_values, use_cache=True)
            parts.append(outputs.logits)
    return torch.cat(parts, dim=1).float().cpu()


@pytest.mark.parametrize(("name", "dtype"), CHUNKED)
def test_chunked_logits(name, dtype, shared_models, shared_text):
    folder = shared_models / name
    tokens = read_tokens(folder, shared_text / "test_prose.txt", (2, 500))
    expected = one_pass(load(folder, dtype, "cuda"), tokens)
    assert relative_error(one_pass(load(folder, dtype, "cpu"), tokens), expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MODELS)
def test_recurrent_logits(name, dtype, shared_models, shared_text):
    folder = shared_models / name
    tokens = read_tokens(folder, shared_text / "test_prose.txt", (2, 96))
    expected = prompt_then_single_tokens(load(folder, dtype, "cuda"), tokens, prompt=64)
    actual = prompt_then_single_tokens(load(folder, dtype, "cpu"), tokens, prompt=64)
    assert relative_error(actual, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("name", MODELS)
def test_padded_logits(name, shared_models, shared_text):
    folder = shared_models / name
    tokens = read_tokens(folder, shared_text / "test_prose.txt", (2, 200))
    mask = torch.ones_like(tokens)
    mask[1, :73] = 0
    expected = one_pass(load(folder, torch.bfloat16, "cuda"), tokens, mask)
    actual = one_pass(load(folder, torch.bfloat16, "cpu"), tokens, mask)
    seen = mask.bool()
    assert relative_error(actual[seen], expected[seen]) < TOLERANCE[torch.bfloat16]


def draw_recurrence(value_heads: int, dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    return {
        "q": normal(2, 200, 2, 64),
        "k": normal(2, 200, 2, 64),
        "v": normal(2, 200, value_heads, 64),
        "g": -normal(2, 200, value_heads).float().exp(),
        "beta": torch.sigmoid(normal(2, 200, value_heads)),
        "initial_state": torch.randn(2, value_heads, 64, 64, generator=generator),
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value_heads", [2, 6])
@pytest.mark.parametrize(
    ("kernel", "reference"),
    [
        ("chunk_gated_delta_rule", chunked_gated_delta_rule),
        ("fused_recurrent_gated_delta_rule", recurrent_gated_delta_rule),
    ],
)
def test_recurrences_with_grouped_heads_and_initial_state(kernel, reference, value_heads, dtype):
    enable_for_fla()
    import fla.ops.gated_delta_rule as gated_delta_rule

    inputs = draw_recurrence(value_heads, dtype)
    on_gpu = {name: tensor.cuda() for name, tensor in inputs.items()}
    with torch.no_grad():
        expected, expected_state = vars(gated_delta_rule)[kernel](
            **on_gpu, use_qk_l2norm_in_kernel=True, output_final_state=True
        )
        output, state = reference(**inputs, use_qk_l2norm=True)
    assert relative_error(output, expected.cpu()) < TOLERANCE[dtype]
    assert relative_error(state, expected_state.cpu()) < TOLERANCE[dtype]


def test_gpu_tensors_still_reach_the_kernels(shared_models, shared_text):
    folder = shared_models / "gdn-tiny"
    tokens = read_tokens(folder, shared_text / "test_prose.txt", (1, 200))
    model = load(folder, torch.bfloat16, "cuda")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        one_pass(model, tokens)
        torch.cuda.synchronize()
    launched = " ".join(event.key for event in profile.key_averages())
    for kernel in ("causal_conv1d_fwd_kernel", "layer_norm_fwd_kernel", "chunk_gated_delta_rule_fwd_kernel_h"):
        assert kernel in launched
