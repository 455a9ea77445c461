"""`compress verify DIR` by itself: find the family, the original and some text, then check."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from compressor.calibration.text import TextSource, open_documents
from compressor.calibration.tokenizer import load_tokenizer
from compressor.calibration.tokens import pack_tokens
from compressor.checkpoint.checkpoint import open_checkpoint
from compressor.checkpoint.fingerprint import weights_sha256
from compressor.checkpoint.source import fetch_weights, resolve_model
from compressor.demo import demo_model_path
from compressor.errors import CompressorError, RequestError
from compressor.loading import resolve_device
from compressor.preparation import open_model
from compressor.recipe import Recipe
from compressor.recipe_file import load_settings
from compressor.report import VerificationReport
from compressor.reporting import read_compression
from compressor.verification.run import VERIFICATION_TOKENS, Original, verify_folder
from compressor.verification.slices import read_selection


def verify(folder: Path, original: str | None = None, device: str = "auto") -> VerificationReport:
    """Check a compressed folder in clean processes; see `verify_folder`.

    Args:
        folder: what `compress` wrote.
        original: the model it was cut from; None takes what the folder's recipe names.
        device: auto, cpu, cuda or cuda:N.

    Raises:
        RequestError: `folder` is not a compressed checkpoint, or `original` is not its original.
        RunError: a check failed.
    """
    configured = open_model(str(folder.absolute()), None)
    open_checkpoint(configured.folder)
    compression = read_compression(folder)
    if compression is None:
        raise RequestError(f"{folder} has no readable compression.json; give a folder that compress wrote.")
    read_selection(folder, configured.mixers)
    found, missing = find_original(folder, original, compression)
    tokenizer = load_tokenizer(folder, trust_remote_code=False)
    vocab_size = configured.config.get_text_config(decoder=True).vocab_size
    packed = pack_tokens(
        open_documents(TextSource("demo")), tokenizer, 1, VERIFICATION_TOKENS, 0, 0, vocab_size=vocab_size
    )
    tokens = packed.calibration[0].tolist()
    return verify_folder(folder, configured.architecture, resolve_device(device), tokens, found, missing)


def find_original(
    folder: Path, original: str | None, compression: dict[str, object]
) -> tuple[Original | None, str | None]:
    """The original where it can be found, else the reason why the oracle is left out.

    `original` is where the model lies that the folder was cut from, None for the place that its recipe names;
    `compression` is the content of compression.json.

    Raises:
        RequestError: a named original is not there, or other weights are.
    """
    recipe = Recipe.from_settings(load_settings(folder / "recipe.yaml"), f"{folder}/recipe.yaml")
    named = original or recipe.model or str(demo_model_path())
    try:
        model = resolve_model(named, None if original else recipe.revision)
        fetch_weights(model)
        sha256 = weights_sha256(open_checkpoint(model).index)
    except CompressorError as error:
        if original is not None:
            raise
        return None, f"not checked against the original, which was not found ({error}); name it with --original"
    if sha256 != compression.get("base_sha256"):
        raise RequestError(
            f"the weights of {named} are not those that {folder} was cut from; give the right --original."
        )
    scaled, refitted = recipe.selection.norm_epsilon == "scaled", is_refitted(compression)
    return Original(model.path, scaled, refitted, is_trained(compression), adapter_targets(recipe)), None


def is_trained(compression: Mapping[str, object]) -> bool:
    """Whether the report says that weights were trained after the cut."""
    recovery = compression.get("recovery")
    return isinstance(recovery, Mapping) and recovery.get("training") is not None


def is_refitted(compression: Mapping[str, object]) -> bool:
    """Whether the report says that output projections were refitted."""
    recovery = compression.get("recovery")
    refit = recovery.get("refit") if isinstance(recovery, Mapping) else None
    return isinstance(refit, Mapping) and bool(refit.get("kept"))


def adapter_targets(recipe: Recipe) -> tuple[str, ...] | None:
    """The modules that alone got an adapter in a training by `recipe`; None: all projections were trained."""
    targets = recipe.recovery.targets
    return None if targets is None else tuple(targets)
