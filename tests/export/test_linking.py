"""--link: weight files that need no change are the source's, and nothing that a run does reaches the source's bytes."""

from __future__ import annotations

import json
import shutil
import stat
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from compressor.checkpoint.headers import read_headers
from compressor.cli import main
from compressor.errors import RequestError, RunError
from compressor.export.linking import link_file, refuse_unlinkable, unchanged_files
from compressor.export.replacement import replace_tensors
from compressor.export.weights import OutputTensor, write_weights
from compressor.loading import load_model
from compressor.preparation import Source, choose_width, open_model, open_source, plan_cut
from compressor.recipe import Recipe
from compressor.verification.slices import first_difference
from compressor.writing import write_checkpoint
from tests.families import random_selection
from tests.test_pipeline import compress, hashes, make_source, make_text
from tests.tiny_models import read_weights, save_tiny

OTHER_FILE_SYSTEM = Path("/dev/shm")


def cut_linked(model: Path, folder: Path, link: bool) -> Source:
    """Write the cut of `model` to 6 channels into `folder`."""
    recipe = Recipe.from_settings({"model": str(model), "selection": {"target_dim": 6}})
    configured = open_model(recipe.model, None)
    source = open_source(configured)
    plan = plan_cut(source, recipe, choose_width(configured, recipe.selection))
    folder.mkdir()
    write_checkpoint(folder, source, plan, random_selection(source.mixers, 6), 15_000, lambda count: None, link)
    return source


def linked_files(source: Path, output: Path) -> dict[Path, Path]:
    """Weight file of the output -> the file of the source that it is."""
    return {
        own: other
        for own in output.glob("*.safetensors")
        for other in source.glob("*.safetensors")
        if own.samefile(other)
    }


