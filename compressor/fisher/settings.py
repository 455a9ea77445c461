"""What progressive Fisher selection may be asked for."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Literal

from compressor.errors import RequestError

Scope = Literal["head", "layer"]
ScaleSchedule = Literal["exported", "stage"]
Removal = Literal["tangent", "chord", "arc"]


@dataclass(frozen=True, slots=True)
class FisherSettings:
    """Raises RequestError for values that mean nothing.

    Attributes:
        stages: gradient and Fisher matrix are taken anew this many times; each removes the same share of channels.
        stage_share: share of the batches that one stage sees; the stages take turns. Text and prompts must be
            spread evenly over the batches.
        segment: tokens whose gradients make one sample of the Fisher matrix; 0 for whole sequences. Short ones give
            many samples, and leave out what a mask does to a token together with what it did in another segment.
        sequence_share: share of the Fisher matrix that is of whole sequences, which leave nothing out.
        shrinkage: share by which entries beside the diagonal are shrunk, see `selection.fisher.shrunk`.
        linear_weight: factor of the gradient to the mask s of a kept channel (see `masks`). At 0.5 removals are
            those of the model that is quadratic in sqrt(s); at 1, in s, which trusts the gradient over a longer way and
            chooses worse; at 0 the Fisher matrix alone decides.
        scope: whether heads of a layer are seen together. Their number of channels stays the same in any case.
        scale_schedule: whether intermediate stages have the output scale that is exported, or that of their width.
        removal: how far removing a channel is thought to move the normalised key or query of a token: along the
            gradient of its mask, or as far as it does, which is further where the channel holds much of it (`masks`).
        swaps: exchanges of each problem after the removals of a stage, by the model.
        measured_rounds: rounds of exchanges at the final width, each of which keeps what lowers the measured KL most.
        measured_tries: measurements a round: of at most `swaps` (0: a quarter of the width) exchanges a problem, of a
            quarter of that, and so on.
        gradient_checkpointing: compute a layer's activations anew in each backward pass instead of keeping them; None:
            where keeping them would take more than half of the free memory.
    """

    stages: int = 8
    stage_share: float = 1.0
    segment: int = 128
    sequence_share: float = 0.0
    shrinkage: float = 0.0
    linear_weight: float = 0.5
    scope: Scope = "head"
    scale_schedule: ScaleSchedule = "exported"
    removal: Removal = "chord"
    swaps: int = 0
    measured_rounds: int = 0
    measured_tries: int = 3
    gradient_checkpointing: bool | None = None

    def __post_init__(self) -> None:
        leasts = {"stages": 1, "segment": 0, "swaps": 0, "measured_rounds": 0, "measured_tries": 1}
        values = asdict(self)
        for name, least in leasts.items():
            if values[name] < least:
                raise RequestError(f"{name} is {values[name]} and must be at least {least}; give a larger number.")
        for name in ("sequence_share", "shrinkage"):
            if not 0 <= values[name] <= 1:
                raise RequestError(f"{name} is {values[name]} and must lie in [0, 1]; give a share.")
        if not 0 < self.stage_share <= 1:
            raise RequestError(f"stage_share is {self.stage_share} and must lie in (0, 1]; 1 shows all to every stage.")
        if not math.isfinite(self.linear_weight):
            raise RequestError(f"linear_weight is {self.linear_weight} and must be finite; 0.5 is the default.")

    def scale_width(self, keep: int, width: int) -> int:
        """The width whose scale a model of `width` on its way to `keep` is looked at with."""
        return keep if self.scale_schedule == "exported" else width
