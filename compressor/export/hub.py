"""Upload of a folder's files to a model repository of the Hub, as one commit.

Weight files go up one by one before the commit: whoever reads the repository sees all of the new files or none, and a
run that died goes on with the file at which it stopped.
https://huggingface.co/docs/huggingface_hub/guides/upload#preupload-lfs-files-before-commit
"""

from __future__ import annotations

import json
import re
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from compressor.errors import CompressorError, RequestError, RunError

# Left beside the new ones, engines would read them: vLLM loads every safetensors file that it finds.
_WEIGHTS = (".safetensors", ".safetensors.index.json")
_MODELS = (*_WEIGHTS, ".bin", ".bin.index.json", ".gguf", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx")
_OWN_FILE, _CONFIG, _ADAPTER = "compression.json", "config.json", "adapter_config.json"
_WHOLE = "the repository has all of the new files or none"
_REMEDY = f"{_WHOLE}, and `compress push` of the same folder goes on."
_REFUSED_REMEDY = f"{_WHOLE}; mend what is named, and push again."
# The Hub's answers to what it was sent, which it gives again to the same.
_REFUSALS = (400, 413, 422)
_TOKEN = re.compile(r"[\x21-\x7e]+")


@dataclass(frozen=True, slots=True)
class HubFile:
    """One file to upload: its path in the repository, its bytes or where they stand, and how many there are."""

    name: str
    content: bytes | Path
    size: int

    @property
    def is_weights(self) -> bool:
        return self.name.endswith(".safetensors")


@dataclass(frozen=True, slots=True)
class PushedCommit:
    """The commit that has the files, as an address for people and as its hash."""

    url: str
    commit: str


@dataclass(frozen=True, slots=True)
class HubAccount:
    """A token of the Hub, kept out of every text: of this object's, too."""

    token: str

    def __repr__(self) -> str:
        return "HubAccount(token=***)"


def check_repo_id(repo_id: str) -> None:
    """Refuse what is no id of a repository in a namespace.

    Raises:
        RequestError: it is not `owner/name` as the Hub writes ids.
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(repo_id)
        valid = repo_id.count("/") == 1
    except HFValidationError:
        valid = False
    if not valid:
        raise RequestError(
            f"{repo_id!r} is not the id of a Hub repository; give it as owner/name, of letters, digits, '-', '_' and "
            "'.', at most 96 of them."
        )


def find_account() -> HubAccount:
    """The token that the Hub's client finds: HF_TOKEN, else what `hf auth login` stored. Nothing is sent.

    Raises:
        RequestError: there is none, it cannot be sent, or the Hub is offline.
    """
    from huggingface_hub import constants, get_token

    if constants.HF_HUB_OFFLINE:
        raise RequestError("the Hub is offline (HF_HUB_OFFLINE=1); unset it to push.")
    token = get_token()
    if token is None:
        raise RequestError(
            "there is no token of the Hub to push with; log in with `hf auth login`, or set HF_TOKEN to a token that "
            "may write."
        )
    if not _TOKEN.fullmatch(token):
        raise RequestError("the token of the Hub holds a space or a character outside ASCII; set HF_TOKEN anew.")
    return HubAccount(token)


def check_repository(repo_id: str, private: bool, account: HubAccount) -> None:
    """Ask the Hub, before any work, whether `upload` would be refused, as far as can be known without writing.

    Raises:
        RequestError: the Hub does not accept the token, it may not write or not in that namespace, or the repository
            cannot take the files.
        RunError: the Hub cannot be reached.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError

    api = HfApi(token=account.token)
    with _hub_errors(account, "asking the Hub whose token this is", "check the connection."):
        owner = api.whoami()
    role = owner.get("auth", {}).get("accessToken", {}).get("role")
    if role == "read":
        raise RequestError("the token of the Hub may only read; set HF_TOKEN to one that may write.")
    names = [owner["name"], *(each["name"] for each in owner.get("orgs", ()))]
    namespace = repo_id.partition("/")[0]
    # Fine-grained tokens may hide organisations that they may write to.
    if role == "write" and namespace.casefold() not in [name.casefold() for name in names]:
        raise RequestError(
            f"the token is of {names[0]}, who is not in {namespace}; push under {' or '.join(names)}, or use a token "
            f"of {namespace}."
        )
    with _hub_errors(account, f"looking at the repository {repo_id}", "check the connection."):
        try:
            info = api.model_info(repo_id)
        except RepositoryNotFoundError:
            return
    _refuse_repository(repo_id, [each.rfilename for each in info.siblings or ()], private and info.private is False)


def upload(
    repo_id: str, files: Sequence[HubFile], private: bool, message: str, account: HubAccount, say: Callable[[str], None]
) -> PushedCommit:
    """Make the repository where it is missing, upload the files and remove weight files that are not among them.

    Args:
        private: make the repository private; refused where it is there and public.
        message: first line of the commit.
        say: gets a line for each step.

    Raises:
        RequestError: the token may not write there, or the repository holds a model that compress did not write.
        RunError: the upload broke off; the repository is as it was, and the same call goes on.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    api = HfApi(token=account.token)
    with _hub_errors(account, f"opening the repository {repo_id}", _REMEDY):
        api.create_repo(repo_id, private=private or None, exist_ok=True)
        info = api.model_info(repo_id)
    remote = [sibling.rfilename for sibling in info.siblings or ()]
    _refuse_repository(repo_id, remote, private and info.private is False)
    additions = {
        file: CommitOperationAdd(file.name, file.content if isinstance(file.content, bytes) else str(file.content))
        for file in files
    }
    weights = [file for file in files if file.is_weights]
    with _hub_errors(account, f"the upload to {repo_id}", _REMEDY):
        for position, file in enumerate(weights, 1):
            say(f"uploading {file.name} ({file.size:,} bytes), {position} of {len(weights)} weight files")
            api.preupload_lfs_files(repo_id, [additions[file]], free_memory=False)
        stale = stale_weights(remote, files)
        for name in stale:
            say(f"removing {name}, which is not among the new files")
        say(f"committing {len(files)} files")
        deletions = [CommitOperationDelete(name) for name in stale]
        done = api.create_commit(
            repo_id, [*additions.values(), *deletions], commit_message=message, parent_commit=info.sha
        )
    return PushedCommit(f"{api.endpoint}/{repo_id}", done.oid)


def stale_weights(remote: Sequence[str], files: Sequence[HubFile]) -> list[str]:
    """Weight files and indices beside which the new files would come, and which they do not replace."""
    new = {file.name for file in files}
    return [name for name in remote if name not in new and "/" not in name and name.endswith(_WEIGHTS)]


def _refuse_repository(repo_id: str, remote: Sequence[str], is_public: bool) -> None:
    if is_public:
        raise RequestError(
            f"{repo_id} is there already and public; make it private on the Hub, choose another name, or leave out "
            "--private."
        )
    models = [name for name in remote if name == _CONFIG or name.endswith(_MODELS)]
    if _OWN_FILE not in remote and models:
        raise RequestError(
            f"{repo_id} holds a model that compress did not write ({models[0]}); choose another name, or delete that "
            "repository first."
        )
    if _ADAPTER in remote:
        raise RequestError(
            f"{repo_id} holds {_ADAPTER}, and transformers would apply that adapter to the new weights; remove it on "
            "the Hub first, or choose another name."
        )


@contextmanager
def _hub_errors(account: HubAccount, doing: str, remedy: str) -> Iterator[None]:
    """Turn what the Hub's client raises into one sentence each, without the token in it."""
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]

    try:
        yield
    # HTTPError is the base class of the HTTP library. The client raises RuntimeError for a file that did not get
    # through, and ValueError for what the Hub refuses of a card or an answer that it cannot read.
    except (OSError, HTTPError, RuntimeError, ValueError) as error:
        chain = _causes(error)
        told = _hub_error(chain, doing, remedy, account)
        # As --debug prints it, with what was being handled when it was raised.
        tells_token = account.token in "".join(traceback.format_exception(error))
        raise told from None if tells_token else error


