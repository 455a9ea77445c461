"""Several processes of one run, as `accelerate launch` starts them: they share the calibration, and fail together.

They wait for each other by asking the launcher's store, not in a collective operation: a wait has no limit, since the
first process may evaluate for hours, and yet ends when another fails, when Ctrl-C comes, or when the launcher says so.
Collective operations are entered only after every process has said that it comes.
"""

from __future__ import annotations

import base64
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, TypeVar, final

import torch
from accelerate import Accelerator, PartialState
from torch import Tensor, distributed
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroup, Store
from torch.distributed.rendezvous import rendezvous

from compressor.errors import CompressorError, RequestError, RunError
from compressor.launched import fully_sharded_version, launch
from compressor.loading import resolve_device
from compressor.naming import Naming, option_of
from compressor.recovery.parallel import refuse_other_engines

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    Sums = TypeVar("Sums", bound=DataclassInstance)

Value = TypeVar("Value")

SECONDS_BETWEEN_QUESTIONS = 0.05
SECONDS_TO_SPEAK = 3.0
"""How long a process lets another, which failed too, say why, before it ends."""

# Keys of the store, and what the second is set to where the main process says why.
_FAILED, _MAIN, _SPEAKS = "failed", "main", "speaks"


class FailedElsewhereError(RunError):
    """Another process of the run failed, and says why."""

    def __init__(self) -> None:
        super().__init__("another process of this run failed, whose own message says why; this one was stopped.")


@final
class Processes:
    """The processes of a run, `index` this one's number among `count`; all of them make the same calls in turn.

    `store` and `group` (whose tensors are on the CPU) are None for a process that is alone.
    """

    def __init__(self, index: int, count: int, store: Store | None, group: ProcessGroup | None) -> None:
        self.index = index
        self.count = count
        self._store = store
        self._group = group
        self._calls = 0

    @property
    def is_main(self) -> bool:
        """Whether this is the one that writes, reports, evaluates and verifies."""
        return self.index == 0

    def share(self, items: Sequence[Value]) -> Sequence[Value]:
        """This process's part of `items`, which all have; those of all processes together are all of them."""
        return items[self.index :: self.count]

    def from_main(self, make: Callable[[], Value]) -> Value:
        """What `make` returns in the main process, where alone it is called; the others wait for it.

        Raises:
            FailedElsewhereError: another process failed meanwhile.
        """
        key = self._next_key()
        if self._store is None:
            return make()
        if self.is_main:
            value = make()
            self._store.set(key, base64.b64encode(pickle.dumps(value)).decode())
            return value
        received: Value = pickle.loads(base64.b64decode(self._await(key)))
        return received

    def wait_for_all(self) -> None:
        """Return when every process has come here.

        Raises:
            FailedElsewhereError: another process failed instead.
        """
        key = self._next_key()
        if self._store is None:
            return
        self._store.set(f"{key}/{self.index}", "")
        for index in range(self.count):
            self._await(f"{key}/{index}")

    def summed(self, sums: Sums) -> Sums:
        """`sums` with every tensor and whole number summed over the processes, in the tensors' own dtype.

        Other fields (None, and tuples such as the numbers of layers) must be the same everywhere and stay.

        Raises:
            FailedElsewhereError: another process failed.
            TypeError: a field of another kind, of which this cannot know whether it is a sum.
        """
        totals: dict[str, Any] = {}
        for field in fields(sums):
            value = getattr(sums, field.name)
            if isinstance(value, Tensor):
                totals[field.name] = value
            elif isinstance(value, int) and not isinstance(value, bool):
                totals[field.name] = torch.tensor(value, dtype=torch.int64)
            elif value is not None and not isinstance(value, tuple):
                raise TypeError(f"{type(sums).__name__}.{field.name} is a {type(value).__name__}, which is no sum.")
        self.wait_for_all()
        if self._group is None:
            return sums
        for name, value in totals.items():
            total = value.to("cpu", copy=True).contiguous()
            distributed.all_reduce(total, group=self._group)
            totals[name] = total.to(value.device) if isinstance(getattr(sums, name), Tensor) else int(total)
        return replace(sums, **totals)

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        """An exception that leaves the block here ends the others at their next wait; of equal ones one is raised.

        Raises:
            SystemExit: this process is not the first one, and another says why the run failed.
        """
        if self._store is None:
            yield
            return
        ended = False
        try:
            yield
            ended = True
        except FailedElsewhereError as error:
            ended = True
            self._listen(error)
            raise
        except RuntimeError as error:
            # A collective operation, say, in which the other process was lost.
            ended = self._found(_FAILED, SECONDS_TO_SPEAK)
            if not ended:
                raise
            lost = FailedElsewhereError()
            self._listen(lost)
            raise lost from error
        except CompressorError as error:
            ended = True
            self._say(_FAILED)
            if self.is_main:
                self._say(_MAIN, _SPEAKS)
            elif self._main_speaks():
                raise SystemExit(error.exit_code) from None
            raise
        finally:
            if not ended:
                self._say(_FAILED)
                if self.is_main:
                    self._say(_MAIN, _SPEAKS)

    def _listen(self, error: FailedElsewhereError) -> None:
        """Wait while another process says why it failed: the launcher ends all when one ends."""
        if self.is_main:
            self._say(_MAIN, "listens")
        time.sleep(SECONDS_TO_SPEAK)
        if not self.is_main:
            raise SystemExit(error.exit_code) from None

    def _main_speaks(self) -> bool:
        """Whether the main process fails by itself, too; one that is busy is not waited for."""
        found = self._found(_MAIN, SECONDS_TO_SPEAK)
        return found and self._store is not None and self._store.get(_MAIN) == _SPEAKS.encode()

    def _say(self, key: str, value: str = "") -> None:
        # The store is the launcher's, which may be gone.
        if self._store is not None:
            with suppress(RuntimeError):
                self._store.set(key, value)

    def _found(self, key: str, seconds: float) -> bool:
        """Whether another process sets `key` within `seconds`, or the launcher with its store is lost."""
        end = time.monotonic() + seconds
        try:
            while self._store is not None and time.monotonic() < end:
                if self._store.check([key]):
                    return True
                time.sleep(SECONDS_BETWEEN_QUESTIONS)
        except RuntimeError:
            return True
        return False

    def _await(self, key: str) -> bytes:
        if self._store is None:
            raise ValueError("one process has no other to wait for")
        while not self._store.check([key]):
            if self._store.check([_FAILED]):
                raise FailedElsewhereError
            time.sleep(SECONDS_BETWEEN_QUESTIONS)
        value: bytes = self._store.get(key)
        return value

    def _next_key(self) -> str:
        self._calls += 1
        return f"call {self._calls}"


