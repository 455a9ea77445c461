"""The verb `compress push`, and the push at the end of a run. Imports no torch at start-up."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from compressor.command_words import path
from compressor.errors import CompressorError, RequestError

if TYPE_CHECKING:
    from compressor.pushing import PushPlan


def push_command(words: list[str]) -> int:
    """`compress push`; returns the exit status."""
    arguments = _parser().parse_args(words)
    from compressor.export.hub import find_account
    from compressor.export.tokens_inside import masking
    from compressor.pushing import own_token, plan_push

    console, masked = Console(), masking(own_token())
    plan = plan_push(arguments.folder, arguments.repository)
    for note in plan.notes:
        _say(console, f"note: {note}")
    if not arguments.dry_run:
        return _push(plan, arguments.folder, arguments.private, console)
    for file in plan.files:
        _say(console, f"{file.size:>16,}  {masked(file.name)}")
    _say(console, f"{plan.size:>16,}  bytes in {len(plan.files)} files")
    if plan.refusal is not None:
        _say(console, f"note: a push would be refused: {plan.refusal}")
    try:
        find_account()
    except RequestError as refusal:
        _say(console, f"note: a push would be refused: {refusal}")
    kind = "private" if arguments.private else "public, or what its owner's new repositories are"
    _say(console, f"nothing was uploaded; it would go to {plan.repo_id} ({kind})")
    return 0


def check_push(repo_id: str | None, private: bool, model: str | None, asks_hub: bool) -> None:
    """Before a run that pushes its result: is there anything that would stop the push at its end?

    Args:
        repo_id: where to; None pushes nothing.
        private: whether the repository is to be private.
        model: what the run cuts.
        asks_hub: whether to ask the Hub if it would take the result.

    Raises:
        RequestError: a bad id or that of `model`, no token or one that may not write there, a repository that cannot
            take the result, or `private` without `repo_id`.
        RunError: the Hub cannot be reached.
    """
    if repo_id is None:
        if private:
            raise RequestError("--private belongs to --push-to-hub; name a repository, or leave it out.")
        return
    from compressor.export.hub import check_repo_id, check_repository, find_account

    check_repo_id(repo_id)
    if model is not None and model.casefold() == repo_id.casefold():
        raise RequestError(f"--push-to-hub {repo_id} would replace the model that is cut; choose another name.")
    account = find_account()
    if asks_hub:
        check_repository(repo_id, private, account)


def push_result(folder: Path, repo_id: str, private: bool, console: Console) -> int:
    """Push what a run has just written; the exit status.

    Raises:
        CompressorError: as `compressor.pushing`, with what to do about it: the result is there.
    """
    from compressor.pushing import plan_push

    try:
        return _push(plan_push(folder, repo_id), folder, private, console)
    except CompressorError as error:
        raise type(error)(
            f"the result stands in {folder}, and was not pushed: {error} Then `compress push` pushes it."
        ) from error


def _push(plan: PushPlan, folder: Path, private: bool, console: Console) -> int:
    from compressor.pushing import push

    try:
        done = push(plan, private, lambda line: _say(console, line))
    except KeyboardInterrupt:
        print(
            f"compress: interrupted; {plan.repo_id} has all of the new files or none, and "
            f"`compress push {folder} {plan.repo_id}` goes on where it stopped.",
            file=sys.stderr,
        )
        return 130
    _say(console, f"pushed: {done.url} (commit {done.commit})")
    return 0


def _say(console: Console, line: str) -> None:
    console.print(line, soft_wrap=True, highlight=False, markup=False, emoji=False)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="compress push",
        description="Upload a compressed folder to the Hub, as one commit. The token is that of `hf auth login`, or "
        "HF_TOKEN.",
        allow_abbrev=False,
    )
    parser.add_argument("folder", type=path("DIR"), metavar="DIR", help="what compress wrote")
    parser.add_argument("repository", metavar="REPO", help="owner/name on the Hub; made where it is missing")
    parser.add_argument("--private", action="store_true", help="make the repository private")
    parser.add_argument("--dry-run", action="store_true", help="list what would go up, send nothing")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    return parser
