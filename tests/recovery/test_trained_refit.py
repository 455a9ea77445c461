"""The refit on the bundled trained model: what random weights cannot show."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from compressor.calibration.run import calibrate
from compressor.calibration.text import DEMO, TextSource, held_out_source, open_documents
from compressor.calibration.tokenizer import load_tokenizer
from compressor.calibration.tokens import TokenBatch, batches, pack_tokens, pad_batch
from compressor.checkpoint.config_file import CONFIG_FILE, read_config
from compressor.evaluation.forward import forward_tokens
from compressor.evaluation.prompt_tokens import TokenCounter, encode_prompts
from compressor.loading import load_model
from compressor.preparation import Source, open_model, open_source, plan_cut
from compressor.prompts.registry import find_task, generate_prompts
from compressor.recipe import Recipe
from compressor.recovery.refit import RefitPair, refit
from compressor.selecting import select_channels
from compressor.writing import write_checkpoint
from tests.tiny_models import read_weights

LENGTH = 288
TEXTS = 16
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Material:
    """Token sequences of both kinds: to fit on, to choose the ridge by, and to judge the result."""

    fitting: list[Tensor]
    held_out: list[Tensor]
    judging_text: list[Tensor]
    judging_prompts: list[Tensor]


def prompts(source: Source, count: int, seed: int) -> list[Tensor]:
    tokenizer = load_tokenizer(source.folder, trust_remote_code=False)
    forms = [find_task(name) for name in ("niah_single_1", "niah_word")]
    made = [generate_prompts(form, count, LENGTH, TokenCounter(tokenizer), seed, "calibration") for form in forms]
    encoded = encode_prompts(tokenizer, [prompt for group in made for prompt in group], source.config.vocab_size)
    return [tokens.whole for tokens in encoded]


def material(source: Source) -> Material:
    tokenizer = load_tokenizer(source.folder, trust_remote_code=False)
    demo = TextSource(DEMO)
    packed = pack_tokens(
        open_documents(demo),
        tokenizer,
        TEXTS,
        LENGTH,
        held_out_samples=12,
        seed=0,
        vocab_size=source.config.vocab_size,
        held_out_source=held_out_source(demo),
    )
    return Material(
        fitting=[*packed.calibration, *prompts(source, 6, seed=1)],
        held_out=[*packed.held_out[::2], *prompts(source, 2, seed=2)],
        judging_text=list(packed.held_out[1::2]),
        judging_prompts=prompts(source, 2, seed=3),
    )


def padded(sequences: Sequence[Tensor]) -> list[TokenBatch]:
    ordered = sorted(sequences, key=len)
    return [pad_batch(ordered[start : start + 8], pad_token_id=1) for start in range(0, len(ordered), 8)]


def mean_kl(original: PreTrainedModel, sequences: Sequence[Tensor]) -> Callable[[PreTrainedModel], float]:
    def divergence(model: PreTrainedModel) -> float:
        figures = forward_tokens(model, sequences, 8, reference=original)
        return float(torch.cat([one.kl for one in figures if one.kl is not None]).double().mean())

    return divergence


def cut(source: Source, original: PreTrainedModel, text: Sequence[Tensor], folder: Path) -> PreTrainedModel:
    """Half of the channels, by the paper's method."""
    recipe = Recipe.from_settings({"selection": {"ratio": 0.5, "method": "drrqr"}})
    width = source.mixers[0].head_k_dim // 2
    statistics = calibrate(
        source.architecture, original, source.mixers, list(batches(text, 8)), None, lambda progress, tokens: None
    )
    selection, _ = select_channels(source, statistics, recipe.selection, width, 0)
    write_checkpoint(folder, source, plan_cut(source, recipe, width), selection, 10**9, lambda written: None)
    return load_model(source.architecture, folder, read_config(folder / CONFIG_FILE), torch.float32, CPU)


def test_refit_lowers_the_divergence(tmp_path: Path) -> None:
    """On text and on prompts that neither the fit nor the choice of its ridge has seen, in bfloat16 weights."""
    source = open_source(open_model(None, None))
    original = load_model(source.architecture, source.folder, dict(source.checkpoint.raw_config), torch.float32, CPU)
    tokens = material(source)
    compressed = cut(source, original, tokens.fitting[:TEXTS], tmp_path)
    dtypes = {name: tensor.dtype for name, tensor in read_weights(tmp_path).items()}
    pair = RefitPair(source.architecture, original, compressed, source.mixers, dtypes)
    judges = [mean_kl(original, sequences) for sequences in (tokens.judging_text, tokens.judging_prompts)]
    before = [judge(compressed) for judge in judges]
    result = refit(
        pair, padded(tokens.fitting), padded(tokens.held_out), mean_kl(original, tokens.held_out), lambda count: None
    )
    after = [judge(compressed) for judge in judges]
    assert not result.kept_old
    assert result.kl_after < 0.85 * result.kl_before
    assert all(new < 0.9 * old for new, old in zip(after, before, strict=True))
    assert {tensor.dtype for tensor in result.tensors.values()} == {torch.bfloat16}
    assert all(layer.error_after < layer.error_before for layer in result.layers)