def alone() -> Processes:
    """One process, as without a launcher."""
    return Processes(0, 1, None, None)


def join_processes(device: str, name: Naming = option_of) -> Processes:
    """The processes that were launched together with this one; every one must call it, in every run.

    `device` is a recipe's, and messages call it as `name` does. On GPUs each process gets its own from here on: the one
    that "cuda" stands for.

    Raises:
        RequestError: `device` names one GPU for all, there are fewer GPUs than processes, or accelerate was launched
            for an engine that recovery does not know, or for FSDP 1.
    """
    launched = launch()
    if launched.count == 1:
        return alone()
    resolved = resolve_device(device, name)
    if resolved.type == "cuda":
        refuse_shared_gpus(resolved, torch.cuda.device_count(), launched.local_count, name)
    refuse_other_version(fully_sharded_version())
    state = PartialState(cpu=resolved.type == "cpu")
    try:
        refuse_other_engines(Accelerator(cpu=resolved.type == "cpu"))
    except RequestError:
        leave_processes()
        raise
    store = next(rendezvous("env://"))[0]
    # The number of this run, the same in every process: keys of an earlier run must not answer for it.
    number = PrefixStore("compressor", store).add(f"runs of process {state.process_index}", 1)
    group = distributed.new_group(backend="gloo")
    return Processes(state.process_index, state.num_processes, PrefixStore(f"compressor/{number}", store), group)


def have_joined() -> bool:
    """Whether this is one of several processes that fail together, see `Processes.failing_together`."""
    return distributed.is_initialized()


def leave_processes() -> None:
    """End what `join_processes` began, at the end of the program."""
    if distributed.is_initialized():
        distributed.destroy_process_group()


def refuse_other_version(fully_sharded: str | None) -> None:
    """Refuse FSDP 1 before anything of accelerate's is made, which it does not even describe on CPUs.

    Raises:
        RequestError: `fully_sharded`, the version that accelerate was launched for, is there and is not 2.
    """
    if fully_sharded not in (None, "2"):
        raise RequestError(
            f"accelerate was launched for FSDP {fully_sharded}, and recovery shards with FSDP 2; launch it with "
            "--use_fsdp --fsdp_version 2."
        )


def refuse_shared_gpus(device: torch.device, gpus: int, processes: int, name: Naming = option_of) -> None:
    """Refuse what would put several of the `processes` of this machine on one of its `gpus`.

    Raises:
        RequestError: `device` has a number, or there are fewer GPUs than processes.
    """
    if device.index is not None:
        raise RequestError(
            f"{name('runtime.device', device)} is one GPU and {processes} processes were launched here, each of which "
            f"needs its own; leave {name('runtime.device')} out."
        )
    if gpus < processes:
        raise RequestError(
            f"{processes} processes were launched here and torch sees {gpus} GPUs, of which each needs its own; launch "
            f"at most {gpus}, or give {name('runtime.device', 'cpu')}."
        )
