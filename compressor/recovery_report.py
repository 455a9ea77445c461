"""What reports say of recovery."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from compressor.distilling import Trained, TrainingPlan
from compressor.refitting import Recovered
from compressor.report import CandidateReport, LayerRefitReport, RecoveryReport, RefitReport, TrainingReport


def recovery_report(
    recovered: Recovered | None,
    tried: Sequence[CandidateReport],
    training: TrainingPlan | None,
    trained: Trained | None,
) -> RecoveryReport | None:
    """None where nothing was done but to choose among the cuts `tried`."""
    refit = _refit_report(recovered, tried)
    distilled = None if training is None or trained is None else training_report(training, trained)
    return None if refit is None and distilled is None else RecoveryReport(refit, distilled)


def training_report(training: TrainingPlan, trained: Trained) -> TrainingReport:
    return TrainingReport(
        source=training.source,
        steps=trained.steps,
        tokens=trained.last.tokens,
        resumed_step=trained.resumed_step,
        trainable=training.section.trainable,
        trainable_parameters=trained.summary.trainable_parameters,
        adapters=dict(trained.summary.lora_modules),
        seconds=trained.last.seconds,
        last=asdict(trained.last),
        adapter_folder=training.section.save_adapter,
    )


def recovery_line(recovery: RecoveryReport | None) -> str | None:
    """One line for tables and the model card; None without recovery."""
    if recovery is None:
        return None
    parts = []
    if recovery.refit is not None:
        parts.append(_refit_line(recovery.refit))
    if recovery.training is not None:
        training = recovery.training
        kind = "adapters (LoRA, merged)" if training.trainable == "lora" else "all weights of the mixers"
        parts.append(
            f"{kind} trained on {training.tokens:,} tokens with the original as teacher; last KL "
            f"{training.last['kl']:.4f}"
        )
        if training.adapter_folder is not None:
            parts.append(f"the adapter by itself is in {training.adapter_folder}")
    return "; ".join(parts)


def _refit_report(recovered: Recovered | None, tried: Sequence[CandidateReport]) -> RefitReport | None:
    if recovered is None or recovered.chosen.refit is None:
        return None
    written = next(cut.method for cut in tried if cut.written)
    chosen = recovered.chosen.refit
    return RefitReport(
        kept=not chosen.kept_old,
        tokens=recovered.fit_tokens,
        held_out_tokens=recovered.held_out_tokens,
        kl_before=recovered.chosen.kl_before,
        kl_after=recovered.chosen.kl_after,
        kl_by_norm_epsilon={
            cut.norm_epsilon: cut.kl_after for cut in tried if cut.method == written and cut.kl_after is not None
        },
        layers=[
            LayerRefitReport(layer.layer, layer.ridge, layer.error_before, layer.error_after) for layer in chosen.layers
        ],
    )


def _refit_line(refit: RefitReport) -> str:
    if not refit.kept:
        return "no refit: it would have diverged more from the original"
    changed = sum(layer.ridge is not None for layer in refit.layers)
    return (
        f"{changed} of {len(refit.layers)} output projections refitted in closed form, KL on held-out calibration data "
        f"{refit.kl_before:.4f} to {refit.kl_after:.4f}"
    )
