"""Training on a GPU: the stock kernels' backward passes, bfloat16 models, float32 trained tensors."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from transformers import PreTrainedModel

from compressor.architectures.base import Architecture, Mixer
from compressor.architectures.registry import find_architecture
from compressor.checkpoint.config_file import CONFIG_FILE, read_config
from compressor.loading import load_model
from compressor.recovery.log import StepRecord
from compressor.recovery.loop import Batches
from compressor.recovery.settings import TrainingSettings
from compressor.recovery.training import train
from tests.recovery.runs import SETTINGS, text_batch, text_batches
from tests.tiny_models import save_tiny

pytestmark = pytest.mark.gpu

VARIANTS = {
    "gated_deltanet": {"hidden_size": 128, "head_dim": 64},
    "gated_deltaproduct": {"hidden_size": 128, "head_dim": 64},
    "delta_net": {"hidden_size": 128},
    "q35": {"hidden_size": 128, "linear_key_head_dim": 64, "linear_value_head_dim": 64},
}
LONGER = replace(SETTINGS, steps=40, sequence_length=128, learning_rate=2e-3, matching_weight=0.1)


class GpuRun:
    """A bfloat16 teacher, and a student whose mixers are disturbed, in float32 and trained."""

    def __init__(self, name: str, folder: Path, teacher_device: str = "cuda") -> None:
        save_tiny(name, folder, torch.bfloat16, overrides=VARIANTS[name])
        raw_config = read_config(folder / CONFIG_FILE)
        self.architecture: Architecture = find_architecture(raw_config["model_type"])
        self.teacher, self.student = (
            load_model(self.architecture, folder, raw_config, torch.bfloat16, torch.device(device))
            for device in (teacher_device, "cuda:0")
        )
        config = self.architecture.load_config(folder)
        self.mixers: tuple[Mixer, ...] = self.architecture.mixers(config, list(self.student.state_dict()))
        self.trainable = self._disturbed(self.student)

    def _disturbed(self, student: PreTrainedModel) -> dict[str, nn.Parameter]:
        student.requires_grad_(False)
        generator = torch.Generator().manual_seed(0)
        trainable = {}
        for mixer in self.mixers:
            for name, parameter in student.get_submodule(mixer.module).named_parameters():
                noise = torch.randn(parameter.shape, generator=generator).to(parameter.device)
                parameter.data = parameter.data.float() * (1 + 0.3 * noise)
                trainable[f"{mixer.module}.{name}"] = parameter.requires_grad_()
        return trainable

    def train(
        self, work: Path, settings: TrainingSettings, batches: Batches | None = None, stop_after: int = 0
    ) -> list[StepRecord]:
        """Goes on with what is in `work`; Ctrl-C is pressed after step `stop_after`."""
        records: list[StepRecord] = []

        def on_step(record: StepRecord) -> None:
            records.append(record)
            if record.step == stop_after:
                raise KeyboardInterrupt

        train(
            self.student,
            self.trainable,
            self.teacher,
            self.architecture,
            self.mixers,
            text_batches(settings) if batches is None else batches,
            settings,
            work,
            True,
            Accelerator(),
            on_step,
            None,
            run_key="gpu",
            on_note=print,
        )
        return records


@pytest.mark.parametrize("name", list(VARIANTS))
@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_the_student_comes_near_its_teacher(name: str, gradient_checkpointing: bool, tmp_path: Path) -> None:
    run = GpuRun(name, tmp_path / "model")
    settings = replace(LONGER, gradient_checkpointing=gradient_checkpointing)
    records = run.train(tmp_path / "work", settings, lambda first: itertools.repeat(text_batch(0, settings)))
    assert records[-1].kl < 0.5 * records[0].kl
    assert records[-1].matching < records[0].matching
    assert all(parameter.dtype == torch.float32 for parameter in run.trainable.values())


def test_a_teacher_on_another_device(tmp_path: Path) -> None:
    """bfloat16 on both, through the kernels and through plain torch."""
    settings = replace(LONGER, steps=1, sequence_length=32)
    on_gpu, on_cpu = (
        GpuRun("gated_deltanet", tmp_path / device, device).train(tmp_path / f"work-{device}", settings)[0]
        for device in ("cuda", "cpu")
    )
    assert (on_cpu.kl, on_cpu.matching) == pytest.approx((on_gpu.kl, on_gpu.matching), rel=0.1)


@pytest.mark.parametrize("name", list(VARIANTS))
def test_a_resumed_run_ends_near_the_uninterrupted_one(name: str, tmp_path: Path) -> None:
    """Near: kernels may add in another order from run to run. Random generators are left as they were."""
    settings = replace(LONGER, steps=10, checkpoint_every=6)
    whole, stopped, resumed = (GpuRun(name, tmp_path / str(number)) for number in range(3))
    state = torch.cuda.get_rng_state()
    whole.train(tmp_path / "whole", settings)
    assert torch.equal(state, torch.cuda.get_rng_state())
    with pytest.raises(KeyboardInterrupt):
        stopped.train(tmp_path / "work", settings, stop_after=7)
    records = resumed.train(tmp_path / "work", settings)
    assert [record.step for record in records] == [8, 9, 10]
    for key, parameter in resumed.trainable.items():
        assert float((parameter - whole.trainable[key]).detach().abs().max()) < 2 * settings.learning_rate, key
