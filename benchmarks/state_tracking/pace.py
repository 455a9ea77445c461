"""Which lengths and which share of the learning rate each step of a training has."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

STEPS_BETWEEN_LOOKS = 10
"""Steps whose mean accuracy decides; looking at it waits for the GPU."""
PASSED = 0.9
"""Mean accuracy from which the next length of a curriculum begins."""
SOLVED = 0.98
"""Mean accuracy at the longest length from which the learning rate falls."""


@dataclass(frozen=True)
class TrainingSettings:
    """Lengths are uniform on shortest .. longest; the learning rate warms up linearly and falls to 0 as a cosine.

    curriculum: ascending lengths below `longest` that are trained at first, each until it is passed or has had its
        equal share of the steps, in batches of as many tokens as the last ones have. While a model errs at early
        positions, later ones teach it nothing.
    cooldown: instead of the cosine, the rate stays until the task is solved, `time_limit_s` is over, or that many
        steps are left; then it falls linearly in that many steps, after which training ends.
    """

    steps: int
    batch_size: int
    shortest: int
    longest: int
    learning_rate: float
    weight_decay: float
    warmup: float = 0.05
    gradient_norm: float = 1.0
    curriculum: tuple[int, ...] = ()
    cooldown: int | None = None
    time_limit_s: float | None = None


class Pace:
    """Steps are counted from 0. `stages` are (length, first step) so far."""

    def __init__(self, settings: TrainingSettings) -> None:
        self._settings = settings
        self._lengths = (*settings.curriculum, settings.longest)
        self._recent: list[Tensor] = []
        self._cooling_from = settings.steps if settings.cooldown is None else settings.steps - settings.cooldown
        self.stages = [(self._lengths[0], 0)]

    @property
    def longest(self) -> int:
        return self.stages[-1][0]

    @property
    def shortest(self) -> int:
        return min(self._settings.shortest, self.longest)

    @property
    def batch_size(self) -> int:
        """As many tokens as a batch of the last stage has."""
        return self._settings.batch_size * self._settings.longest // self.longest

    def learning_rate_factor(self, step: int) -> float:
        """Share of the full learning rate."""
        settings = self._settings
        warmup_steps = max(1, round(settings.warmup * settings.steps))
        if settings.cooldown is not None and step >= self._cooling_from:
            return max(0.0, 1 - (step - self._cooling_from) / settings.cooldown)
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        if settings.cooldown is not None:
            return 1.0
        progress = (step - warmup_steps) / max(1, settings.steps - warmup_steps)
        return 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))

    def record(self, step: int, accuracy: Tensor, seconds: float) -> None:
        """Take note of the accuracy of a step's batch, a scalar on any device, `seconds` after the start."""
        self._recent.append(accuracy)
        if len(self._recent) < STEPS_BETWEEN_LOOKS:
            return
        mean = float(torch.stack(self._recent).mean())
        self._recent = []
        if self.longest < self._lengths[-1]:
            share = self._settings.steps // len(self._lengths)
            if mean >= PASSED or step + 1 - self.stages[-1][1] >= share:
                self.stages.append((self._lengths[len(self.stages)], step + 1))
        elif mean >= SOLVED:
            self._cool_down(step + 1)
        limit = self._settings.time_limit_s
        if limit is not None and seconds >= limit:
            self._cool_down(step + 1)

    def _cool_down(self, step: int) -> None:
        if self._settings.cooldown is not None:
            self._cooling_from = min(self._cooling_from, step)

    def is_over(self, step: int) -> bool:
        """Whether there is no such step."""
        cooldown = self._settings.cooldown or 0
        return step >= min(self._settings.steps, self._cooling_from + cooldown)
