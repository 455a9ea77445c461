"""What no memory is left for ends in one sentence, whoever raises it."""

from __future__ import annotations

import pytest
import torch

from compressor import cli
from compressor.out_of_memory import is_out_of_memory, told

MORE_THAN_ANY_MACHINE = 1 << 50


def allocate(words: list[str]) -> int:
    torch.empty(MORE_THAN_ANY_MACHINE)
    return 0


def fail(words: list[str]) -> int:
    raise RuntimeError("illegal memory access")


def test_a_command_says_so_in_one_sentence(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "_inspect", allocate)
    assert cli.main(["inspect", "model"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("compress: error: out of memory (")
    assert said.count("\n") == 1
    assert "--batch-size" in said


def test_debug_and_other_errors_show_where(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "_inspect", allocate)
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        cli.main(["inspect", "model", "--debug"])
    monkeypatch.setattr(cli, "_inspect", fail)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        cli.main(["inspect", "model"])


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
)
def test_every_library_is_understood(error: Exception) -> None:
    assert is_out_of_memory(error)
    assert "smaller --batch-size" in told(error)


@pytest.mark.parametrize("error", [ValueError("out of memory"), RuntimeError("no kernel image is available")])
def test_others_are_not_taken_for_it(error: Exception) -> None:
    assert not is_out_of_memory(error)
