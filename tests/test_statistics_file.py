"""Files of saved statistics: what they hold, and every one that is not as it was written refused in a sentence."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from compressor.artifacts import CalibrationStatistics
from compressor.errors import RequestError
from compressor.selection.request import Statistic
from compressor.statistics_file import (
    StatisticsIdentity,
    load_statistics,
    refuse_other_statistics,
    save_statistics,
)
from tests.test_pipeline import compress, make_source, make_text
from tests.test_sweep import QUICK

IDENTITY = StatisticsIdentity("tiny", None, 4, 3, 6, (0, 2), "float32", "a" * 64, "b" * 64)
ANEW = "copy it again from where it was saved, or leave --statistics out to calibrate anew."
WROTE = "give a file that --save-statistics wrote."
EVERY: tuple[Statistic, ...] = ("energy", "wanda", "gradient")


def drawn() -> CalibrationStatistics:
    """Of 2 layers of 3 heads of 4 channels that read 6 numbers a token."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"gram": (2, 3, 4, 4), "energy": (2, 3, 4), "input_squares": (2, 6), "gradient": (2, 3, 4)}
    tensors = {
        f"{field}_{stream}": torch.randn(shape, generator=generator, dtype=torch.float64)
        for field, shape in shapes.items()
        for stream in "qk"
    }
    return CalibrationStatistics(layers=(0, 2), tokens=80, **tensors)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "statistics.safetensors"
    assert save_statistics(path, IDENTITY, drawn()) is None
    return path


def rewrite(path: Path, change: Callable[[dict[str, Tensor], dict[str, str]], None]) -> None:
    with safe_open(path, framework="pt") as file:
        metadata = dict(file.metadata())
    tensors = load_file(path)
    change(tensors, metadata)
    save_file(tensors, path, metadata=metadata)


def problem(path: Path, identity: StatisticsIdentity = IDENTITY, needs: tuple[Statistic, ...] = EVERY) -> str:
    """What is said of the file, without its name."""

    def use() -> None:
        refuse_other_statistics(path, identity, needs)
        load_statistics(path)

    with pytest.raises(RequestError) as refused:
        use()
    said = str(refused.value)
    assert said.startswith(f"--statistics {path} ")
    assert "\n" not in said
    return said.removeprefix(f"--statistics {path} ")


def test_statistics_are_read_as_they_were_saved(saved: Path) -> None:
    refuse_other_statistics(saved, IDENTITY, EVERY)
    refuse_other_statistics(saved, replace(IDENTITY, model_sha256=None, tokens_sha256=None), EVERY)
    assert vars(load_statistics(saved)).keys() == vars(drawn()).keys()
    for name, value in vars(drawn()).items():
        torch.testing.assert_close(vars(load_statistics(saved))[name], value, rtol=0, atol=0)
    assert saved.stat().st_size <= IDENTITY.sizes.file_bytes(EVERY)


