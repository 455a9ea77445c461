"""The bundled model and texts: whole, readable by the stock loaders, and apart from each other."""

from __future__ import annotations

from pathlib import Path

from safetensors import safe_open
from transformers import AutoConfig, AutoTokenizer

from compressor.demo import calibration_text_path, held_out_text_path

SEPARATOR = "<|endoftext|>"


def documents(path: Path) -> list[str]:
    return [part for part in path.read_text(encoding="utf-8").split(SEPARATOR) if part]


def test_the_model_folder_is_complete(demo_model: Path) -> None:
    import fla  # noqa: F401  (registers the family with the Auto classes)

    config = AutoConfig.from_pretrained(demo_model)
    with safe_open(demo_model / "model.safetensors", framework="pt") as weights:
        names = set(weights.keys())
        embeddings = weights.get_slice("model.embeddings.weight").get_shape()
    assert config.model_type == "gated_deltanet"
    assert embeddings == [config.vocab_size, config.hidden_size]
    assert len({name.split(".")[2] for name in names if name.startswith("model.layers.")}) == config.num_hidden_layers


def test_texts_are_whole_documents_of_the_model_tokens(demo_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    for path, at_least in ((calibration_text_path(), 40_000), (held_out_text_path(), 20_000)):
        tokens = tokenizer(path.read_text(encoding="utf-8"))["input_ids"]
        assert len(tokens) >= at_least
        assert tokens.count(tokenizer.eos_token_id) == len(documents(path))
        assert tokens[-1] == tokenizer.eos_token_id


def test_the_held_out_text_repeats_no_paragraph_of_the_calibration_text() -> None:
    def paragraphs(path: Path) -> set[str]:
        lines = (line.strip() for document in documents(path) for line in document.splitlines())
        return {line for line in lines if len(line) > 60}

    assert paragraphs(held_out_text_path())
    assert paragraphs(held_out_text_path()) & paragraphs(calibration_text_path()) == set()


def test_the_licence_notes_name_every_source() -> None:
    notice = (calibration_text_path().parent / "NOTICE.md").read_text(encoding="utf-8")
    for source in ("Northanger Abbey", "Persuasion", "Esther", "Ruth", "Devil's Dictionary", "Apache License 2.0"):
        assert source in notice
