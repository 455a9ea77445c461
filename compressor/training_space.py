"""Space on the disk that a training takes: its checkpoints beside the output that they are made into."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from compressor.errors import RequestError
from compressor.export.disk import format_bytes, refuse_too_little_space
from compressor.home_folders import expanded
from compressor.naming import Naming
from compressor.recovery.checkpoints import KEPT, checkpoints_in

# In float32: the tensor and AdamW's two moments of it.
_BYTES_OF_A_TRAINED_PARAMETER = 3 * torch.float32.itemsize


@dataclass(frozen=True, slots=True)
class TrainingSpace:
    """What is written by a training of `trained_parameters`, whose result takes `output_bytes`."""

    trained_parameters: int
    output_bytes: int

    @property
    def checkpoint_bytes(self) -> int:
        """Of one checkpoint."""
        return self.trained_parameters * _BYTES_OF_A_TRAINED_PARAMETER

    def refuse_too_little(self, work: Path, steps: int, checkpoint_every: int) -> None:
        """Ask the file system of `work` for the output and for the checkpoints that will be there at once.

        Those are the ones that are kept and the one being written; the ones that are in `work` already have their room.

        Raises:
            RequestError: less is free.
        """
        count = _further_checkpoints(work, steps, checkpoint_every)
        try:
            refuse_too_little_space(work, self.output_bytes + count * self.checkpoint_bytes)
        except RequestError as error:
            raise RequestError(
                f"the training needs room for {count} further checkpoints of {format_bytes(self.checkpoint_bytes)} "
                f"each and for the output of {format_bytes(self.output_bytes)}: {error}"
            ) from error

    def refuse_too_little_for_adapter(self, save_adapter: str, name: Naming) -> None:
        """Ask the file system that `save_adapter` is on for what was trained, in float32.

        Raises:
            RequestError: less is free.
        """
        try:
            refuse_too_little_space(expanded(save_adapter), self.trained_parameters * torch.float32.itemsize)
        except RequestError as error:
            raise RequestError(f"{name('recovery.save_adapter')}: {error}") from error


def stored_bytes(model: PreTrainedModel) -> int:
    """Of the parameters of `model`, which may be on the meta device, in its config's dtype."""
    dtype = model.config.dtype or model.config.get_text_config(decoder=True).dtype
    # Where none is named too little is asked rather than too much, which would refuse what can be done.
    width = dtype.itemsize if isinstance(dtype, torch.dtype) else torch.bfloat16.itemsize
    return width * sum(parameter.numel() for parameter in model.parameters())


def _further_checkpoints(work: Path, steps: int, every: int) -> int:
    present = checkpoints_in(work)
    finished = int(present[0].name.rpartition("-")[2]) if present else 0
    to_come = -(-steps // every) - finished // every if finished < steps else 0
    return max(0, min(KEPT + 1, len(present) + to_come) - len(present))
