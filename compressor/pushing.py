"""`compress push`: which files of a compressed folder go to the Hub, and everything that is refused before."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compressor.checkpoint.layout import INDEX_FILE, listed
from compressor.checkpoint.presence import no_folder
from compressor.errors import RequestError
from compressor.export.companions import companion_files
from compressor.export.hub import HubAccount, HubFile, PushedCommit, check_repo_id, find_account, upload
from compressor.export.model_card import card_of_repository
from compressor.preparation import open_model, open_source
from compressor.reporting import read_compression

CARD_FILE = "README.md"
WRITTEN_FILES = ("config.json", CARD_FILE, "compression.json", "recipe.yaml", "selection.json")
"""What every compressed folder has beside its weights."""
_TRAINING_FILES = ("training.jsonl", "training.png")
_SEARCHED_BYTES = 20_000_000


@dataclass(frozen=True, slots=True)
class PushPlan:
    """What would go up, and what to tell the user of it."""

    repo_id: str
    files: tuple[HubFile, ...]
    message: str
    notes: tuple[str, ...]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)


def plan_push(folder: Path, repo_id: str) -> PushPlan:
    """Open a compressed folder and check every file's presence and every tensor's name and shape; sends nothing.

    Args:
        folder: what `compress` wrote.
        repo_id: `owner/name` on the Hub. The card that goes up has it in its load lines.

    Raises:
        RequestError: a bad id, or a folder that compress did not write, that is incomplete or not what it says.
    """
    check_repo_id(repo_id)
    compression = _read_report(folder)
    base = compression.get("base_model")
    if isinstance(base, str) and base.casefold() == repo_id.casefold():
        raise RequestError(f"{repo_id} is the model that {folder} was cut from; choose another name.")
    before, after = _key_dim(folder, compression)
    weights = _checked_weights(folder, after)
    names = [*WRITTEN_FILES, *(path.as_posix() for path in companion_files(folder)), *weights]
    names += [name for name in (INDEX_FILE, *_TRAINING_FILES) if (folder / name).is_file()]
    files = tuple(_hub_file(folder, name, repo_id) for name in sorted(set(names)))
    message = f"{compression.get('method')}: {after} of {before} key/query channels of each head kept"
    return PushPlan(repo_id, files, message, tuple(_notes(folder, files, compression)))


def push(plan: PushPlan, private: bool, say: Callable[[str], None]) -> PushedCommit:
    """Upload what the plan lists, as one commit.

    Args:
        plan: as `plan_push` gives it.
        private: make the repository private.
        say: gets a line for each step.

    Raises:
        RequestError: there is no token, it stands in a file, or it may not write to the repository.
        RunError: the upload broke off; the same call goes on.
    """
    account = find_account()
    _refuse_token_inside(plan.files, account)
    return upload(plan.repo_id, plan.files, private, plan.message, account, say)


def _read_report(folder: Path) -> Mapping[str, Any]:
    problem = no_folder(folder)
    if problem is not None:
        raise RequestError(f"{problem}; give a folder that compress wrote.")
    compression = read_compression(folder)
    if compression is None:
        raise RequestError(f"{folder} has no readable compression.json; give a folder that compress wrote.")
    absent = [name for name in WRITTEN_FILES if not (folder / name).is_file()]
    if absent:
        raise RequestError(f"{folder} lacks {listed(absent)}, which compress wrote; restore it, or compress again.")
    return compression


def _key_dim(folder: Path, compression: Mapping[str, Any]) -> tuple[int, int]:
    key_dim = compression.get("key_dim")
    if isinstance(key_dim, dict) and all(isinstance(key_dim.get(name), int) for name in ("before", "after")):
        return key_dim["before"], key_dim["after"]
    raise RequestError(
        f"{folder / 'compression.json'} does not name the key widths; give a folder that compress wrote."
    )


def _checked_weights(folder: Path, width: int) -> list[str]:
    """Names of the weight files, all of them there and of the shapes that config.json says, with keys of `width`."""
    configured = open_model(str(folder.resolve()), None)
    found = configured.mixers[0].head_k_dim
    if found != width:
        raise RequestError(
            f"{folder / 'config.json'} says a key width of {found}, and compression.json {width}; restore the file "
            "that was changed, or compress again."
        )
    names = [path.name for path in open_source(configured).checkpoint.index.files]
    others = sorted(path.name for path in folder.glob("*.safetensors") if path.name not in names)
    if others:
        raise RequestError(
            f"{folder} holds {listed(others)} beside the weights, and engines load every safetensors file that they "
            "find; move it away."
        )
    return names


def _hub_file(folder: Path, name: str, repo_id: str) -> HubFile:
    path = folder / name
    if name != CARD_FILE:
        return HubFile(name, path, path.stat().st_size)
    card = card_of_repository(path.read_bytes().decode("utf-8", "replace"), repo_id).encode()
    return HubFile(name, card, len(card))


def _notes(folder: Path, files: Sequence[HubFile], compression: Mapping[str, Any]) -> list[str]:
    notes = []
    chosen = {file.name.partition("/")[0] for file in files}
    left_out = sorted(path.name for path in folder.iterdir() if path.name not in chosen)
    if left_out:
        notes.append(f"not uploaded, since it belongs to no checkpoint: {', '.join(left_out)}")
    if not compression.get("verification"):
        notes.append(f"this folder was never verified; `compress verify {folder}` does it")
    home = str(Path.home())
    telling = [file.name for file in files if len(home) > 1 and home.encode() in _searched(file)]
    if telling:
        notes.append(f"{', '.join(telling)} will show paths below {home}; edit what nobody should see")
    return notes


def _refuse_token_inside(files: Sequence[HubFile], account: HubAccount) -> None:
    telling = [file.name for file in files if account.token.encode() in _searched(file)]
    if telling:
        raise RequestError(f"your token of the Hub stands in {listed(telling)}; remove it before anyone can read it.")


def _searched(file: HubFile) -> bytes:
    """The bytes of a file of text, none of weights and other large files."""
    if isinstance(file.content, bytes):
        return file.content
    return b"" if file.is_weights or file.size > _SEARCHED_BYTES else file.content.read_bytes()
