"""`compress probe` through the command line, on a tiny model and on the bundled one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from compressor.calibration.text import TextSource, open_documents
from compressor.calibration.tokenizer import load_tokenizer
from compressor.cli import main
from compressor.probe.spectra import FIGURES
from compressor.probe_documents import concatenated_documents
from tests.probe.test_report import PNG_BEGINNING, check_page
from tests.tiny_models import save_tiny, save_tiny_tokenizer

TEXT = "the state of a layer is a matrix, and it forgets. " * 40
SHORT = ["--every", "64", "--length", "256", "--documents", "3", "--device", "cpu"]


def source(name: str, folder: Path, **overrides: Any) -> Path:
    return save_tiny_tokenizer(save_tiny(name, folder, overrides=overrides))


def text_file(folder: Path, text: str = TEXT) -> Path:
    path = folder / "text.txt"
    path.write_text(text)
    return path


def probe(model: Path, output: Path, *options: str) -> dict[str, Any]:
    """Runs, checks the folder and the page, and returns what probe.json holds."""
    assert main(["probe", str(model), "--output", str(output), *options]) == 0
    result: dict[str, Any] = json.loads((output / "probe.json").read_text())
    figures = sorted(path.name for path in (output / "figures").iterdir())
    assert sorted(path.name for path in output.iterdir()) == ["figures", "probe.json", "report.html"]
    assert all((output / "figures" / name).read_bytes().startswith(PNG_BEGINNING) for name in figures)
    check_page((output / "report.html").read_text(encoding="utf-8"), images=len(figures))
    return result


@pytest.mark.parametrize(
    "name",
    ["gated_deltanet", "gated_deltaproduct", "delta_net", "q35", "qw", "gated_deltanet_hybrid", "bamba", "falcon_h1"],
)
def test_every_family(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, text = source(name, tmp_path / "model"), text_file(tmp_path)
    options = [*SHORT, "--text", str(text), "--ranks", "4,1", "--search-rank", "1", "--no-tasks"]
    result = probe(model, tmp_path / "out", *options)
    states = result["model"]["states"]
    assert states["tokens"] == [64, 128, 192, 256]
    assert states["documents"] == [3, 3, 3, 3]
    assert set(states["curves"]) == set(states["heads"][0]["end"]) == set(FIGURES)
    assert all(len(row) == len(states["heads"]) for row in states["curves"]["utilisation"]["median"])
    for head in states["heads"]:
        utilisation = head["end"]["utilisation"]
        assert 0 < utilisation["minimum"] <= utilisation["median"] <= utilisation["maximum"] <= 1
        assert (head["horizon"] is None) == (name == "delta_net")
        kappa = head["end"]["condition_number"]["minimum"]
        assert kappa is None or kappa >= (1 - 1e-5) * utilisation["maximum"] ** -0.5
    assert [cut["rank"] for cut in result["truncation"]["text"]] == [None, 4, 1]
    hybrid = name in ("q35", "qw", "gated_deltanet_hybrid", "bamba", "falcon_h1")
    assert (result["windowed"] is not None) == hybrid
    assert not hybrid or result["windowed"]["window"] == 64
    assert result["truncation"]["text"][0]["loss"] == result["model"]["loss"]
    assert [search["name"] for search in result["searches"]] == ["text"]
    assert "entropy effective rank: median" in capsys.readouterr().out


def test_states_only(tmp_path: Path) -> None:
    model, text = source("gated_deltanet", tmp_path / "model"), text_file(tmp_path)
    result = probe(model, tmp_path / "out", *SHORT, "--text", str(text), "--no-truncation")
    assert result["truncation"] is None
    assert not (tmp_path / "out" / "figures" / "truncation.png").exists()


@pytest.mark.slow
def test_tasks_of_the_bundled_model(tmp_path: Path, demo_model: Path) -> None:
    """A cut to one direction takes the answers away, one to 32 of 64 leaves them; a probe repeats itself."""
    options = ["--length", "512", "--documents", "2", "--tasks", "niah_single_1", "--task-length", "512", "--samples",
               "4", "--ranks", "1,32", "--device", "cpu"]  # fmt: skip
    result = probe(demo_model, tmp_path / "out", *options)
    tasks = result["truncation"]["tasks"]
    assert [task["rank"] for task in tasks] == [None, 32, 1]
    assert [task["score"]["mean"] for task in tasks[:2]] == [1, 1]
    assert tasks[2]["score"]["mean"] < 0.5
    assert tasks[2]["loss_difference"]["mean"] > 1 > abs(tasks[1]["loss_difference"]["mean"])
    again = probe(demo_model, tmp_path / "again", *options)
    for part in ("model", "truncation", "settings"):
        assert again[part] == result[part]


def test_before_and_after_pruning(tmp_path: Path, demo_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cut = tmp_path / "cut"
    words = ["--target-dim", "32", "--calibration-samples", "4", "--sequence-length", "512", "--retrieval-share", "0"]
    quick = ["--no-refit", "--no-evaluate", "--no-verify", "--device", "cpu", "--output-dir", str(cut)]
    assert main([*words, *quick]) == 0
    options = ["--baseline", str(demo_model), "--length", "512", "--documents", "2", "--no-truncation"]
    result = probe(cut, tmp_path / "out", *options, "--device", "cpu")
    printed = capsys.readouterr().out
    assert (result["baseline"]["key_dim"], result["model"]["key_dim"]) == (64, 32)
    compared = result["comparison"]
    assert compared["utilisation"]["after"] > compared["utilisation"]["before"]
    assert compared["entropy_effective_rank"]["pearson"] > 0.8
    losses = [result[name]["loss"]["all"]["mean"] for name in ("baseline", "model")]
    rise = result["loss_difference"]["all"]
    assert rise["mean"] == pytest.approx(losses[1] - losses[0], rel=1e-6)
    assert rise["mean"] > 0
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    for line in (f"loss {losses[0]:.4f} -&gt; {losses[1]:.4f}", f"{losses[0]:.4g}</td><td>{losses[1]:.4g}", str(cut)):
        assert line in page
    assert f"  loss {losses[0]:.4f} -> {losses[1]:.4f}, {rise['mean']:+.4f} +- {rise['standard_error']:.4f}" in printed
    assert not any("narrower" in note for note in result["notes"])
    swapped = probe(demo_model, tmp_path / "swapped", "--baseline", str(cut), *options[2:], "--device", "cpu")
    assert any("narrower, with 32 key channels, than those of the model, with 64" in each for each in swapped["notes"])


def test_documents_of_several_lengths(tmp_path: Path) -> None:
    rows = [{"text": "word " * count} for count in (60, 20, 90, 4)]
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = source("gated_deltanet", tmp_path / "model")
    options = [*SHORT[:-2], "--documents", "9", "--text", str(path), "--ranks", "1", "--no-tasks", "--device", "cpu"]
    result = probe(model, tmp_path / "out", *options)
    assert result["settings"]["document_lengths"] == [256, 256, 192, 64]
    assert result["model"]["states"]["documents"] == [4, 3, 3, 2]
    assert any("4 of 9 documents" in note for note in result["notes"])
    assert any("64 to 256 tokens instead of 256" in note for note in result["notes"])


def test_concatenated_documents(tmp_path: Path) -> None:
    """Every token of the documents in order, the end-of-sequence token between them, in pieces of the length."""
    texts = ["word " * 30, "a longer word " * 20, "other " * 40]
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tokenizer = load_tokenizer(save_tiny_tokenizer(tmp_path / "tokenizer"), False)
    ids = [tokenizer(text)["input_ids"] for text in texts]
    joined = [*ids[0], tokenizer.eos_token_id, *ids[1], tokenizer.eos_token_id, *ids[2]]
    found, notes = concatenated_documents(open_documents(TextSource(str(path))), tokenizer, 256, 64, 2)
    assert [piece.tolist() for piece in found] == [joined[:256], joined[256:512]]
    assert notes == []
    found, notes = concatenated_documents(open_documents(TextSource(str(path))), tokenizer, 512, 64, 2)
    assert [len(piece) for piece in found] == [512, (len(joined) - 512) // 64 * 64]
    assert notes == [f"documents of {len(found[1])} to 512 tokens instead of 512: the text has no longer"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--length", "32"], "a length of 32 tokens is below one segment of 64; raise --length, or lower --every."),
        (["--length", "4096"], "--length 4096 is over the 2048 tokens of context that the model's config names"),
        (["--ranks", "17"], "--ranks 17 is over the 16 directions that a state of 16 x 16 has; use 1 to 16."),
        (["--search-rank", "17"], "--search-rank 17 is over the 16 directions"),
        (["--ranks", "0"], "--ranks: Input should be greater than or equal to 1 (got 0)"),
        (["--ranks", "one"], '--ranks: "one" is no whole number'),
        (["--ranks", "4,1,4"], "--ranks: 4 is named twice; leave one out."),
        (["--tasks", "vt,recall,vt"], "--tasks: vt is named twice; leave one out."),
        (["--ranks", ""], "--ranks: name at least one"),
        (["--length", "9" * 30], "--length: Input should be less than or equal to 16777216"),
        (["--search-rank", "0"], "--search-rank: Input should be greater than or equal to 1"),
        (["--ranks", "1", "--no-truncation"], "--ranks would change nothing with --no-truncation"),
        (["--tasks", "vt", "--no-truncation"], "--tasks would change nothing with --no-truncation"),
        (["--tasks", "vt", "--no-tasks"], "--tasks would change nothing with --no-tasks"),
        (["--samples", "5", "--no-tasks"], "--samples would change nothing with --no-tasks"),
        (["--samples", "5", "--no-truncation"], "--samples would change nothing with --no-truncation"),
        (["--no-tasks", "--no-truncation"], "--no-tasks would change nothing with --no-truncation"),
        (
            ["--length", "64", "--no-tasks", "--ranks", "4"],
            "--ranks would change nothing: all is read in one segment of 64 tokens, and states are cut between "
            "segments; raise --length, lower --every, or ask for tasks.",
        ),
        (["--length", "64", "--no-tasks", "--search-rank", "4"], "--search-rank would change nothing: all is read"),
        (["--every", "1024", "--length", "2048", "--samples", "5"], "--samples would change nothing: no prompt is"),
        (["--tasks", "niah_singel_1"], "did you mean niah_single_1?"),
        (["--tasks", "vt", "--task-length", "64"], "prompts of 64 tokens end in their first segment of 64"),
        (["--tasks", "vt", "--task-length", "100"], "raise --task-length or leave them out of --tasks."),
        (
            ["--tasks", "lm_eval:wikitext"],
            "--tasks lm_eval:wikitext: a probe asks retrieval prompts, and takes no task",
        ),
        (["--task-length", "4096"], "--task-length 4096 is over the 2048 tokens"),
        (["--documents", "0"], "documents: Input should be greater than or equal to 1"),
        (["--every", "0"], "every: Input should be greater than or equal to 1"),
        (["--text", "absent.txt"], 'the text "absent.txt" does not exist'),
        (["--baseline-revision", "main"], "add --baseline, or leave it out"),
        (["--device", "tpu"], '--device: "tpu" is no device; give auto, cpu, cuda or cuda:N'),
        (["--baseline", ""], '--baseline "" is empty; name something, or leave it out.'),
        (["--baseline", "./" + "b" * 300], f"there is no folder ./{'b' * 300}; check the path"),
        (["--text", "t" * 300], f'the text "{"t" * 300}" does not exist'),
    ],
)
def test_bad_requests_get_one_sentence(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, text = source("gated_deltanet", tmp_path / "model"), text_file(tmp_path)
    output = tmp_path / "out"
    refused(["probe", str(model), "--output", str(output), *SHORT, "--text", str(text), *options], message, capsys)
    assert not output.exists()


def refused(words: Sequence[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(list(words)) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert "Traceback" not in captured.err


def test_text_shorter_than_a_segment(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, text = (
        source("gated_deltanet", tmp_path / "model"),
        text_file(tmp_path, "forty letters are less than a segment."),
    )
    words = ["probe", str(model), "--output", str(tmp_path / "out"), *SHORT, "--text", str(text)]
    refused(words, "has 38 tokens and a segment 64; give a longer --text, or a lower --every.", capsys)


def test_model_without_linear_layers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = source("q35", tmp_path / "model", layer_types=["full_attention"] * 4)
    words = ["probe", str(model), "--output", str(tmp_path / "out"), *SHORT]
    refused(words, "has no linear-attention layer", capsys)


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_existing_output(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, output = source("gated_deltanet", tmp_path / "model"), tmp_path / "out"
    if kind == "folder":
        output.mkdir()
    precious = output / "precious.txt" if kind == "folder" else output
    precious.write_text("x")
    refusal = f"the output folder {output} " + (
        "exists and is not empty; choose another." if kind == "folder" else "is a file; choose another."
    )
    refused(["probe", str(model), "--output", str(output), *SHORT], refusal, capsys)
    assert precious.read_text() == "x"


def test_baseline_with_other_heads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = source("gated_deltanet", tmp_path / "model")
    baseline = source("gated_deltanet", tmp_path / "baseline", num_hidden_layers=3)
    words = ["probe", str(model), "--output", str(tmp_path / "out"), "--baseline", str(baseline), *SHORT]
    refused(words, "the baseline has 6 linear-attention heads and the model 4", capsys)


def test_longer_than_the_context_where_it_is_allowed(tmp_path: Path) -> None:
    model = source("gated_deltanet", tmp_path / "model", max_position_embeddings=128)
    text = text_file(tmp_path)
    options = [*SHORT, "--text", str(text), "--no-truncation", "--allow-extrapolation"]
    assert probe(model, tmp_path / "out", *options)["settings"]["length"] == 256
    assert main(["probe", str(model), "--output", str(tmp_path / "other"), *options[:-1]]) == 2