@pytest.mark.parametrize("name", ["q35", "qn_experts", "gated_deltanet_tied"])
def test_files_without_a_cut_tensor_are_the_sources(name: str, tmp_path: Path) -> None:
    model = save_tiny(name, tmp_path / "source", max_shard_size="8KB")
    before = hashes(model)
    source = cut_linked(model, tmp_path / "linked", True)
    cut_linked(model, tmp_path / "copied", False)
    expected, actual = read_weights(tmp_path / "copied"), read_weights(tmp_path / "linked")
    changed = {key for key, tensor in read_weights(model).items() if tensor.shape != actual[key].shape}
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[key], expected[key]) for key in expected)
    linked = linked_files(model, tmp_path / "linked")
    untouched = [file for file in model.glob("*.safetensors") if changed.isdisjoint(load_file(file))]
    assert sorted(linked.values()) == sorted(untouched) != []
    assert not any(path.is_symlink() for path in linked)
    index = json.loads((tmp_path / "linked" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in expected.values())
    assert {key: tmp_path / "linked" / file for key, file in index["weight_map"].items()} == {
        key: file for file in (tmp_path / "linked").glob("*.safetensors") for key in load_file(file)
    }
    raw = json.loads((tmp_path / "linked" / "config.json").read_text())
    load_model(source.architecture, tmp_path / "linked", raw, torch.float32, torch.device("cpu"))
    selection = random_selection(source.mixers, 6)
    assert first_difference(source.architecture, model, tmp_path / "linked", selection, frozenset()) is None
    assert hashes(model) == before


def test_the_cache_behind_symbolic_links_is_what_is_linked(tmp_path: Path) -> None:
    blobs = save_tiny("q35", tmp_path / "blobs", max_shard_size="8KB")
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(Path("..") / "blobs" / path.name)
    cut_linked(snapshot, tmp_path / "linked", True)
    linked = linked_files(blobs, tmp_path / "linked")
    assert linked
    assert not any(path.is_symlink() for path in (tmp_path / "linked").iterdir())


def resharded(model: Path, folder: Path) -> Path:
    """A copy of a checkpoint with one tensor a file."""
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    tensors = [
        OutputTensor(name, value.dtype, tuple(value.shape), lambda v=value: v)
        for name, value in read_weights(model).items()
    ]
    write_weights(tensors, folder, 1, None)
    return folder


def test_a_run_with_a_refit_leaves_the_source_as_it_was(
    demo_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = resharded(demo_model, tmp_path / "source")
    for path in source.glob("*.safetensors"):
        path.chmod(0o640)
    before = hashes(source)
    words = ["--ratio", "0.5", "--calibration", "demo", "--calibration-samples", "8", "--sequence-length", "256"]
    words += ["--device", "cpu", "--no-verify", "--no-evaluate", "--link", "--output-dir", str(tmp_path / "out")]
    assert main([str(source), *words]) == 0
    assert json.loads((tmp_path / "out" / "compression.json").read_text())["recovery"]["refit"]["kept"]
    original, cut = read_weights(source), read_weights(tmp_path / "out")
    same = {name for name, tensor in original.items() if torch.equal(tensor, cut[name])}
    refitted = {name for name in original.keys() - same if original[name].shape == cut[name].shape}
    assert refitted  # in files of their own
    assert {name for path in linked_files(source, tmp_path / "out") for name in load_file(path)} == same
    assert hashes(source) == before
    assert {stat.S_IMODE(path.stat().st_mode) for path in source.glob("*.safetensors")} == {0o640}
    output = " ".join(capsys.readouterr().out.split())
    assert f"are hard links to those of {source}: what changes one in place changes the other" in output


def test_one_file_is_written_and_said_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = make_source("q35", tmp_path / "source")
    skipped = ["--no-refit", "--no-verify", "--no-evaluate", "--link"]
    assert compress(source, tmp_path / "out", make_text(tmp_path), *skipped) == 0
    assert linked_files(source, tmp_path / "out") == {}
    assert "--link: every weight file holds a tensor that changes, so all are written" in capsys.readouterr().out
    assert compress(source, tmp_path / "whole", make_text(tmp_path), *skipped, "--ratio", "0") == 0
    assert [path.name for path in linked_files(source, tmp_path / "whole")] == ["model.safetensors"]


@pytest.mark.skipif(not OTHER_FILE_SYSTEM.is_dir(), reason="not measured: there is no second file system")
def test_another_file_system_is_refused_before_the_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = make_source("q35", tmp_path / "source", shards="8KB")
    with tempfile.TemporaryDirectory(dir=OTHER_FILE_SYSTEM) as other:
        if Path(other).stat().st_dev == tmp_path.stat().st_dev:
            pytest.skip("not measured: both folders are on one file system")
        assert compress(source, Path(other) / "out", make_text(tmp_path), "--link") == 2
        assert list(Path(other).iterdir()) == []
        file = next(source.glob("*.safetensors"))
        with pytest.raises(RunError, match="cannot be hard-linked into"):
            link_file(file, Path(other) / "file")
    error = capsys.readouterr().err
    assert "cannot be hard-linked into" in error
    assert "leave --link out to copy" in error


def test_a_file_that_is_gone_is_refused_and_leaves_no_probe(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"absent\.safetensors cannot be hard-linked"):
        refuse_unlinkable([tmp_path / "absent.safetensors"], tmp_path / "new" / "out")
    assert list(tmp_path.iterdir()) == []


def test_files_with_other_contents_are_not_taken_as_they_are(tmp_path: Path) -> None:
    first, second, third = ({name: torch.full((4,), float(number))} for number, name in enumerate("abc"))
    save_file(first, tmp_path / "1.safetensors", metadata={"format": "pt"})
    save_file(second | first, tmp_path / "2.safetensors", metadata={"format": "pt"})  # a second copy of a
    save_file(third, tmp_path / "3.safetensors")  # without the metadata
    places = {"a": "1.safetensors", "b": "2.safetensors", "c": "3.safetensors"}
    index = {"metadata": {}, "weight_map": places}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert unchanged_files(read_headers(tmp_path), {"other"}) == (tmp_path / "1.safetensors",)
    assert unchanged_files(read_headers(tmp_path), {"a"}) == ()


def test_tensors_are_not_replaced_under_another_name_of_the_file(tmp_path: Path) -> None:
    folder = save_tiny("gated_deltanet", tmp_path / "model")
    other = tmp_path / "other.safetensors"
    other.hardlink_to(folder / "model.safetensors")
    before = load_file(other)
    name = next(iter(before))
    replace_tensors(folder, {name: torch.zeros_like(before[name])})
    assert not bool(load_file(folder / "model.safetensors")[name].any())
    assert torch.equal(load_file(other)[name], before[name])
    assert [path.name for path in folder.glob(".*")] == []
