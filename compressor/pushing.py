"""`compress push`: which files of a compressed folder go to the Hub, and everything that is refused before."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub.repocard import REGEX_YAML_BLOCK

from compressor.checkpoint.config_file import CONFIG_FILE
from compressor.checkpoint.layout import INDEX_FILE, listed
from compressor.checkpoint.presence import no_folder
from compressor.errors import RequestError
from compressor.export.companions import CHAT_TEMPLATE_FOLDER
from compressor.export.file_records import FileRecord, differences, read_records
from compressor.export.hub import HubFile, PushedCommit, check_repo_id, find_account, upload
from compressor.export.model_card import card_of_repository
from compressor.export.model_files import CARD_FILE, RECIPE_FILE, REPORT_FILE, files_inside, is_weights, own_files
from compressor.export.tokens_inside import blocks, holds_any, holds_token, masking
from compressor.file_kinds import refuse_no_file
from compressor.json_text import parse_json
from compressor.preparation import open_model, open_source
from compressor.reporting import read_compression

WRITTEN_FILES = (CONFIG_FILE, CARD_FILE, REPORT_FILE, RECIPE_FILE, "selection.json")
"""What every compressed folder has beside its weights."""
_REMEDY = "restore the file, or compress again"
_MAX_CARD_BYTES = 5_000_000


@dataclass(frozen=True, slots=True)
class PushPlan:
    """What would go up, and what to tell the user of it. `refusal` says why `push` will not do it, None: it will."""

    repo_id: str
    files: tuple[HubFile, ...]
    message: str
    notes: tuple[str, ...]
    refusal: str | None = None

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)


def plan_push(folder: Path, repo_id: str) -> PushPlan:
    """Open a compressed folder and check every file, as compress wrote it, and every tensor's shape; sends nothing.

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
    records = read_records(folder / REPORT_FILE, compression)
    own = own_files(folder, records)
    _refuse_what_is_no_file(folder, own)
    before, after = _key_dim(folder, compression)
    names = sorted({*(name for name in own if not is_weights(name)), *_checked_weights(folder, after)})
    changed = _changed(folder, names, records) if records else []
    _refuse_broken_json(folder, names)
    files = tuple(_hub_file(folder, name, repo_id) for name in names)
    message = f"{compression.get('method')}: {after} of {before} key/query channels of each head kept"
    token = own_token()
    notes = [*changed, *_notes(folder, files, compression, bool(records))]
    return PushPlan(repo_id, files, message, tuple(map(masking(token), notes)), _token_refusal(files, token))


def push(plan: PushPlan, private: bool, say: Callable[[str], None]) -> PushedCommit:
    """Upload what the plan lists, as one commit.

    Args:
        plan: as `plan_push` gives it.
        private: make the repository private.
        say: gets a line for each step.

    Raises:
        RequestError: there is no token, one stands in a file, or it may not write to the repository.
        RunError: the upload broke off; the same call goes on.
    """
    account = find_account()
    if plan.refusal is not None:
        raise RequestError(plan.refusal)
    return upload(plan.repo_id, plan.files, private, plan.message, account, say)


def own_token() -> str | None:
    """The token that a push would use; None where there is none, as `find_account` refuses."""
    from huggingface_hub import get_token

    return get_token()


def _refuse_what_is_no_file(folder: Path, names: Sequence[str]) -> None:
    """A link shows readers what stands elsewhere on this machine, and compress writes none."""
    templates = folder / CHAT_TEMPLATE_FOLDER
    for path in (*([templates] if templates.is_symlink() else []), *(folder / name for name in names)):
        if path.is_symlink():
            raise RequestError(
                f"{path} is a link to {path.readlink()}, and only files of the folder itself are pushed; put the file "
                "there, or remove the link."
            )
        refuse_no_file(path, str(path), f"remove it, or {_REMEDY}")
        if not os.access(path, os.R_OK, effective_ids=True):
            raise RequestError(f"{path} cannot be read by this user; change its mode.")


