"""Files of calibration sums: what cannot be used reads as absent, with the reason."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from compressor.artifacts import CalibrationProgress, ProgressFile


def progress() -> CalibrationProgress:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    return CalibrationProgress(3, draw(2, 2, 2, 4, 4), torch.full((2, 2), 9), draw(2, 2, 2, 4), draw(2, 2, 8))


def test_sums_are_read_as_they_were_written(tmp_path: Path) -> None:
    file = ProgressFile(tmp_path / "sums.safetensors", "key")
    assert file.load() == (None, None)
    file.save(progress())
    loaded, problem = file.load()
    assert problem is None
    assert loaded is not None
    assert loaded.batches == 3
    torch.testing.assert_close(loaded.tensors(), progress().tensors(), rtol=0, atol=0)


def test_sums_of_another_request_are_not_used(tmp_path: Path) -> None:
    path = tmp_path / "sums.safetensors"
    ProgressFile(path, "key").save(progress())
    assert ProgressFile(path, "other").load() == (
        None,
        f"{path} belongs to another model, seed or calibration (hash differs): not used",
    )


def test_sums_that_were_not_asked_for_are_not_written(tmp_path: Path) -> None:
    """Such is also a file of a version that knew Gram matrices alone."""
    path = tmp_path / "sums.safetensors"
    made = progress()
    ProgressFile(path, "key").save(CalibrationProgress(made.batches, made.grams, made.tokens))
    assert load_file(path).keys() == {"grams", "tokens"}
    loaded, problem = ProgressFile(path, "key").load()
    assert problem is None
    assert loaded is not None
    assert (loaded.energies, loaded.input_squares) == (None, None)


def test_a_file_that_lacks_a_tensor_reads_as_absent(tmp_path: Path) -> None:
    path = tmp_path / "sums.safetensors"
    ProgressFile(path, "key").save(progress())
    tensors = load_file(path)
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    del tensors["grams"]
    save_file(tensors, path, metadata=metadata)
    loaded, problem = ProgressFile(path, "key").load()
    assert loaded is None
    assert problem is not None
    assert problem.startswith(f"{path} cannot be read (")
    assert problem.endswith("): calibrating again")