def test_statistics_have_the_mode_of_new_files(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        save_statistics(tmp_path / "statistics.safetensors", IDENTITY, drawn())
    finally:
        os.umask(before)
    assert (tmp_path / "statistics.safetensors").stat().st_mode & 0o777 == 0o640


def test_files_that_are_no_statistics(saved: Path) -> None:
    whole = saved.read_bytes()
    saved.write_bytes(b"")
    assert problem(saved) == f"cannot be read (it is empty); {WROTE}"
    for content in (b"some", b"text that goes on"):
        saved.write_bytes(content)
        assert problem(saved) == f"cannot be read (it is no safetensors file); {WROTE}"
    for size in (100, len(whole) - 1):
        saved.write_bytes(whole[:size])
        said = problem(saved)
        assert said.startswith(f"is damaged: it is cut short or was changed ({size} bytes; safetensors says: ")
        assert said.endswith(ANEW)
    save_file({"weight": torch.zeros(2)}, saved)
    assert problem(saved) == "is a safetensors file that holds no statistics; give one that --save-statistics wrote."


def test_statistics_of_an_earlier_version(saved: Path) -> None:
    rewrite(saved, lambda _, metadata: metadata.update(schema="1"))
    assert problem(saved) == (
        "was written by another version (schema 1, and this one reads 2); calibrate again with --save-statistics, or "
        "leave --statistics out to calibrate anew."
    )


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda tensors, _: tensors.pop("gram_q"), "it lacks gram_q"),
        (lambda tensors, _: tensors.pop("energy_k"), "it lacks energy_k"),
        (lambda tensors, _: [tensors.pop(f"gram_{stream}") for stream in "qk"], "it lacks gram_q and gram_k"),
        (
            lambda tensors, _: tensors.update(other=torch.zeros(1)),
            "it holds a tensor other, which no statistics have",
        ),
        (
            lambda tensors, _: tensors.update(gram_k=torch.zeros(2, 3, 4, 3, dtype=torch.float64)),
            "its gram_k is F64 [2, 3, 4, 3] instead of F64 [2, 3, 4, 4]",
        ),
        (
            lambda tensors, _: tensors.update(input_squares_q=torch.zeros(2, 6)),
            "its input_squares_q is F32 [2, 6] instead of F64 [2, 6]",
        ),
        (lambda _, metadata: metadata.update(tokens="many"), 'its number of tokens is "many"'),
        (lambda _, metadata: metadata.pop("tokens"), 'its number of tokens is ""'),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_the_header(
    change: Callable[[dict[str, Tensor], dict[str, str]], None], reason: str, saved: Path
) -> None:
    rewrite(saved, change)
    with pytest.raises(RequestError) as refused:
        refuse_other_statistics(saved, IDENTITY, EVERY)
    assert str(refused.value) == f"--statistics {saved} is damaged: {reason}; {ANEW}"


def test_contents_that_were_changed_are_refused(saved: Path) -> None:
    content = bytearray(saved.read_bytes())
    content[-3] ^= 1
    saved.write_bytes(content)
    refuse_other_statistics(saved, IDENTITY, EVERY)
    said = problem(saved)
    assert said.startswith("is damaged: the SHA-256 of its tensors is ")
    assert said.endswith(f'", as it says; {ANEW}')
    content[-3] ^= 1
    saved.write_bytes(content)
    load_statistics(saved)
    rewrite(saved, lambda _, metadata: metadata.update(tokens="81"))
    assert problem(saved).startswith("is damaged: the SHA-256 of its tensors is ")


@pytest.mark.parametrize(
    ("identity", "said"),
    [
        (replace(IDENTITY, key_dim=8), "is of heads with 4 key channels and tiny has 8; leave --statistics out"),
        (replace(IDENTITY, heads=2), "is of layers with 3 key heads and tiny has 2; leave --statistics out"),
        (replace(IDENTITY, layers=(0, 1)), "(of tiny; the positions of its linear layers differ); leave"),
        (replace(IDENTITY, input_width=8), "(of tiny; the width of its hidden states differs); leave"),
        (replace(IDENTITY, model_sha256="c"), "(of tiny; the hash of weights and config differs); leave"),
        (
            replace(IDENTITY, revision="main"),
            "is of tiny at revision none (a folder) and this is tiny at revision main",
        ),
    ],
)
def test_statistics_of_another_model(identity: StatisticsIdentity, said: str, saved: Path) -> None:
    assert said in problem(saved, identity)


def test_damaged_statistics_are_refused_before_anything_is_chosen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Names and shapes before the model is loaded."""
    source, text, file = make_source("gated_deltanet", tmp_path / "source"), make_text(tmp_path), tmp_path / "saved"
    assert compress(source, tmp_path / "first", text, *QUICK, "--save-statistics", str(file)) == 0
    assert file.stat().st_mode & 0o777 == (tmp_path / "first" / "config.json").stat().st_mode & 0o777
    words = [*QUICK, "--statistics", str(file)]
    rewrite(file, lambda tensors, _: tensors["gram_k"].mul_(2))
    assert compress(source, tmp_path / "out", text, *words) == 2
    assert "is damaged: the SHA-256 of its tensors is" in capsys.readouterr().err
    rewrite(file, lambda tensors, _: tensors.update(gram_k=tensors["gram_k"][:, :1].contiguous()))
    assert compress(source, tmp_path / "out", text, *words, "--dry-run") == 2
    assert "its gram_k is F64 [2, 1, 16, 16] instead of F64 [2, 2, 16, 16]" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
