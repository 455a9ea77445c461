from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from compressor.checkpoint.headers import TensorIndex, read_headers, read_tensor
from compressor.errors import RunError
from tests.checkpoint.refused_headers import INDEX, QKV, refusal
from tests.tiny_models import VARIANTS, read_weights, save_tiny, write_weights


def raw_file(path: Path, header: Any, data: bytes = b"") -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """q35 in files of about 60 kB."""
    return save_tiny("q35", tmp_path / "q35", max_shard_size="60KB")


class TestWhatIsRead:
    @pytest.mark.parametrize("name", VARIANTS)
    def test_names_dtypes_shapes_and_sizes_of_every_family(self, tmp_path: Path, name: str) -> None:
        folder = save_tiny(name, tmp_path, dtype=torch.bfloat16)
        index = read_headers(folder)
        tensors = load_file(folder / "model.safetensors")
        assert index.entries.keys() == tensors.keys()
        for key, tensor in tensors.items():
            entry = index.entries[key]
            assert (entry.name, entry.file, entry.dtype) == (key, folder / "model.safetensors", "BF16")
            assert (entry.shape, entry.nbytes) == (tuple(tensor.shape), tensor.nbytes)
        assert index.files == (folder / "model.safetensors",)
        assert index.metadata == {"format": "pt"}
        assert index.notes == ()

    def test_order_is_that_of_the_bytes(self, shards: Path) -> None:
        index = read_headers(shards)
        expected = []
        for path in sorted(shards.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                expected += file.offset_keys()
        assert list(index.entries) == expected
        assert len(index.files) > 2

    def test_mixed_dtypes_scalars_and_empty_tensors(self, tmp_path: Path) -> None:
        tensors = {
            "scalar": torch.tensor(3.0, dtype=torch.float16),
            "empty": torch.zeros(0, 4),
            "ids": torch.arange(3),
            "decay": torch.randn(4, generator=torch.Generator().manual_seed(0), dtype=torch.float64),
        }
        save_file(tensors, tmp_path / "model.safetensors")
        index = read_headers(tmp_path)
        assert index.metadata == {}
        assert {name: entry.dtype for name, entry in index.entries.items()} == {
            "scalar": "F16",
            "empty": "F32",
            "ids": "I64",
            "decay": "F64",
        }
        for name, entry in index.entries.items():
            assert torch.equal(read_tensor(entry), tensors[name])
            assert read_tensor(entry).dtype == tensors[name].dtype

    def test_links_of_a_hub_snapshot(self, shards: Path, tmp_path: Path) -> None:
        snapshot = tmp_path / "snapshot"
        snapshot.mkdir()
        for path in shards.iterdir():
            (snapshot / path.name).symlink_to(Path("..") / shards.name / path.name)
        weights = read_weights(shards)
        for name, entry in read_headers(snapshot).entries.items():
            assert entry.file.parent == snapshot
            assert torch.equal(read_tensor(entry), weights[name])

    def test_other_safetensors_files_are_left_out(self, tmp_path: Path) -> None:
        folder = save_tiny("q35", tmp_path)
        expected = read_headers(folder)
        shutil.copy(folder / "model.safetensors", folder / "consolidated.safetensors")
        index = read_headers(folder)
        assert (index.entries, index.files) == (expected.entries, expected.files)
        assert index.notes == (
            "consolidated.safetensors is ignored and not exported: stock transformers does not read it",
        )


class TestBrokenFiles:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        return save_tiny("q35", tmp_path)

    def test_a_git_lfs_pointer(self, folder: Path) -> None:
        pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 12345\n"
        (folder / "model.safetensors").write_text(pointer)
        assert refusal(folder) == (
            f"{folder}/model.safetensors is a Git LFS pointer ({len(pointer)} bytes), not weights; run git lfs pull."
        )

    @pytest.mark.parametrize("keep", [0.5, 0.999])
    def test_a_file_that_ends_early(self, folder: Path, keep: float) -> None:
        path = folder / "model.safetensors"
        whole = path.read_bytes()
        kept = int(len(whole) * keep)
        path.write_bytes(whole[:kept])
        assert f"model.safetensors ends early: header promises {len(whole)} bytes, file has {kept};" in refusal(folder)

    def test_a_file_that_ends_within_the_header(self, folder: Path) -> None:
        path = folder / "model.safetensors"
        whole = path.read_bytes()
        header_end = 8 + int.from_bytes(whole[:8], "little")
        path.write_bytes(whole[:100])
        assert f"header promises {header_end} bytes, file has 100;" in refusal(folder)
        path.write_bytes(whole[:5])
        assert "ends early: " in refusal(folder)

    def test_zero_bytes(self, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"")
        assert "model.safetensors is empty (0 bytes)" in refusal(folder)

    def test_something_else(self, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"<!DOCTYPE html><html>Sign in</html>")
        assert "model.safetensors is not a safetensors file: its first 8 bytes promise a header of" in refusal(folder)

    @pytest.mark.parametrize(
        ("header", "data", "reason"),
        [
            (b"{not json", b"", "a corrupt header (Expecting"),
            (b"\xff\xfe{}", b"", "a corrupt header ("),
            (b"[" * 50_000, b"", "a corrupt header (maximum recursion"),
            ([], b"", "a field of a tensor is missing or wrong"),
            ({"w": {"dtype": "F32", "shape": [2]}}, b"", "a field of a tensor is missing or wrong"),
            (
                {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0]}},
                b"",
                "a field of a tensor is missing or wrong",
            ),
            ({"w": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}, b"", "a field of a tensor is missing"),
            ({"w": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}, b"12345678", "a corrupt header ("),
            ({"w": {"dtype": "X99", "shape": [2], "data_offsets": [0, 8]}}, b"12345678", "a corrupt header ("),
            ({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, b"12345678+", "a corrupt header ("),
            ({"w": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}}, b"123456789012", "a corrupt header ("),
        ],
    )
    def test_a_corrupt_header(self, folder: Path, header: Any, data: bytes, reason: str) -> None:
        raw_file(folder / "model.safetensors", header, data)
        message = refusal(folder)
        assert f"{folder}/model.safetensors has a corrupt header" in message
        assert reason in message

    def test_no_tensor_at_all(self, folder: Path) -> None:
        raw_file(folder / "model.safetensors", {})
        assert "hold no tensor" in refusal(folder)

    def test_a_link_to_nothing(self, folder: Path) -> None:
        path = folder / "model.safetensors"
        path.unlink()
        path.symlink_to("../blobs/0")
        assert "model.safetensors links to ../blobs/0, which does not exist" in refusal(folder)


