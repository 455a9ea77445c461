"""Documents of lm-eval's own RULER tasks as JSON, made by its functions in a process of its own without network.

lm-eval's package imports far more than RULER needs, and its module of needles downloads a sentence splitter when it is
imported. So its RULER modules are entered as bare packages, as a process of a rank that leaves downloads to rank 0.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import re
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator
from importlib.machinery import PathFinder
from itertools import islice
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

import numpy
import wonderwords

DOCUMENTS = 4
WORDS = 500
LENGTHS = {
    "niah_single_1": 700,
    "niah_single_3": 900,
    "niah_multikey_1": 900,
    "niah_multikey_2": 700,
    "niah_multikey_3": 900,
    "niah_multivalue": 900,
    "niah_multiquery": 900,
    "vt": 4096,
    "cwe_short": 1500,
    "cwe": 4096,
    "fwe": 1500,
}


def lm_eval_documents(essay: Path) -> dict[str, Any]:
    """`DEPTHS` of the needles, and for each task of `LENGTHS` its first documents; `essay` is the text haystack."""
    environment = {**os.environ, "LOCAL_RANK": "1", "OMP_NUM_THREADS": "1"}
    finished = subprocess.run(
        [sys.executable, __file__, str(essay)], env=environment, capture_output=True, text=True, timeout=120
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    return json.loads(finished.stdout.splitlines()[-1])


def count_tokens(text: str) -> int:
    return len(re.findall(r"\w+|[^\w\s]", text))


def split_sentences(text: str) -> list[str]:
    return re.split(r"(?<=[.!?]) ", text)


def _tokenizer(*arguments: object) -> Any:
    return lambda text: SimpleNamespace(input_ids=range(count_tokens(text)))


def _first(samples: Iterable[int], desc: str = "") -> Iterator[int]:
    """Stands for the progress bar around the 500 samples of a task."""
    return islice(samples, DOCUMENTS)


def _no_network(*arguments: object) -> NoReturn:
    raise OSError("the test allows no network")


def _ruler_module(name: str) -> ModuleType:
    package, search = "", None
    for part in ("lm_eval", "tasks", "ruler"):
        package = f"{package}.{part}".removeprefix(".")
        if package not in sys.modules:
            spec = PathFinder.find_spec(package, search)
            assert spec is not None
            assert spec.submodule_search_locations is not None
            sys.modules[package] = ModuleType(package)
            sys.modules[package].__path__ = list(spec.submodule_search_locations)
        search = sys.modules[package].__path__
    return importlib.import_module(f"lm_eval.tasks.ruler.{name}")


def _needle_functions(essay: str) -> tuple[list[int], dict[str, Any]]:
    prepare, tasks = _ruler_module("prepare_niah"), _ruler_module("niah_utils")
    prepare.__dict__["tqdm"] = _first
    prepare.__dict__["cached_sent_tokenize"] = split_sentences
    own_haystack = tasks.get_haystack
    tasks.__dict__["get_haystack"] = lambda type_haystack: (
        essay.split() if type_haystack == "essay" else own_haystack(type_haystack=type_haystack)
    )
    tasks.__dict__["get_tokenizer"] = _tokenizer
    depths = [int(depth) for depth in prepare.DEPTHS]
    return depths, {name: getattr(tasks, name) for name in LENGTHS if name.startswith("niah")}


def main(essay: str) -> None:
    socket.socket.connect = _no_network  # type: ignore[method-assign]
    # lm-eval makes every pair of an adjective and a noun, which takes seconds with the whole lists.
    categories = {name: words[:WORDS] for name, words in wonderwords.RandomWord()._categories.items()}
    wonderwords.RandomWord = lambda: SimpleNamespace(_categories=categories)
    depths, functions = _needle_functions(essay)
    for names, module, function in (
        (("vt",), "vt_utils", "get_vt_dataset"),
        (("cwe", "cwe_short"), "cwe_utils", "get_cw_dataset"),
        (("fwe",), "fwe_utils", "fwe_download"),
    ):
        loaded = _ruler_module(module)
        loaded.__dict__.update(get_tokenizer=_tokenizer, tqdm=_first)
        functions |= dict.fromkeys(names, getattr(loaded, function))
    documents: dict[str, Any] = {}
    for name, length in LENGTHS.items():
        random.seed(length)
        numpy.random.seed(length)
        test = functions[name](max_seq_lengths=[length], pretrained="any")["test"]
        documents[name] = [dict(row) for row in test]
    print(json.dumps({"DEPTHS": depths, **documents}))


if __name__ == "__main__":
    main(Path(sys.argv[1]).read_text(encoding="utf-8"))
