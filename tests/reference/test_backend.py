from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from compressor.errors import RequestError, RunError
from compressor.reference.backend import enable_for_fla, enable_for_transformers
from compressor.reference.dispatch import DeviceSwitch, on_cpu

ROOT = Path(__file__).parents[2]


def entry_points() -> list[object]:
    import fla.layers.attn
    import fla.layers.delta_net
    import fla.layers.gated_deltanet
    from transformers.models.qwen3_5 import modeling_qwen3_5

    return [
        fla.layers.attn.flash_attn_func,
        fla.layers.attn.flash_attn_varlen_func,
        fla.layers.delta_net.chunk_delta_rule,
        fla.layers.delta_net.fused_recurrent_delta_rule,
        fla.layers.gated_deltanet.fused_recurrent_gated_delta_rule,
        modeling_qwen3_5.torch_chunk_gated_delta_rule,
        modeling_qwen3_5.torch_recurrent_gated_delta_rule,
        modeling_qwen3_5.causal_conv1d_fn,
        modeling_qwen3_5.causal_conv1d_update,
    ]


def test_enabling_twice_is_enabling_once():
    enable_for_fla()
    enable_for_transformers("transformers.models.qwen3_5.modeling_qwen3_5")
    first = entry_points()
    enable_for_fla()
    enable_for_transformers("transformers.models.qwen3_5.modeling_qwen3_5")
    for before, after in zip(first, entry_points(), strict=True):
        assert before is after
        assert isinstance(after, DeviceSwitch)
        assert not isinstance(after.kernel, DeviceSwitch)


def test_only_cpu_tensors_reach_the_reference():
    elsewhere = torch.empty(2, device="meta")
    assert on_cpu(torch.zeros(2), None, 3, name=torch.zeros(1)) == (True, None)
    assert on_cpu(torch.zeros(2), x=elsewhere) == (False, "the reference computes CPU tensors only, and one is on meta")

    switch = DeviceSwitch(reference=lambda x, y: "reference", kernel=lambda x, y: "kernel")
    assert switch(torch.zeros(2), y=torch.zeros(2)) == "reference"
    assert switch(torch.zeros(2), y=elsewhere) == "kernel"
    assert switch(elsewhere, torch.zeros(2)) == "kernel"


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the kernel would be launched on no memory")
def test_dispatched_kernels_keep_their_tensors(fla_on_cpu):
    """fla's own kernel is what is called for a tensor elsewhere: here it dies for want of a GPU."""
    from fla.modules.norm.layernorm import layer_norm_fwd

    x, weight = torch.ones(2, 4), torch.ones(4)
    assert torch.equal(layer_norm_fwd(x, weight, None, eps=0.0, is_rms_norm=True)[0], x)
    with pytest.raises(RuntimeError, match="0 active drivers"):
        layer_norm_fwd(x.to("meta"), weight.to("meta"), None, is_rms_norm=True)


@pytest.mark.skipif(find_spec("flash_attn") is not None, reason="flash-attn is installed")
def test_softmax_attention_elsewhere_asks_for_flash_attn(fla_on_cpu):
    import fla.layers.attn

    q = torch.empty(1, 2, 1, 8, device="meta")
    for name in ("flash_attn_func", "flash_attn_varlen_func"):
        with pytest.raises(
            RunError, match=r"on meta, which needs flash-attn.*: install it with `pip install flash-attn"
        ):
            vars(fla.layers.attn)[name](q, q, q, causal=True)


def test_disabled_dispatch_is_refused(monkeypatch):
    monkeypatch.setenv("FLA_DISABLE_BACKEND_DISPATCH", "1")
    with pytest.raises(RequestError, match=r"FLA_DISABLE_BACKEND_DISPATCH is 1, which keeps fla from .*: unset"):
        enable_for_fla()


def test_what_the_recurrence_cannot_compute_is_refused(fla_on_cpu):
    from fla.layers.gated_deltanet import fused_recurrent_gated_delta_rule

    x = torch.zeros(1, 2, 1, 4)
    with pytest.raises(ValueError, match="gk and gv must be None"):
        fused_recurrent_gated_delta_rule(x, x, x, gk=x)
    with pytest.raises(ValueError, match="a gate computed in the kernel needs both g and A_log"):
        fused_recurrent_gated_delta_rule(x, x, x, g=x[..., 0], use_gate_in_kernel=True)


def test_import_warns_of_nothing_and_waits_until_it_is_asked_for():
    script = (
        "import sys, warnings\n"
        "warnings.simplefilter('error', UserWarning)\n"
        "from compressor.reference.backend import enable_for_fla\n"
        "assert 'fla' not in sys.modules and 'transformers' not in sys.modules\n"
        "enable_for_fla()\n"
        "assert 'fla' in sys.modules\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    child = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=False)
    assert child.returncode == 0, child.stderr
    assert "Triton is not supported" not in child.stderr
