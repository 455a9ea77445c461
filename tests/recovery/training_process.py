"""A training run in a process of its own, to be killed or to be one of several.

    python -m tests.recovery.training_process MODELS WORK [--resume] [SETTING=VALUE ...]

MODELS is a folder of `tests.recovery.runs.make_folders`. Each finished step is a line on standard output. Every process
leaves its id in WORK.process-INDEX, and the main one at the end what was trained in WORK/weights.safetensors. Where a
setting asks for evaluations, each is a forward pass in inference mode.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import torch
from accelerate import Accelerator
from safetensors.torch import save_file

from compressor.recovery.log import StepRecord
from tests.recovery.runs import SETTINGS, open_run, text_batch, train_run


def print_step(record: StepRecord) -> None:
    print(f"step {record.step}", flush=True)


def main(models: str, work: str, *options: str) -> None:
    changes = dict(option.split("=") for option in options if "=" in option)
    settings = replace(SETTINGS, **{name: json.loads(value) for name, value in changes.items()})
    accelerator = Accelerator(cpu=True)
    Path(f"{work}.process-{accelerator.process_index}").write_text(str(os.getpid()))
    run = open_run(Path(models))

    @torch.inference_mode()
    def evaluate(step: int) -> dict[str, float]:
        logits = run.student.model(input_ids=text_batch(step, settings)).logits
        return {"mean logit": float(logits.mean())}

    train_run(
        run, Path(work), settings, resume="--resume" in options, accelerator=accelerator, on_step=print_step,
        evaluate=evaluate,
    )  # fmt: skip
    if accelerator.is_main_process:
        save_file(run.trained(), Path(work) / "weights.safetensors")
    accelerator.end_training()


if __name__ == "__main__":
    main(*sys.argv[1:])