def _changed(folder: Path, names: Collection[str], records: Mapping[str, FileRecord]) -> list[str]:
    """Notes of files that are not as they were written; those that make the model are refused.

    Raises:
        RequestError: weights, their index or the config are not what compress wrote.
    """
    essential = [name for name in {*names, *records} if is_weights(name) or name in (CONFIG_FILE, INDEX_FILE)]
    unknown = sorted(name for name in essential if name not in records)
    if unknown:
        raise RequestError(
            f"compress did not write {folder / unknown[0]}, by {REPORT_FILE}; put back what it wrote, or compress "
            "again: another model goes up with `hf upload`."
        )
    notes = []
    for name, how in differences(folder, records):
        if name in essential:
            raise RequestError(f"{folder / name} {how}; {_REMEDY}: another model goes up with `hf upload`.")
        notes.append(f"{name} {how}" if name not in names else f"{name} was changed since compress wrote it")
    return notes


def _refuse_broken_json(folder: Path, names: Sequence[str]) -> None:
    for path in (folder / name for name in names if name.endswith(".json")):
        try:
            parse_json(path.read_bytes())
        except ValueError as error:
            raise RequestError(f"{path} is not valid JSON ({error}); {_REMEDY}.") from error


def _read_report(folder: Path) -> Mapping[str, Any]:
    problem = no_folder(folder)
    if problem is not None:
        raise RequestError(f"{problem}; give a folder that compress wrote.")
    compression = read_compression(folder)
    if compression is None:
        raise RequestError(f"{folder} has no readable {REPORT_FILE}; give a folder that compress wrote.")
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
    return HubFile(name, *_card(path, repo_id))


def _card(path: Path, repo_id: str) -> tuple[bytes, int]:
    """The card for the repository, and its bytes; what the Hub would refuse behind the weights is refused here."""
    size = path.stat().st_size
    if size > _MAX_CARD_BYTES:
        raise RequestError(f"{path} has {size:,} bytes, and a card at most {_MAX_CARD_BYTES:,}; {_REMEDY}.")
    text = path.read_bytes().decode("utf-8", "replace")
    metadata = REGEX_YAML_BLOCK.search(text)
    try:
        data = None if metadata is None else yaml.safe_load(metadata[2])
        problem = None if isinstance(data, dict | None) else f"it is a {type(data).__name__}, no mapping"
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        problem = " ".join(str(error).split())
    if problem is not None:
        raise RequestError(f"the metadata at the top of {path} cannot be read ({problem}); mend it, or {_REMEDY}.")
    card = card_of_repository(text, repo_id).encode()
    return card, len(card)


def _notes(folder: Path, files: Sequence[HubFile], compression: Mapping[str, Any], recorded: bool) -> list[str]:
    notes = []
    chosen = {file.name for file in files}
    others = {path.name for path in folder.iterdir() if path.name not in {name.partition("/")[0] for name in chosen}}
    # Below a folder of which nothing goes up, nothing is named.
    inside = {name for name in files_inside(folder) if name not in chosen and name.partition("/")[0] not in others}
    left_out = [name if name.isprintable() else ascii(name) for name in sorted(others | inside)]
    if left_out:
        why = "which compress did not write"
        if not recorded:
            why = f"which has no usual name, and {REPORT_FILE} of this older folder does not say what compress wrote"
        notes.append(f"not uploaded: {', '.join(left_out)}, {why}")
    if not compression.get("verification"):
        notes.append(f"this folder was never verified; `compress verify {folder}` does it")
    home = str(Path.home())
    telling = [file.name for file in files if len(home) > 1 and _holds(file, home)]
    if telling:
        notes.append(f"{', '.join(telling)} will show paths below {home}; edit what nobody should see")
    return notes


def _token_refusal(files: Sequence[HubFile], token: str | None) -> str | None:
    """Why the files cannot be shown to anyone: a token is read and used within minutes."""
    masked = masking(token)
    own = [masked(file.name) for file in files if token is not None and (token in file.name or _holds(file, token))]
    if own:
        return f"your token of the Hub stands in {listed(own)}; remove it before anyone can read it."
    others = [
        masked(file.name)
        for file in files
        if masked(file.name) != file.name or holds_token(blocks(file.content, file.is_weights))
    ]
    if others:
        return (
            f"a token of the Hub (hf_ and 34 letters and digits) stands in {listed(others)}; remove it before anyone "
            "can read it."
        )
    return None


def _holds(file: HubFile, word: str) -> bool:
    """Whether the word stands in a file, of weights in what precedes the tensors."""
    return holds_any(blocks(file.content, file.is_weights), (word.encode("utf-8", "surrogateescape"),))
