"""The bundled trained model and its texts; their licences are in `NOTICE.md` beside this file.

They are ordinary files of the installed package: a wheel is unpacked when it is installed, so each resource has a path
that outlives the call. Imports from a zip archive are not supported, since model loaders open paths.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path


def demo_model_path() -> Path:
    """Folder of the bundled Gated DeltaNet checkpoint: config, bf16 safetensors, tokenizer.

    4 layers of 3 heads, key and value width 64, 3.5 million parameters, vocabulary 8192.
    """
    return _resource("model")


def calibration_text_path() -> Path:
    """Public-domain prose for calibration, 150 kB; every document is followed by `<|endoftext|>`."""
    return _resource("calibration.txt")


def held_out_text_path() -> Path:
    """Public-domain prose for evaluation, 78 kB, of which neither training nor calibration saw a passage."""
    return _resource("held_out.txt")


def _resource(name: str) -> Path:
    return Path(str(files("compressor.demo") / name))
