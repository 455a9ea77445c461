"""Mamba-2 as transformers lays it out, and as flash-linear-attention does (Dao and Gu 2024, arXiv 2405.21060).

Both write `model_type` mamba2, the same class name and the same tensor names; the fields of their configs differ.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, ClassVar, final

from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from compressor.architectures.base import Mixer, RecurrenceTap
from compressor.architectures.interception import Function
from compressor.architectures.mamba2_layout import Mamba2Layout
from compressor.architectures.scan_interception import ScanFunctions, intercept_scans, intercept_transformers_scans
from compressor.errors import RequestError
from compressor.reference.backend import import_fla
from compressor.reference.mamba2_backend import enable_for_fla_mamba2, enable_for_mamba2

_TRANSFORMERS_MODELING = "transformers.models.mamba2.modeling_mamba2"
_FLA_SCANS = ScanFunctions("fla.layers.mamba2", "mamba_chunk_scan_combined", "selective_state_update")


@final
class Mamba2(Mamba2Layout):
    """The stock classes are named by their modules: after `import fla` the Auto classes give fla's."""

    model_types: ClassVar[tuple[str, ...]] = ("mamba2",)
    display_name: ClassVar[str] = "Mamba-2 (transformers)"
    load_line: ClassVar[str] = ""
    needs_fla: ClassVar[bool] = False
    epsilon_field: ClassVar[str] = "layer_norm_epsilon"
    limits_field: ClassVar[str] = "time_step_limit"
    loading_note: ClassVar[str] = (
        "It was written for transformers' own Mamba-2. Load it where `fla` (flash-linear-attention) is not imported: "
        "`import fla` gives the name `mamba2` in the Auto classes to fla's class, which reads other config fields. "
        "`transformers.Mamba2ForCausalLM.from_pretrained` is right in both cases."
    )

    def import_stock_classes(self) -> None:
        """transformers registers its own classes."""

    def enable_cpu_backend(self) -> None:
        enable_for_mamba2(_TRANSFORMERS_MODELING)

    def load_config(self, folder: Path) -> PretrainedConfig:
        from transformers.models.mamba2.configuration_mamba2 import Mamba2Config

        config: PretrainedConfig = Mamba2Config.from_pretrained(folder, local_files_only=True)
        return config

    def model_class(self, raw_config: Mapping[str, Any]) -> type[PreTrainedModel]:
        from transformers.models.mamba2.modeling_mamba2 import Mamba2ForCausalLM

        return Mamba2ForCausalLM

    def tapped(
        self, model: PreTrainedModel, mixers: Sequence[Mixer], tap: RecurrenceTap
    ) -> AbstractContextManager[None]:
        return intercept_transformers_scans(model, mixers, _TRANSFORMERS_MODELING, tap)


@final
class FlaMamba2(Mamba2Layout):
    model_types: ClassVar[tuple[str, ...]] = ("mamba2",)
    display_name: ClassVar[str] = "Mamba-2 (fla)"
    load_line: ClassVar[str] = "import fla"
    needs_fla: ClassVar[bool] = True
    epsilon_field: ClassVar[str] = "norm_eps"
    limits_field: ClassVar[str] = "dt_limit"
    loading_note: ClassVar[str] = (
        "It was written for fla's Mamba-2: without `import fla` the Auto classes take transformers' class of the same "
        "name, which reads other config fields. In bfloat16 or float16, call `model.to(model.dtype)` behind the lines "
        "above: with `residual_in_fp32`, the default, fla 0.6 loads norms in float32, and its layers cannot run so."
    )

    def import_stock_classes(self) -> None:
        import_fla()

    def enable_cpu_backend(self) -> None:
        enable_for_fla_mamba2()

    def load_config(self, folder: Path) -> PretrainedConfig:
        self.import_stock_classes()
        from fla.models import Mamba2Config

        config: PretrainedConfig = Mamba2Config.from_pretrained(folder, local_files_only=True)
        return config

    def model_class(self, raw_config: Mapping[str, Any]) -> type[PreTrainedModel]:
        self.import_stock_classes()
        from fla.models import Mamba2ForCausalLM

        return Mamba2ForCausalLM

    @contextmanager
    def tapped(self, model: PreTrainedModel, mixers: Sequence[Mixer], tap: RecurrenceTap) -> Iterator[None]:
        """See the base class.

        Raises:
            RequestError: the model is on a GPU without mamba_ssm, where fla's layer calls no function that can be seen.
        """
        layers = importlib.import_module(_FLA_SCANS.module)
        if model.device.type == "cuda" and not vars(layers)["is_fast_path_available"]:
            raise RequestError(
                "fla's Mamba-2 on a GPU needs mamba_ssm to be calibrated: install it with `pip install mamba-ssm "
                "--no-build-isolation`, or use --device cpu."
            )
        layer_class = vars(layers)["Mamba2"]
        stock = vars(layer_class)["cuda_kernels_forward"]
        with intercept_scans(model, mixers, _FLA_SCANS, tap, {}):
            layer_class.cuda_kernels_forward = _unfused(stock)
            try:
                yield
            finally:
                layer_class.cuda_kernels_forward = stock


def _unfused(stock: Function) -> Function:
    """With a cache asked for, fla's layer takes no fused path in training; without one, what it makes is dropped."""

    def cuda_kernels_forward(
        layer: nn.Module,
        hidden_states: Tensor,
        last_state: dict[str, Any] | None = None,
        use_cache: bool = False,
        attention_mask: Tensor | None = None,
    ) -> Any:
        return stock(layer, hidden_states, last_state, True, attention_mask)

    return cuda_kernels_forward
