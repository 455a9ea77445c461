from __future__ import annotations

import json
import os
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import Qwen3_5ForCausalLM

from compressor.errors import RequestError, RunError
from compressor.export.sizes import parse_size
from compressor.export.weights import OutputTensor, plan_shards, write_weights
from tests.tiny_models import read_weights, save_tiny

ROOT = Path(__file__).resolve().parents[2]


def listing(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def output(name: str, tensor: torch.Tensor) -> OutputTensor:
    return OutputTensor(name, tensor.dtype, tuple(tensor.shape), lambda: tensor)


def sized(name: str, num_bytes: int) -> OutputTensor:
    return output(name, torch.full((num_bytes,), len(name), dtype=torch.uint8))


@pytest.fixture
def umask() -> object:
    before = os.umask(0o027)
    yield
    os.umask(before)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("5GB", 5_000_000_000),
        ("500MB", 500_000_000),
        ("2GiB", 2_147_483_648),
        ("1.5 kB", 1500),
        ("0.1KiB", 102),
        ("2tb", 2_000_000_000_000),
        ("1000000", 1_000_000),
        (" 7B ", 7),
        ("9007199254740993", 9007199254740993),
        ("1.000000001GB", 1_000_000_001),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "GB", "5 GBs", "-5GB", "0", "0.4", "1e9", "nan", "inf", "5G", "5,0GB", "\u0665GB", "5GB\n5GB", "0x10"]
)
def test_nonsense_sizes(text: str) -> None:
    with pytest.raises(RequestError) as error:
        parse_size(text)
    assert str(error.value) == (
        f"size {text!r} is not a number of bytes of at least 1; write it as 500MB, 5GB, 2GiB or 1000000."
    )


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([3, 3, 4], [[3, 3, 4]]),
        ([3, 3, 4, 1], [[3, 3, 4], [1]]),
        ([20, 3], [[20], [3]]),
        ([3, 20, 3], [[3], [20], [3]]),
        ([10, 10], [[10], [10]]),
        ([0, 10, 0], [[0, 10, 0]]),
        ([], []),
    ],
)
def test_shards_keep_the_order_and_the_limit(sizes: list[int], expected: list[list[int]]) -> None:
    tensors = [sized(f"t{number}", size) for number, size in enumerate(sizes)]
    shards = plan_shards(tensors, 10)
    assert [[tensor.num_bytes for tensor in shard] for shard in shards] == expected
    assert [tensor for shard in shards for tensor in shard] == tensors


def test_one_shard_is_one_file_without_an_index(tmp_path: Path) -> None:
    tensor = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    written = write_weights([output("a", tensor)], tmp_path, 1000, None)
    assert written.files == ("model.safetensors",)
    assert written.index is None
    assert listing(tmp_path) == ["model.safetensors"]
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert torch.equal(file.get_tensor("a"), tensor)


def test_several_shards_get_an_index(tmp_path: Path) -> None:
    tensors = {
        "z": torch.randn(4, 4, generator=torch.Generator().manual_seed(0)),
        "a": torch.ones(5, dtype=torch.bfloat16),
        "m": torch.tensor(3, dtype=torch.int64),
        "é": torch.zeros(0, 7),
    }
    advanced: list[int] = []
    written = write_weights([output(*item) for item in tensors.items()], tmp_path, 70, advanced.append)
    assert written.files == ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    assert listing(tmp_path) == [*written.files, "model.safetensors.index.json"]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text(encoding="utf-8"))
    first, second = written.files
    assert list(index["weight_map"].items()) == [("z", first), ("a", second), ("m", second), ("é", second)]
    assert index["metadata"] == {"total_parameters": 22, "total_size": 82}
    assert (written.total_size, written.total_parameters) == (82, 22)
    assert sum(advanced) == 82
    loaded = load_file(tmp_path / first) | load_file(tmp_path / second)
    assert loaded.keys() == tensors.keys()
    assert all(
        torch.equal(loaded[name], tensor) and loaded[name].dtype == tensor.dtype for name, tensor in tensors.items()
    )
    for name in written.files:
        with safe_open(tmp_path / name, "pt") as file:
            assert file.metadata() == {"format": "pt"}


