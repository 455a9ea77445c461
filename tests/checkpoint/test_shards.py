from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from compressor.checkpoint.headers import read_headers
from tests.checkpoint.refused_headers import INDEX, QKV, refusal
from tests.tiny_models import read_weights, save_tiny, write_weights


def read_index(folder: Path) -> dict[str, Any]:
    return json.loads((folder / INDEX).read_text())


def write_index(folder: Path, weight_map: dict[str, str]) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """q35 in files of about 60 kB."""
    return save_tiny("q35", tmp_path / "q35", max_shard_size="60KB")


class TestIndex:
    def test_absent_files(self, shards: Path) -> None:
        files = sorted(path.name for path in shards.glob("*.safetensors"))
        for name in files[:2]:
            (shards / name).unlink()
        assert f"names files that {shards} lacks: {files[0]} (and 1 more)" in refusal(shards)

    @pytest.mark.parametrize("place", ["model.safetensors", INDEX, "model-00001-of-00002.safetensors"])
    def test_names_of_files_that_others_have(self, place: str, tmp_path: Path) -> None:
        path = tmp_path / place
        if path.name not in ("model.safetensors", INDEX):
            write_index(tmp_path, {"a": place})
        path.mkdir()
        assert (
            refusal(tmp_path) == f"{path} is a folder, and should be a file; put the file there, or download it again."
        )
        path.rmdir()
        path.symlink_to(place)
        assert refusal(tmp_path) == f"{path} links to {place}, and so on in a circle; download the file again."
        path.unlink()
        path.symlink_to("../blobs/gone")
        assert refusal(tmp_path) == f"{path} links to ../blobs/gone, which does not exist; download the file again."

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

    def test_an_unlisted_tensor_of_a_shard_is_read_as_stock_does(self, shards: Path) -> None:
        index = read_index(shards)
        file = index["weight_map"].pop(QKV)
        write_index(shards, index["weight_map"])
        read = read_headers(shards)
        assert read.entries[QKV].file == shards / file
        assert f"{INDEX} does not name {QKV}; stock transformers reads what the files hold" in read.notes

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
