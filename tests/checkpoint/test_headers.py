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
from compressor.errors import RequestError, RunError
from tests.tiny_models import VARIANTS, read_weights, save_tiny, write_weights

INDEX = "model.safetensors.index.json"
QKV = "model.layers.0.linear_attn.in_proj_qkv.weight"


def refusal(folder: Path) -> str:
    with pytest.raises(RequestError) as caught:
        read_headers(folder)
    message = str(caught.value)
    assert "\n" not in message
    return message


def raw_file(path: Path, header: Any, data: bytes = b"") -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def read_index(folder: Path) -> dict[str, Any]:
    return json.loads((folder / INDEX).read_text())


def write_index(folder: Path, weight_map: Any, **fields: Any) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map} | fields))


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

    def test_an_unlisted_tensor_of_a_shard_is_read_as_stock_does(self, shards: Path) -> None:
        index = read_index(shards)
        file = index["weight_map"].pop(QKV)
        write_index(shards, index["weight_map"])
        read = read_headers(shards)
        assert read.entries[QKV].file == shards / file
        assert f"{INDEX} does not name {QKV}; stock transformers reads what the files hold" in read.notes


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


class TestIndex:
    def test_absent_files(self, shards: Path) -> None:
        files = sorted(path.name for path in shards.glob("*.safetensors"))
        for name in files[:2]:
            (shards / name).unlink()
        assert f"names files that {shards} lacks: {files[0]} (and 1 more)" in refusal(shards)

    def test_a_tensor_that_its_file_lacks(self, shards: Path) -> None:
        weight_map = read_index(shards)["weight_map"]
        file = weight_map["model.norm.weight"]
        write_index(shards, weight_map | {"model.extra.weight": file})
        assert f"names tensors that their files lack: model.extra.weight in {file};" in refusal(shards)

    def test_a_single_file_beside_an_index_that_names_others(self, shards: Path) -> None:
        write_weights(shards, read_weights(shards))
        message = refusal(shards)
        assert "holds model.safetensors, which stock transformers reads, and model.safetensors.index.json" in message
        assert "model-00001-of-0000" in message

    def test_an_index_of_the_single_file(self, tmp_path: Path) -> None:
        folder = save_tiny("q35", tmp_path)
        expected = read_headers(folder)
        write_index(folder, dict.fromkeys(expected.entries, "model.safetensors"))
        assert read_headers(folder) == expected
        write_index(folder, {"gone": "model.safetensors"})
        assert "names tensors that their files lack: gone in model.safetensors" in refusal(folder)

    @pytest.mark.parametrize("name", ["../q35/model-1.safetensors", "/etc/model.safetensors", "a\\..\\b.safetensors"])
    def test_a_file_outside_the_folder(self, shards: Path, name: str) -> None:
        write_index(shards, {"w": name})
        message = refusal(shards)
        assert repr(name) in message
        assert "outside the folder" in message

    @pytest.mark.parametrize(
        ("content", "reason"),
        [
            ('{"metadata": {}}', "has no weight_map"),
            ('{"metadata": {}, "weight_map": {"w": 1}}', "has no weight_map"),
            ('{"metadata": {}, "weight_map": {}}', "is empty"),
            ('{"weight_map": {"w": "a.safetensors"}}', "has no metadata object"),
            ('{"metadata": {}, "weight_map": {"w": "a.bin"}}', "'a.bin', which is no safetensors file"),
            ('{"metadata": {}, "weight_map": {"w"', "is not valid JSON (line 1"),
        ],
    )
    def test_a_broken_index(self, shards: Path, content: str, reason: str) -> None:
        (shards / INDEX).write_text(content)
        assert reason in refusal(shards)


class TestCopies:
    @pytest.fixture
    def last(self, shards: Path) -> Path:
        """The last shard, which does not hold `QKV` as saved."""
        path = max(shards.glob("*.safetensors"))
        assert read_index(shards)["weight_map"][QKV] != path.name
        return path

    def test_different_bytes(self, shards: Path, last: Path) -> None:
        stale = torch.full_like(read_weights(shards)[QKV], 99.0)
        write_weights(shards, load_file(last) | {QKV: stale}, last.name)
        indexed = read_index(shards)["weight_map"][QKV]
        message = refusal(shards)
        assert f"{QKV} stands in both {indexed} and {last.name} with different bytes" in message
        assert f"the index names {indexed}, stock loaders read {last.name}" in message

    def test_stock_reads_the_last_file(self, shards: Path, last: Path) -> None:
        from transformers import Qwen3_5ForCausalLM

        stale = torch.full_like(read_weights(shards)[QKV], 99.0)
        write_weights(shards, load_file(last) | {QKV: stale}, last.name)
        assert torch.equal(Qwen3_5ForCausalLM.from_pretrained(shards).state_dict()[QKV], stale)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_another_dtype(self, shards: Path, last: Path, dtype: torch.dtype) -> None:
        copy = read_weights(shards)[QKV].to(dtype)
        write_weights(shards, load_file(last) | {QKV: copy}, last.name)
        if dtype == torch.float32:
            assert QKV in read_headers(shards).entries
        else:
            assert "with different bytes" in refusal(shards)

    def test_identical_bytes_are_taken_once(self, shards: Path, last: Path) -> None:
        expected = read_headers(shards)
        nan = torch.full_like(read_weights(shards)[QKV], torch.nan)
        first = shards / read_index(shards)["weight_map"][QKV]
        for path in (first, last):
            write_weights(shards, load_file(path) | {QKV: nan}, path.name)
        index = read_headers(shards)
        assert index.entries.keys() == expected.entries.keys()
        assert index.entries[QKV].file == first
        assert f"{QKV} stands in {first.name} and {last.name}: taken once" in index.notes


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
