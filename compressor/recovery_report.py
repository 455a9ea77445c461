"""What reports say of recovery."""

from __future__ import annotations

from dataclasses import asdict

from compressor.distilling import Trained, TrainingPlan
from compressor.refitting import Recovered
from compressor.report import LayerRefitReport, RecoveryReport, RefitReport, TrainingReport


def recovery_report(
    recovered: Recovered | None, training: TrainingPlan | None, trained: Trained | None
) -> RecoveryReport | None:
    """None where nothing was done but to choose a norm epsilon."""
    refit = _refit_report(recovered)
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
    return "; ".join(parts)


def _refit_report(recovered: Recovered | None) -> RefitReport | None:
    if recovered is None or recovered.chosen.refit is None:
        return None
    chosen = recovered.chosen.refit
    return RefitReport(
        kept=not chosen.kept_old,
        tokens=recovered.fit_tokens,
        held_out_tokens=recovered.held_out_tokens,
        kl_before=recovered.chosen.kl_before,
        kl_after=recovered.chosen.kl_after,
        kl_by_norm_epsilon={policy: candidate.kl_after for policy, candidate in recovered.candidates.items()},
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