class TestNoWeights:
    def test_only_pickles(self, tmp_path: Path) -> None:
        torch.save({"w": torch.ones(2)}, tmp_path / "pytorch_model.bin")
        torch.save({"w": torch.ones(2)}, tmp_path / "optimizer.pt")
        assert "holds only pickled weights: optimizer.pt (and 1 more); convert to safetensors first" in refusal(
            tmp_path
        )

    def test_a_sharded_pickle_of_which_only_the_index_came(self, tmp_path: Path) -> None:
        (tmp_path / "pytorch_model.bin.index.json").write_text("{}")
        assert "holds only pickled weights: pytorch_model.bin.index.json" in refusal(tmp_path)

    def test_nothing(self, tmp_path: Path) -> None:
        assert "holds no weights; it needs model.safetensors, or" in refusal(tmp_path)

    def test_a_name_that_stock_does_not_look_for(self, shards: Path) -> None:
        (shards / INDEX).unlink()
        message = refusal(shards)
        assert "holds model-00001-of-0000" in message
        assert "but neither model.safetensors nor model.safetensors.index.json" in message


class TestReadTensor:
    def test_a_file_that_changed(self, tmp_path: Path) -> None:
        index: TensorIndex = read_headers(save_tiny("q35", tmp_path))
        entry = index.entries[QKV]
        write_weights(tmp_path, {QKV: torch.zeros(3)})
        with pytest.raises(RunError, match=r"now has shape \(3,\) instead of \(128, 32\)"):
            read_tensor(entry)
        write_weights(tmp_path, {"other": torch.zeros(3)})
        with pytest.raises(RunError, match=f"{QKV} cannot be read from .*model.safetensors"):
            read_tensor(entry)
        (tmp_path / "model.safetensors").unlink()
        with pytest.raises(RunError, match="cannot be read from"):
            read_tensor(entry)
