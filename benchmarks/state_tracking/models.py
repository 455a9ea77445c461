"""Stock fla models small enough to train in a minute, and where their recurrences are reached."""

from __future__ import annotations

import math
import warnings
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from compressor.architectures.base import Mixer, RecurrenceTap
from compressor.architectures.interception import EntryPoint, intercept
from compressor.errors import RequestError
from compressor.reference.backend import enable_for_fla, import_fla

Family = Literal["delta_net", "gated_deltaproduct"]
FAMILIES: tuple[Family, ...] = ("delta_net", "gated_deltaproduct")
MAX_DEPTH, MAX_HOUSEHOLDER = 10, 4

_ENTRY_POINTS = {
    "delta_net": (
        EntryPoint("fla.layers.delta_net", "chunk_delta_rule"),
        EntryPoint("fla.layers.delta_net", "fused_recurrent_delta_rule"),
    ),
    "gated_deltaproduct": (
        EntryPoint("fla.layers.gated_deltaproduct", "chunk_gated_delta_product"),
        EntryPoint("fla.layers.gated_deltaproduct", "fused_recurrent_gated_delta_rule"),
    ),
}


@dataclass(frozen=True)
class ModelSettings:
    """Defaults are those of the published word problems (arXiv:2502.10297): no short convolution and no gates.

    initial_beta: mean of the first layer's betas before training; None leaves fla's, the middle of their range. At 1 a
        step erases what it should carry on, near 2 it is a reflection that loses nothing: groups are learned from
        there in a tenth of the steps.

    Raises:
        RequestError: a combination that no stock class has, or a beta outside its range.
    """

    family: Family
    num_householder: int = 1
    depth: int = 1
    negative_eigenvalues: bool = True
    hidden_size: int = 128
    num_heads: int = 8
    head_dim: int = 32
    short_convolution: bool = False
    forget_gate: bool = False
    output_gate: bool = False
    initial_beta: float | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.num_householder <= MAX_HOUSEHOLDER or not 1 <= self.depth <= MAX_DEPTH:
            raise RequestError(
                f"{self.num_householder} Householder steps at depth {self.depth} are not supported; "
                f"give 1 to {MAX_HOUSEHOLDER} and 1 to {MAX_DEPTH}."
            )
        if self.family == "delta_net" and (self.num_householder > 1 or self.forget_gate):
            raise RequestError(
                "delta_net has one Householder step a token and no forget gate; use --family gated_deltaproduct."
            )
        if self.initial_beta is not None and not 0 < self.initial_beta < self.largest_beta:
            raise RequestError(
                f"an initial beta of {self.initial_beta:g} is not between 0 and {self.largest_beta:g}, the range with "
                f"negative eigenvalues {'on' if self.negative_eigenvalues else 'off'}; give one inside."
            )

    @property
    def largest_beta(self) -> float:
        return 2.0 if self.negative_eigenvalues else 1.0

    @property
    def label(self) -> str:
        eigenvalues = "[-1, 1]" if self.negative_eigenvalues else "[0, 1]"
        return f"{self.family} n_h={self.num_householder} depth={self.depth} {eigenvalues}"


def build_model(settings: ModelSettings, vocab_size: int, seed: int, device: torch.device) -> PreTrainedModel:
    """A freshly drawn stock model; the global random state is as before. Logits are [B, T, vocab_size]."""
    if device.type == "cpu":
        enable_for_fla()
    else:
        import_fla()
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="ShortConvolution is crucial", category=UserWarning)
        torch.manual_seed(seed)
        model = _stock_model(settings, vocab_size)
        if settings.initial_beta is not None:
            _start_betas_at(settings.initial_beta / settings.largest_beta, model, settings)
        return model.to(device)


def _stock_model(settings: ModelSettings, vocab_size: int) -> Any:
    from fla.models import (
        DeltaNetConfig,
        DeltaNetForCausalLM,
        GatedDeltaProductConfig,
        GatedDeltaProductForCausalLM,
    )

    shared: dict[str, Any] = {
        "hidden_size": settings.hidden_size,
        "num_hidden_layers": settings.depth,
        "num_heads": settings.num_heads,
        "allow_neg_eigval": settings.negative_eigenvalues,
        "use_short_conv": settings.short_convolution,
        "vocab_size": vocab_size,
        "bos_token_id": None,
        "eos_token_id": None,
        "fuse_cross_entropy": False,
    }
    if settings.family == "delta_net":
        expansion = settings.num_heads * settings.head_dim / settings.hidden_size
        config = DeltaNetConfig(expand_k=expansion, expand_v=expansion, use_gate=settings.output_gate, **shared)
        return DeltaNetForCausalLM(config)
    config = GatedDeltaProductConfig(
        head_dim=settings.head_dim,
        expand_v=1.0,
        num_householder=settings.num_householder,
        use_forget_gate=settings.forget_gate,
        use_output_gate=settings.output_gate,
        **shared,
    )
    return GatedDeltaProductForCausalLM(config)


@torch.no_grad()
def _start_betas_at(share: float, model: PreTrainedModel, settings: ModelSettings) -> None:
    """Make sigmoid(b) of the first layer about `share` for every token, head and step.

    The projection b_proj has no bias. So all embeddings get one direction in common, which is then half of the energy
    of what the normalised layer reads, and every row of b_proj reads that direction.
    """
    logit = math.log(share / (1 - share))
    embeddings: Tensor = model.get_parameter("model.embeddings.weight")
    direction = torch.randn(settings.hidden_size).sign()
    embeddings.add_(embeddings.std() * direction)
    mixer_modules(model, settings)[0].b_proj.weight.add_(logit * math.sqrt(2) / settings.hidden_size * direction)


def mixer_modules(model: nn.Module, settings: ModelSettings) -> list[Any]:
    """The stock mixers, one a layer."""
    return [model.get_submodule(f"model.layers.{layer}.attn") for layer in range(settings.depth)]


def tapped(model: nn.Module, settings: ModelSettings, tap: RecurrenceTap) -> AbstractContextManager[None]:
    """While active, what enters and leaves every recurrence goes through `tap`.

    Keys are [B, T n_h, heads, head_dim] after their activation and before normalisation.
    """
    mixers = [
        Mixer(
            layer=layer,
            module=f"model.layers.{layer}.attn",
            tensors=f"model.layers.{layer}.attn",
            num_k_heads=settings.num_heads,
            num_v_heads=settings.num_heads,
            head_k_dim=settings.head_dim,
            head_v_dim=settings.head_dim,
            convolution_width=0,
            convolution_size=0,
        )
        for layer in range(settings.depth)
    ]
    return intercept(model, mixers, _ENTRY_POINTS[settings.family], tap)
