"""From what the user named to a local folder: a folder as it is, or a snapshot of a Hub model in the Hub's cache."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from compressor.checkpoint.config_file import CONFIG_FILE
from compressor.checkpoint.layout import SINGLE_FILE, read_weight_map
from compressor.checkpoint.presence import is_there, no_folder
from compressor.errors import CompressorError, RequestError, RunError

# Everything a model folder may hold beside weights: config, index, tokenizer, chat template, processor, licence, code,
# and the card, whose metadata names the licence.
_COMPANION_PATTERNS = (
    *("*.json", "*.txt", "*.model", "*.jinja", "*.py", "*.tiktoken", "*.spm", "*.vocab", "*.bpe", "*.yaml"),
    *("README.md", "LICEN[CS]E*", "licen[cs]e*", "NOTICE*", "COPYING*", "USAGE*"),
)

ADAPTER_FILE = "adapter_config.json"


@dataclass(frozen=True)
class ModelFolder:
    """A model's files. `name` is the Hub id or the folder's name; `revision` the commit of a Hub model, else None."""

    path: Path
    name: str
    revision: str | None


def resolve_model(model: str, revision: str | None) -> ModelFolder:
    """Find the folder `model`, or fetch all files but the weights of the Hub model of that id.

    An existing folder wins over a Hub model of the same name, and for a path nothing is looked up on
    the Hub. `fetch_weights` completes a Hub model.

    Raises:
        RequestError: there is no such model, it is not accessible, or it has no config.json.
    """
    # os.path answers for any string; pathlib raises for a name that is too long or a user that is unknown.
    name = os.path.expanduser(model)  # noqa: PTH111
    if os.path.isdir(name):  # noqa: PTH112
        return _local_folder(Path(name), revision)
    if os.path.lexists(name) or not model or _is_path(model):
        raise RequestError(_not_a_folder(model, name))
    return _hub_snapshot(model, revision)


def fetch_weights(folder: ModelFolder) -> None:
    """Complete the snapshot of a Hub model with the files that stock transformers reads; a local folder is complete.

    Raises:
        RequestError: the Hub model has no safetensors weights, or cannot be reached.
        RunError: no space left.
    """
    if folder.revision is None or _has_weights(folder.path):
        return
    from huggingface_hub import snapshot_download

    files = sorted({SINGLE_FILE, *read_weight_map(folder.path).values()})
    with _hub_errors(folder.name, folder.revision):
        snapshot_download(folder.name, revision=folder.revision, allow_patterns=files)
    if not _has_weights(folder.path):
        raise RequestError(
            f"{folder.name} at {folder.revision} has no {SINGLE_FILE} and no files that an index of safetensors names; "
            "pickled weights are not read: convert to safetensors first."
        )


def _has_weights(path: Path) -> bool:
    names = set(read_weight_map(path).values()) or {SINGLE_FILE}
    return all((path / name).is_file() for name in names)


def _local_folder(path: Path, revision: str | None) -> ModelFolder:
    if revision is not None:
        raise RequestError(f"revision {revision!r} is for Hub models, and {path} is a local folder; leave it out.")
    try:
        entries = sorted(path.iterdir())
        inner = [entry for entry in (path, *entries) if (entry / CONFIG_FILE).is_file()]
    except OSError as error:
        raise RequestError(f"{path} cannot be read ({error.strerror}); check its permissions.") from error
    if not entries:
        raise RequestError(f"{path} is empty; give a folder that holds {CONFIG_FILE} and safetensors weights.")
    if not inner and (path / ADAPTER_FILE).is_file():
        raise RequestError(
            f"{path} holds an adapter ({ADAPTER_FILE}) and no model; merge it into its base model, and give that."
        )
    if path not in inner and not is_there(path / CONFIG_FILE):
        hint = f"did you mean {inner[0]}?" if inner else f"give a folder that holds {CONFIG_FILE}."
        raise RequestError(f"{path} has no {CONFIG_FILE}; {hint}")
    return ModelFolder(path.absolute(), Path(os.path.abspath(path)).name, None)  # noqa: PTH100 - links stay


def _is_path(model: str) -> bool:
    """Whether it can only be a path: a Hub id is `name` or `org/name`."""
    return model.startswith((".", "/", "~")) or model.endswith("/") or model.count("/") > 1 or "\\" in model


def _not_a_folder(model: str, name: str) -> str:
    if not model:
        return "the model is an empty string; give a folder or a Hub id such as org/name."
    if os.path.lexists(name):
        return f"{no_folder(name)}; give the folder that holds {CONFIG_FILE} and safetensors weights."
    return f"there is no folder {model}; check the path, or give a Hub id such as org/name."


def _hub_snapshot(repo_id: str, revision: str | None) -> ModelFolder:
    from huggingface_hub import snapshot_download

    with _hub_errors(repo_id, revision):
        path = Path(snapshot_download(repo_id, revision=revision, allow_patterns=list(_COMPANION_PATTERNS)))
    if not (path / CONFIG_FILE).is_file():
        raise RequestError(f"{repo_id} at {path.name} has no {CONFIG_FILE}; give a model of the transformers layout.")
    return ModelFolder(path, repo_id, path.name)


@contextmanager
def _hub_errors(repo_id: str, revision: str | None) -> Iterator[None]:
    """Turn what the Hub's client raises into one sentence each."""
    from huggingface_hub.errors import HFValidationError, HTTPError  # type: ignore[attr-defined]

    try:
        yield
    # HTTPError is the base class of the HTTP library, which differs between versions of the client.
    except (OSError, HTTPError, HFValidationError) as error:
        raise _hub_error(error, repo_id, revision) from error


def _hub_error(error: Exception, repo_id: str, revision: str | None) -> CompressorError:
    from huggingface_hub import constants, errors

    where = f"{repo_id} (revision {revision!r})" if revision is not None else repo_id
    if isinstance(error, errors.GatedRepoError):
        return RequestError(
            f"{repo_id} is gated; accept its licence at {constants.ENDPOINT}/{repo_id} and log in with `hf auth login`."
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return RequestError(
            f'revision "{revision}" does not exist in {repo_id}; give a branch, a tag or a commit of it.'
        )
    if isinstance(error, errors.RepositoryNotFoundError | errors.HFValidationError):
        return RequestError(
            f"there is no folder and no Hub model called {repo_id}; check the spelling, "
            "or log in with `hf auth login` if it is private."
        )
    if isinstance(error, errors.OfflineModeIsEnabled) or constants.HF_HUB_OFFLINE:
        return RequestError(
            f"{where} is not complete in the Hub cache {constants.HF_HUB_CACHE}, there is no folder of that name, and "
            "the Hub is offline (HF_HUB_OFFLINE); unset it, or give a local folder."
        )
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return RunError(
            f"no space left in the Hub cache {constants.HF_HUB_CACHE} for {where}; free some or set HF_HOME."
        )
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    return RequestError(
        f"{where} is not complete in the Hub cache and could not be fetched ({reason}); "
        "check the connection, or give a local folder."
    )
