"""Which tensors of a folder a refit or a training has changed: all others are the original's slices."""

from __future__ import annotations

from collections.abc import Sequence, Set
from pathlib import Path

from compressor.architectures.base import Architecture
from compressor.checkpoint.config_file import CONFIG_FILE, read_config
from compressor.checkpoint.headers import read_headers
from compressor.loading import build_skeleton


def refitted_tensors(architecture: Architecture, folder: Path, layers: Set[int] | None = None) -> frozenset[str]:
    """Names, in the files of `folder`, of the output projections of `layers`; None stands for every layer with one."""
    mixers = architecture.mixers(architecture.load_config(folder), list(read_headers(folder).entries))
    return frozenset(
        architecture.output_projection_tensor(mixer) for mixer in mixers if layers is None or mixer.layer in layers
    )


def trained_tensors(architecture: Architecture, folder: Path, targets: Sequence[str] | None) -> frozenset[str]:
    """Names, in the files of `folder`, of what a training has changed, from the model without its weights.

    `targets` are the last names of the modules that got an adapter. None is for a training of all projections: whole,
    or by adapters on all but those that are narrower than the rank, which are then trained whole.
    """
    skeleton = build_skeleton(architecture, folder, read_config(folder / CONFIG_FILE))
    mixers = architecture.mixers(skeleton.config, list(read_headers(folder).entries))
    available = architecture.recovery_targets(skeleton, mixers)
    adapted = [path for path in available.projections if targets is None or path.rpartition(".")[2] in targets]
    trained = [*(f"{path}.weight" for path in adapted), *available.whole]
    return frozenset(architecture.tensor_name(parameter, mixers) for parameter in trained)
