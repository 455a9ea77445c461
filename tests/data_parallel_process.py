"""Pairs of processes that do with `compressor.data_parallel` what runs do, without a model.

    python -m tests.data_parallel_process

Launches two processes for every way to end in `MODES`, as torch's launcher does but without its seconds of imports, and
prints for each of them one JSON object: {"mode", "exit", "lines"}. `lines` are what the processes said, by number.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, distributed

from compressor.data_parallel import Processes, join_processes, leave_processes
from compressor.errors import CompressorError, RequestError

MODES = ("succeed", "both fail", "first fails", "second fails", "second is killed")


@dataclass(frozen=True)
class Sums:
    """Every kind of field that statistics have."""

    layers: tuple[int, ...]
    grams: Tensor
    counts: Tensor
    tokens: int
    absent: Tensor | None = None


def succeed(processes: Processes) -> dict[str, object]:
    index = processes.index
    whole = torch.arange(12, dtype=torch.float64).reshape(2, 3, 2).div(3)
    own = Sums((0, 2), (whole * (index + 1))[1].T, torch.tensor([index, 5]), 10 + index)
    total = processes.summed(own)
    return {
        "share": list(processes.share("abcde")),
        "from_main": processes.from_main(lambda: {"made in": index}),
        "grams": total.grams.tolist(),
        "counts": total.counts.tolist(),
        "tokens": total.tokens,
        "layers": total.layers,
        "absent": total.absent,
        "own": own.grams.tolist(),
    }


def end(mode: str, processes: Processes) -> None:
    if mode == "both fail":
        raise RequestError("the same in both.")
    if mode == "second is killed" and processes.index == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if mode == "second fails" and processes.index == 1:
        raise RequestError("only in the second.")
    if mode == "first fails" and processes.index == 0:
        raise RequestError("only in the first.")
    processes.from_main(lambda: time.sleep(0.5))
    processes.wait_for_all()


def run(mode: str, index: int, output: Path) -> int:
    lines: list[object] = []
    try:
        # Twice: what the first run left in the store must not answer in the second.
        for _ in range(2):
            processes = join_processes("cpu")
            with processes.failing_together():
                lines.append(succeed(processes))
        if mode == "succeed":
            leave_processes()
            return 0
        processes = join_processes("cpu")
        with processes.failing_together():
            end(mode, processes)
    except CompressorError as error:
        lines.append({"error": str(error)})
        return error.exit_code
    finally:
        output.write_text(json.dumps(lines), encoding="utf-8")
    return 0


def launch(mode: str, folder: Path) -> dict[str, object]:
    """Both processes with the environment that launchers give; when one fails, the other is told to end."""
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True)
    children: dict[int, int] = {}
    for index in range(2):
        child = os.fork()
        if child == 0:
            os.environ |= {"RANK": str(index), "LOCAL_RANK": str(index), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
            os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
            status = 99
            try:
                status = run(mode, index, folder / str(index))
            except SystemExit as stop:
                status = int(stop.code or 0)
            finally:
                os._exit(status)
        children[child] = index
    statuses: dict[int, int] = {}
    while children:
        ended, status = os.wait()
        statuses[children.pop(ended)] = os.waitstatus_to_exitcode(status)
        if status:
            for child in children:
                os.kill(child, signal.SIGTERM)
    outputs = [folder / str(index) for index in range(2)]
    said = [json.loads(path.read_text(encoding="utf-8")) if path.exists() else None for path in outputs]
    return {"mode": mode, "exit": [statuses[index] for index in range(2)], "lines": said}


def main() -> None:
    for mode in MODES:
        started = time.monotonic()
        with TemporaryDirectory() as folder:
            ended = launch(mode, Path(folder))
        print(json.dumps(ended | {"seconds": time.monotonic() - started}), flush=True)


if __name__ == "__main__":
    main()
    sys.exit()
