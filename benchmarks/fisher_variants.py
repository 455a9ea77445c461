"""Settings of progressive Fisher selection that benchmarks.fisher compares."""

from __future__ import annotations

from dataclasses import dataclass

from compressor.fisher.settings import FisherSettings

LEARNED = "learned"
"""What masks trained by gradient descent are called beside the variants."""


@dataclass(frozen=True, slots=True)
class Variant:
    """Settings, and whether the search begins with the channels of drrqr instead of all."""

    settings: FisherSettings
    from_drrqr: bool = False


VARIANTS: dict[str, Variant] = {
    "fisher": Variant(FisherSettings()),
    "stages-2": Variant(FisherSettings(stages=2)),
    "stages-4": Variant(FisherSettings(stages=4)),
    "stages-16": Variant(FisherSettings(stages=16)),
    "stages-16-halves": Variant(FisherSettings(stages=16, stage_share=0.5)),
    "stages-32-quarters": Variant(FisherSettings(stages=32, stage_share=0.25)),
    "segment-16": Variant(FisherSettings(segment=16)),
    "segment-32": Variant(FisherSettings(segment=32)),
    "segment-512": Variant(FisherSettings(segment=512)),
    "sequences": Variant(FisherSettings(segment=0)),
    "half-sequences": Variant(FisherSettings(sequence_share=0.5)),
    "shrink-0.25": Variant(FisherSettings(shrinkage=0.25)),
    "shrink-0.5": Variant(FisherSettings(shrinkage=0.5)),
    "diagonal": Variant(FisherSettings(shrinkage=1.0)),
    "linear-0": Variant(FisherSettings(linear_weight=0.0)),
    "linear-0.25": Variant(FisherSettings(linear_weight=0.25)),
    "linear-0.75": Variant(FisherSettings(linear_weight=0.75)),
    "linear-1": Variant(FisherSettings(linear_weight=1.0)),
    "linear-reversed": Variant(FisherSettings(linear_weight=-0.5)),
    "stage-scale": Variant(FisherSettings(scale_schedule="stage")),
    "layer": Variant(FisherSettings(scope="layer")),
    "swaps-8": Variant(FisherSettings(swaps=8)),
    "measured": Variant(FisherSettings(measured_rounds=2)),
    # These three cost 57, 57 and 58.5 forward passes where no layer is computed anew.
    "stages-4-measured": Variant(FisherSettings(stages=4, measured_rounds=3, measured_tries=2)),
    "stages-6-measured": Variant(FisherSettings(stages=6, measured_rounds=2, measured_tries=2)),
    "half-stages-measured": Variant(FisherSettings(stage_share=0.5, measured_rounds=3, measured_tries=2)),
    "drrqr-measured": Variant(FisherSettings(measured_rounds=4), from_drrqr=True),
    "halves-measured": Variant(FisherSettings(stages=16, stage_share=0.5, measured_rounds=2)),
    "layer-halves-measured": Variant(FisherSettings(stages=16, stage_share=0.5, measured_rounds=2, scope="layer")),
    "layer-segment-32": Variant(FisherSettings(scope="layer", segment=32)),
    "layer-half-sequences": Variant(FisherSettings(scope="layer", sequence_share=0.5)),
    "linear-0-half-sequences": Variant(FisherSettings(linear_weight=0.0, sequence_share=0.5)),
    "layer-shrink-0.5": Variant(FisherSettings(scope="layer", shrinkage=0.5)),
    "tangent": Variant(FisherSettings(removal="tangent")),
    "tangent-linear-0": Variant(FisherSettings(removal="tangent", linear_weight=0.0)),
    "tangent-linear-0.25": Variant(FisherSettings(removal="tangent", linear_weight=0.25)),
    "arc": Variant(FisherSettings(removal="arc")),
    "arc-linear-0": Variant(FisherSettings(removal="arc", linear_weight=0.0)),
    "layer-linear-0": Variant(FisherSettings(scope="layer", linear_weight=0.0)),
    "linear-0-stages-16-halves": Variant(FisherSettings(linear_weight=0.0, stages=16, stage_share=0.5)),
    "linear-0-measured": Variant(FisherSettings(linear_weight=0.0, measured_rounds=2)),
}