def _causes(error: BaseException) -> list[BaseException]:
    chain = [error]
    while chain[-1].__cause__ is not None:
        chain.append(chain[-1].__cause__)
    return chain


def _hub_error(chain: Sequence[BaseException], doing: str, remedy: str, account: HubAccount) -> CompressorError:
    from huggingface_hub.errors import HfHubHTTPError

    answers = [error for error in chain if isinstance(error, HfHubHTTPError)]
    told = (answers[0].server_message or str(answers[0])) if answers else str(chain[-1]) or type(chain[-1]).__name__
    if isinstance(chain[-1], json.JSONDecodeError):
        told = f"{doing} failed (what answered is no Hub, for it sent no JSON)"
        return RunError(f"{told}; check the connection and HF_ENDPOINT.")
    reason = told.strip().splitlines()[0].rstrip(".").replace(account.token, "***")
    # The status of a file's own upload is the storage's, which knows nothing of tokens.
    status = answers[0].response.status_code if answers and answers[0] is chain[0] else None
    if status == 401:
        return RequestError(
            f"the Hub does not accept the token ({reason}); log in with `hf auth login`, or set HF_TOKEN to a token "
            "that may write."
        )
    if status == 403:
        return RequestError(
            f"the token may not do this ({reason}); use one that may write to the repository, or push under a name "
            "of your own."
        )
    if remedy == _REMEDY and (status in _REFUSALS or isinstance(chain[0], ValueError)):
        remedy = _REFUSED_REMEDY
    return RunError(f"{doing} failed ({reason}); {remedy}")
