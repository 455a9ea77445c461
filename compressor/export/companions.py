"""The source's other files: tokenizer, chat templates, processor, licence, code. Copied, never loaded and saved."""

from __future__ import annotations

import shutil
import stat
from pathlib import Path

from compressor.errors import RequestError
from compressor.export.disk import translate_write_errors

# A larger file is weights in a format that is not listed here.
MAX_COMPANION_BYTES = 200_000_000
# The one folder that transformers' tokenizers and processors read.
CHAT_TEMPLATE_FOLDER = "additional_chat_templates"

_WEIGHT_SUFFIXES = (
    frozenset({".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".ot", ".pte", ".nemo"})
    | {".h5", ".hdf5", ".keras", ".pb", ".tflite", ".msgpack", ".npz", ".npy"}
    | {".gguf", ".ggml", ".onnx", ".onnx_data", ".mlmodel", ".engine"}
    | {".pkl", ".pickle", ".joblib", ".tar", ".zip"}
)
_WRITTEN_ANEW = frozenset({"config.json", "readme.md", "compression.json", "selection.json", "recipe.yaml"}) | {
    "training.jsonl",
    "training.png",
}
_OF_TRAINING = frozenset({"trainer_state.json", "zero_to_fp32.py", "latest"})
_OF_TRAINING_PREFIXES = ("optimizer.", "scheduler.", "training_args.", "rng_state", "events.out.tfevents")
# transformers would apply the adapter unasked.
_OF_ADAPTERS = frozenset({"adapter_config.json"})
# Keys and passwords that lie beside a model are no part of it, and a copy may be published.
_SECRET_SUFFIXES = (".pem", ".key", ".p12", ".pfx", ".jks", ".keystore", ".kdbx", ".ppk", ".env")
_SECRET_PREFIXES = ("id_rsa", "id_dsa", "id_ecdsa", "id_ed25519")
_SECRET_STEMS = frozenset(
    {"token", "hf_token", "secret", "secrets", "credential", "credentials", "service_account"}
) | {
    *("password", "passwords", "passwd", "htpasswd", "api_key", "apikey", "authorized_keys", "known_hosts"),
    "kubeconfig",
}


def companion_files(source: Path) -> tuple[Path, ...]:
    """Paths, relative to `source` and sorted, of the files that belong in the output unchanged.

    Every file at the top that is not weights or their index in any format, training state, hidden, named as keys and
    passwords are, over `MAX_COMPANION_BYTES` or written anew; and the chat templates of `CHAT_TEMPLATE_FOLDER`.

    Raises:
        RequestError: a link among them leads nowhere, as after an interrupted download.
    """
    candidates = [path for path in source.iterdir() if not _is_excluded(path.name)]
    templates = source / CHAT_TEMPLATE_FOLDER
    if templates.is_dir():
        candidates += [path for path in templates.glob("*.jinja") if not path.name.startswith(".")]
    return tuple(sorted(path.relative_to(source) for path in candidates if _is_small_file(path)))


def copy_companions(source: Path, destination: Path) -> tuple[str, ...]:
    """Copy `companion_files(source)` into the folder `destination`; the names copied, with `/` between folders.

    Links are followed and only bytes are copied: the output has regular files with the mode of new
    ones. An existing file is never written to, since it could be a link to somewhere else.

    Raises:
        RequestError: as `companion_files`.
        RunError: no space left.
    """
    files = companion_files(source)
    with translate_write_errors(destination, None):
        for name in files:
            target = destination / name
            target.parent.mkdir(exist_ok=True)
            with (source / name).open("rb") as reader, target.open("xb") as writer:
                shutil.copyfileobj(reader, writer, 1 << 20)
    return tuple(name.as_posix() for name in files)


def looks_secret(name: str) -> bool:
    """Whether a file of this name holds a key, a password or the like."""
    lower = name.rpartition("/")[2].casefold()
    return (
        lower.endswith(_SECRET_SUFFIXES)
        or lower.startswith(_SECRET_PREFIXES)
        or lower.partition(".")[0] in _SECRET_STEMS
    )


def _is_excluded(name: str) -> bool:
    lower = name.casefold()
    return (
        looks_secret(name)
        or lower.startswith((".", *_OF_TRAINING_PREFIXES))
        or lower in _WRITTEN_ANEW | _OF_TRAINING | _OF_ADAPTERS
        or lower.endswith((".index.json", "_results.json"))
        or ".safetensors" in lower
        or Path(lower).suffix in _WEIGHT_SUFFIXES
    )


def _is_small_file(path: Path) -> bool:
    try:
        status = path.stat()
    except OSError as error:
        if not path.is_symlink():
            raise
        raise RequestError(
            f"{path} is a link to {path.readlink()}, which leads to no file ({error.strerror}); download the "
            "checkpoint again, or remove it."
        ) from error
    return stat.S_ISREG(status.st_mode) and status.st_size <= MAX_COMPANION_BYTES
