"""`compress verify DIR` by itself: find the family, the original and some text, then check."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from compressor.architectures.base import Mixer
from compressor.architectures.registry import architecture_of
from compressor.artifacts import Selection
from compressor.calibration.text import TextSource, open_documents
from compressor.calibration.tokenizer import load_tokenizer
from compressor.calibration.tokens import pack_tokens
from compressor.checkpoint.checkpoint import open_checkpoint
from compressor.checkpoint.config_file import read_json_object
from compressor.checkpoint.fingerprint import weights_sha256
from compressor.checkpoint.source import fetch_weights, resolve_model
from compressor.demo import demo_model_path
from compressor.errors import CompressorError, RequestError
from compressor.loading import resolve_device
from compressor.recipe import Recipe
from compressor.recipe_file import load_settings
from compressor.report import VerificationReport
from compressor.reporting import read_compression
from compressor.verification.run import TRAINED_NOTE, VERIFICATION_TOKENS, Original, verify_folder


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
    checkpoint = open_checkpoint(resolve_model(str(folder.resolve()), None))
    compression = read_compression(folder)
    if compression is None:
        raise RequestError(f"{folder} has no readable compression.json; give a folder that compress wrote.")
    architecture = architecture_of(checkpoint.raw_config)
    _refuse_wrong_selection(folder, architecture.mixers(architecture.load_config(folder), ()))
    found, missing = _find_original(folder, original, compression)
    tokenizer = load_tokenizer(folder, trust_remote_code=False)
    vocab_size = architecture.load_config(folder).get_text_config(decoder=True).vocab_size
    packed = pack_tokens(
        open_documents(TextSource("demo")), tokenizer, 1, VERIFICATION_TOKENS, 0, 0, vocab_size=vocab_size
    )
    tokens = packed.calibration[0].tolist()
    return verify_folder(folder, architecture, resolve_device(device), tokens, found, missing)


def _refuse_wrong_selection(folder: Path, mixers: Sequence[Mixer]) -> None:
    """Whether selection.json names, for every mixer, as many ascending channels of every head as the config keeps."""
    content = read_json_object(folder / "selection.json")
    try:
        selection = Selection.from_json(content)
        fits = selection.kept.keys() == {mixer.layer for mixer in mixers} and all(
            selection.kept[mixer.layer].shape == (mixer.num_k_heads, mixer.head_k_dim)
            and bool((selection.kept[mixer.layer].diff(dim=1) > 0).all())
            and int(selection.kept[mixer.layer].min()) >= 0
            and int(selection.kept[mixer.layer].max()) < selection.head_k_dim
            for mixer in mixers
        )
    except (AttributeError, KeyError, TypeError, ValueError):
        fits = False
    if not fits:
        raise RequestError(
            f"{folder / 'selection.json'} does not name the kept channels of every layer and head that config.json "
            "has; restore the file, or compress the original again."
        )


def _find_original(
    folder: Path, original: str | None, compression: dict[str, object]
) -> tuple[Original | None, str | None]:
    """The original where it can be found, else the reason why the oracle is left out."""
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
    if is_trained(compression):
        return None, TRAINED_NOTE
    return Original(model.path, recipe.selection.norm_epsilon == "scaled", is_refitted(compression)), None


def is_trained(compression: Mapping[str, object]) -> bool:
    """Whether the report says that weights were trained after the cut."""
    recovery = compression.get("recovery")
    return isinstance(recovery, Mapping) and recovery.get("training") is not None


def is_refitted(compression: Mapping[str, object]) -> bool:
    """Whether the report says that output projections were refitted."""
    recovery = compression.get("recovery")
    refit = recovery.get("refit") if isinstance(recovery, Mapping) else None
    return isinstance(refit, Mapping) and bool(refit.get("kept"))
