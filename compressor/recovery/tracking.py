"""Figures of a run in an experiment tracker, through accelerate's own: trackio, wandb, tensorboard and others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from accelerate import Accelerator

from compressor.errors import RequestError

_PROJECT = "recovery"


@contextmanager
def tracked(accelerator: Accelerator, tracker: str | None, config: Mapping[str, object]) -> Iterator[None]:
    """Inside, `accelerator.log` reaches `tracker`, which the accelerator was made with; None begins none.

    `config` is stored with the run. The trackers are finished at the end, also after an exception.

    Raises:
        RequestError: it is not installed, or not the accelerator's.
    """
    if tracker is None:
        yield
        return
    accelerator.init_trackers(_PROJECT, config={name: value for name, value in config.items() if value is not None})
    try:
        names = [started.name for started in accelerator.trackers]
        if tracker not in names:
            raise RequestError(
                f"the tracker {tracker} is not among those that accelerate could start ({', '.join(names) or 'none'}); "
                f"pip install {tracker}, or run without a tracker."
            )
        yield
    finally:
        for started in accelerator.trackers:
            started.finish()
        accelerator.trackers = []