def test_stock_transformers_loads_the_shards(tmp_path: Path) -> None:
    source = save_tiny("q35", tmp_path / "source")
    tensors = read_weights(source)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_bytes((source / "config.json").read_bytes())
    written = write_weights([output(*item) for item in tensors.items()], tmp_path / "out", 20_000, None)
    assert len(written.files) > 2
    model, report = Qwen3_5ForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report.values())
    state = model.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in tensors.items())


def test_views_and_shared_memory_are_written_whole(tmp_path: Path) -> None:
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    parameter = torch.nn.Parameter(base.clone())
    views = {
        "t": base.T,
        "rows": base[1:3],
        "columns": base[:, ::2],
        "same": base,
        "again": base,
        "parameter": parameter,
    }
    write_weights([output(*item) for item in views.items()], tmp_path, 10_000, None)
    loaded = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(loaded[name], view) for name, view in views.items())


def test_files_have_the_mode_of_new_files(tmp_path: Path, umask: object) -> None:
    write_weights([sized("a", 8), sized("b", 8)], tmp_path, 8, None)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert len(modes) == 3
    assert set(modes.values()) == {0o640}


@pytest.mark.parametrize(
    "loaded",
    [torch.zeros(3, dtype=torch.float32), torch.zeros(2, dtype=torch.float64), torch.zeros(2, 1, dtype=torch.float32)],
)
def test_a_tensor_that_is_not_what_was_promised(tmp_path: Path, loaded: torch.Tensor) -> None:
    promise = OutputTensor("layers.0.weight", torch.float32, (2,), lambda: loaded)
    with pytest.raises(RunError) as error:
        write_weights([promise], tmp_path, 1000, None)
    assert str(error.value) == (
        f"tensor layers.0.weight is {loaded.dtype} of shape {tuple(loaded.shape)} where torch.float32 of shape (2,) "
        "was planned; the checkpoint changed during the run: run again from the start."
    )


def test_no_tensors_and_repeated_names(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no tensor to write"):
        write_weights([], tmp_path, 1000, None)
    with pytest.raises(RunError, match="tensor a was planned twice"):
        write_weights([sized("a", 1), sized("b", 1), sized("a", 1)], tmp_path, 1000, None)
    assert listing(tmp_path) == []


def test_one_shard_of_tensors_lives_at_a_time(tmp_path: Path) -> None:
    alive = 0
    most = 0

    def loader(size: int) -> Callable[[], torch.Tensor]:
        def load() -> torch.Tensor:
            nonlocal alive, most
            tensor = torch.zeros(size, dtype=torch.uint8)
            alive += size
            most = max(most, alive)

            def gone() -> None:
                nonlocal alive
                alive -= size

            weakref.finalize(tensor.untyped_storage(), gone)
            return tensor

        return load

    tensors = [OutputTensor(f"t{number}", torch.uint8, (30,), loader(30)) for number in range(20)]
    written = write_weights(tensors, tmp_path, 100, None)
    assert len(written.files) == 7
    assert most == 90


def test_resident_memory_does_not_grow_with_the_number_of_shards(tmp_path: Path) -> None:
    """Ten shards of 20 MB, each loaded as a view of twice its size."""
    code = """
import resource, sys
from pathlib import Path
import torch
from compressor.export.weights import OutputTensor, write_weights
side = 20_000_000
load = lambda: torch.ones(2 * side, dtype=torch.uint8)[side:]
folder = Path(sys.argv[1])
write_weights([OutputTensor("warm", torch.uint8, (1,), lambda: torch.ones(1, dtype=torch.uint8))], folder, 10, None)
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
write_weights([OutputTensor(f"t{n}", torch.uint8, (side,), load) for n in range(10)], folder, side, None)
print((peak() - before) / side)
"""
    child = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    # The view's own memory is two shards' worth, its copy one.
    assert float(child.stdout) < 3.5
