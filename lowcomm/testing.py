"""Real worker processes and a bad network, for tests of training loops.

Most of what a distributed optimizer does can be tested in one process with
`lowcomm.simulate`; `unreliable` makes its network do all that a network may do. What
only processes show (the wire itself, a worker that is killed, a wait that never ends)
is tested with `run_workers`, which starts them in about a tenth of a second.
"""

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import random
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TypeVar, TypeVarTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lowcomm._network import Network, network, why_no_network
from lowcomm.sync.errors import PeerLost, SyncError
from lowcomm.sync.seam import Exchange, Group, Handle, Task, enter_group

__all__ = [
    "Network",
    "free_port",
    "network",
    "run_workers",
    "unreliable",
    "why_no_network",
]

_T = TypeVar("_T")
_Args = TypeVarTuple("_Args")

# Imported once, in the server that forks the workers. torch._dynamo is a second of
# work for the first optimizer of a process; test modules import pytest and hypothesis.
_PRELOAD = ["torch.distributed", "torch._dynamo", "lowcomm.testing"]
_PRELOAD_IF_IMPORTED_HERE = ["pytest", "hypothesis"]

# After a first failure, how long the others may fail by themselves before being killed.
_GRACE_S = 0.5

_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"

# How long an exchange that is to end early may take, in seconds.
_EARLY_S = 1.0


class _Job(NamedTuple):
    """What a worker process is told."""

    call: bytes  # (worker, args), pickled
    rank: int
    num_workers: int
    folder: Path  # holds the group's store and the workers' stacks
    environ: dict[str, str]
    num_threads: int
    group_timeout_s: float
    network: Network | None  # in which it runs

    @property
    def stacks(self) -> Path:
        return self.folder / f"stacks-{self.rank}.txt"


class _Deadline(NamedTuple):
    """A moment of `time.monotonic`, and the argument that it comes from."""

    at: float
    timeout_s: float

    def left_s(self) -> float:
        return max(0.0, self.at - time.monotonic())


class _Worker(NamedTuple):
    """What the caller holds of a worker process."""

    process: BaseProcess
    pipe: Connection
    stacks: Path  # where each thread was when it crashed, or was asked


def run_workers(
    worker: Callable[[int, *_Args], Any],
    num_workers: int,
    *args: *_Args,
    timeout_s: float = 60.0,
    group_timeout_s: float = 20.0,
    num_threads: int = 1,
    may_die: Collection[int] = (),
    network: Network | None = None,
) -> list[Any]:
    """Runs `worker(rank, *args)` in `num_workers` processes and returns their results.

    The processes form the default process group of `torch.distributed`: gloo, on the
    loopback interface. They are forked from a server that has torch imported, so the
    first call takes seconds and every later one about 0.1 s. They have the caller's
    environment variables and `sys.path`, but none of its other state. A worker that has
    returned stays in the group until all have. None outlives the call, or the caller.

    Worker, arguments, results and exceptions travel by `pickle`, tensors as bytes. So
    the worker must be defined at the top level of a module. If that is `__main__`, the
    workers run the script again, which needs the usual `if __name__ == "__main__"`.

    Example::

        def sum_of_ranks(rank):
            total = torch.tensor(rank)
            torch.distributed.all_reduce(total)
            return total.item()

        assert run_workers(sum_of_ranks, 4) == [6, 6, 6, 6]

    Any function that can be imported will do; this one computes `pow(rank, 2)`:

    >>> run_workers(pow, 3, 2)
    [0, 1, 4]

    Args:
        worker: called with its rank, then `args`.
        num_workers: number of processes.
        args: further arguments, the same for every rank.
        timeout_s: seconds until all workers must have returned, start-up included.
        group_timeout_s: timeout of the process group, in seconds.
        num_threads: torch's threads in each worker.
        may_die: ranks that may end without returning, killed by the test for instance.
        network: namespaces in which they run, one in each; None for the caller's. It
            is what `lowcomm.testing.network` gives.

    Returns:
        The results in rank order; None for a rank of `may_die` that died.

    Raises:
        Exception: what a worker raised, its rank and its traceback as notes; the other
            workers are killed. Of several of one type, the lowest rank's, the others as
            notes. A RuntimeError in place of what cannot be pickled.
        ExceptionGroup: if workers raised exceptions of different types.
        RuntimeError: if a worker died; names its rank and the signal.
        TimeoutError: if workers were not done in time; names their ranks, their stacks
            as notes.
        ValueError: if `num_workers` is less than 1, or more than there are namespaces.
    """
    if num_workers < 1:
        raise ValueError(f"num_workers must be at least 1, got {num_workers=}.")
    if network is not None and num_workers > len(network.names):
        raise ValueError(
            f"num_workers must be at most {len(network.names)}, the number of "
            f"namespaces, got {num_workers=}. Make a larger network."
        )
    deadline = _Deadline(time.monotonic() + timeout_s, timeout_s)
    try:
        call = pickle.dumps((worker, args))
    except Exception as error:
        error.add_note("run_workers pickles the worker and its arguments.")
        raise
    workers: list[_Worker] = []
    with tempfile.TemporaryDirectory(prefix="lowcomm-") as folder:
        try:
            for rank in range(num_workers):
                job = _Job(
                    call=call,
                    rank=rank,
                    num_workers=num_workers,
                    folder=Path(folder),
                    environ=dict(os.environ),
                    num_threads=num_threads,
                    group_timeout_s=group_timeout_s,
                    network=network,
                )
                _start(job, workers)
            results = _collect(workers, deadline, may_die)
            _release(workers, results, deadline)
        finally:
            # Pipes first: a worker whose pipe closes ends by itself (see `_obey`), also
            # one that is still being forked, or if a second Ctrl-C comes in here.
            for one in workers:
                one.pipe.close()
            for one in workers:
                if one.process.pid is not None:
                    one.process.kill()
                    one.process.join()
    return [results.get(rank) for rank in range(num_workers)]


def free_port() -> int:
    """Returns a TCP port of the loopback interface that was free a moment ago.

    >>> 1024 <= free_port() < 65536
    True
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def unreliable(
    worker: Callable[[int, Group], _T],
    *,
    seed: int = 0,
    lost: Mapping[int, int] | None = None,
) -> Callable[[int, Group], _T]:
    """The same worker for `lowcomm.simulate`, on a network that does its worst.

    Messages leave late, with what is in their memory then, and arrive late or early,
    in any order. An exchange may be over before it is waited for, or not begun. None
    of this may change a bit:

    >>> import torch, lowcomm
    >>> def worker(rank, group):
    ...     weight = torch.nn.Parameter(torch.zeros(1))
    ...     opt = lowcomm.LocalSGD(torch.optim.SGD([weight], lr=1.0), sync_every=2)
    ...     weight.grad = torch.full((1,), -float(rank))
    ...     try:
    ...         for _ in range(4):
    ...             opt.step()
    ...     except lowcomm.PeerLost as error:
    ...         return weight.item(), str(error)
    ...     return weight.item()
    >>> lowcomm.simulate(worker, 3), lowcomm.simulate(unreliable(worker, seed=7), 3)
    ([4.0, 4.0, 4.0], [4.0, 4.0, 4.0])

    A worker that is lost is cut off in the middle of an exchange. Nobody gets a result,
    and what was still to be received is overwritten, then and later, as by a backend
    that cannot cancel. Parameters are as if the exchange had not been launched:

    >>> for result in lowcomm.simulate(unreliable(worker, lost={1: 4}), 2):
    ...     print(result)
    (1.0, 'rank 1 was lost: it was cut off')
    (3.0, 'rank 0 was lost: it was cut off')

    Args:
        worker: called with its rank and its group.
        seed: of what happens; the same seed is the same run.
        lost: ranks that are cut off, each with the inner steps that have been taken
            when it is: the exchange launched at the end of that step fails, and all
            after it.
    """

    def disturbed(rank: int, group: Group) -> _T:
        unreliable_group = _UnreliableGroup(group, seed, lost or {})
        enter_group(unreliable_group)
        return worker(rank, unreliable_group)

    return disturbed


# --- the caller's side ----------------------------------------------------------------


def _start(job: _Job, workers: list[_Worker]) -> None:
    """Starts a process and adds it to `workers`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        _PRELOAD + [name for name in _PRELOAD_IF_IMPORTED_HERE if name in sys.modules]
    )
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(theirs, job))
    # Before it starts: an interrupt on the way must find the pipe, to close it.
    workers.append(_Worker(process, ours, job.stacks))
    job.stacks.touch()
    # A pickle that refers to a module has its name in it.
    needs_main = b"__main__" in job.call
    with theirs, contextlib.nullcontext() if needs_main else _hidden_main():
        process.start()


@contextlib.contextmanager
def _hidden_main() -> Iterator[None]:
    """Hides `__main__`, which multiprocessing would otherwise run in every worker.

    It looks in `sys.modules` (`multiprocessing.spawn.get_preparation_data`). A worker
    from another module has no use for it, and pytest's takes 0.3 s.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _collect(
    workers: list[_Worker], deadline: _Deadline, may_die: Collection[int]
) -> dict[int, Any]:
    """Returns results by rank once every worker has returned, or died as it may."""
    results: dict[int, Any] = {}
    errors: dict[int, Exception] = {}
    deaths: dict[int, str] = {}
    pending = dict(enumerate(workers))
    while pending:
        pipes = [one.pipe for one in pending.values()]
        sentinels = [one.process.sentinel for one in pending.values()]
        ready = wait([*pipes, *sentinels], deadline.left_s())
        if not ready:
            break
        for rank, one in list(pending.items()):
            if one.pipe not in ready and one.process.sentinel not in ready:
                continue
            del pending[rank]
            report = _receive(one.pipe)
            if report is None:
                if rank not in may_die:
                    deaths[rank] = f"rank {rank} {_cause_of_death(one.process)}"
                continue
            result, error = _unpack(report, rank)
            if error is None:
                results[rank] = result
            else:
                errors[rank] = error
        if deaths or errors:
            grace_ends_at = time.monotonic() + _GRACE_S
            deadline = deadline._replace(at=min(deadline.at, grace_ends_at))
    if deaths:
        death = RuntimeError(f"{', '.join(deaths.values())}, before it returned.")
        _note_stacks(death, {rank: workers[rank] for rank in deaths})
        # What the others raised is most likely the consequence.
        raise _with_others(death, errors)
    if errors:
        raise _one_of(errors)
    if pending:
        raise _timeout(pending, deadline.timeout_s)
    return results


def _release(
    workers: list[_Worker], results: dict[int, Any], deadline: _Deadline
) -> None:
    """Lets the workers that returned leave the group, and sees that they end well."""
    pending = {rank: workers[rank] for rank in results}
    for one in pending.values():
        with contextlib.suppress(BrokenPipeError):  # died since: see the exit code
            one.pipe.send_bytes(b"go")
    for rank, one in list(pending.items()):
        one.process.join(deadline.left_s())
        if one.process.exitcode is not None:
            del pending[rank]
            if one.process.exitcode != 0:
                cause = _cause_of_death(one.process)
                raise RuntimeError(f"rank {rank} {cause}, after it returned.")
    if pending:
        raise _timeout(pending, deadline.timeout_s)


def _receive(pipe: Connection) -> bytes | None:
    """Returns a worker's report, None if it died without one."""
    try:
        # A dead worker's own children may hold the pipe open: do not wait for its end.
        return pipe.recv_bytes() if pipe.poll() else None
    except (EOFError, ConnectionResetError):
        return None


def _unpack(report: bytes, rank: int) -> tuple[Any, Exception | None]:
    """Returns a worker's result, or its exception with the notes that say where."""
    result, error, text = pickle.loads(report)
    if text is None:
        return pickle.loads(result), None
    summary, remote_traceback = text
    exception = RuntimeError(summary) if error is None else pickle.loads(error)
    exception.add_note(f"on rank {rank}")
    exception.add_note(f"in the worker's process:\n{remote_traceback}")
    return None, exception


def _one_of(errors: dict[int, Exception]) -> Exception:
    ranks = sorted(errors)
    if len({type(error) for error in errors.values()}) > 1:
        return ExceptionGroup(f"ranks {ranks} failed", [errors[rank] for rank in ranks])
    return _with_others(errors.pop(ranks[0]), errors)


def _with_others(error: Exception, others: dict[int, Exception]) -> Exception:
    for rank, other in sorted(others.items()):
        error.add_note(f"rank {rank} raised {type(other).__name__}: {other}")
    return error


def _cause_of_death(process: BaseProcess) -> str:
    process.kill()  # without effect on one that is dying already
    process.join()
    assert process.exitcode is not None
    if process.exitcode >= 0:
        return f"exited with code {process.exitcode}"
    names = {number.value: number.name for number in signal.Signals}
    return f"was killed by {names.get(-process.exitcode, -process.exitcode)}"


def _timeout(late: dict[int, _Worker], timeout_s: float) -> TimeoutError:
    for one in late.values():
        assert one.process.pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(one.process.pid, signal.SIGUSR1)
    time.sleep(0.2)  # for the answers; a stopped process gives none
    error = TimeoutError(
        f"ranks {sorted(late)} were not done in time, with {timeout_s=}."
    )
    _note_stacks(error, late)
    return error


def _note_stacks(error: Exception, workers: dict[int, _Worker]) -> None:
    for rank, one in sorted(workers.items()):
        if stacks := one.stacks.read_text():
            error.add_note(f"rank {rank} was here:\n{stacks}")


# --- the worker's side ----------------------------------------------------------------


def _work(pipe: Connection, job: _Job) -> None:
    """Reports once, a result or an exception, then stays until released."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the caller
    released = threading.Event()
    threading.Thread(target=_obey, args=(pipe, released), daemon=True).start()
    # The fork server's environment is that of the first call.
    os.environ.clear()
    os.environ.update(job.environ)
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0" if job.network else _LOOPBACK
    result = error = text = None
    # Never closed: it must serve until the process is gone.
    stacks = job.stacks.open("w")
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGUSR1, stacks)
    try:
        if job.network is not None:
            job.network.enter(job.rank)
        worker, args = pickle.loads(job.call)
        torch.set_num_threads(job.num_threads)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{job.folder}/store",
            rank=job.rank,
            world_size=job.num_workers,
            timeout=timedelta(seconds=job.group_timeout_s),
        )
        # Bytes, because multiprocessing's own pickler shares memory for tensors.
        result = pickle.dumps(worker(job.rank, *args))
    except BaseException as caught:
        error, text = _pack(caught)
    pipe.send_bytes(pickle.dumps((result, error, text)))
    # Ending closes the sockets, which makes others fail who have no fault.
    released.wait()
    if dist.is_initialized():
        dist.destroy_process_group()


def _obey(pipe: Connection, released: threading.Event) -> None:
    """Waits for the caller's word; ends this process when the caller is gone."""
    try:
        pipe.recv_bytes()
    except (EOFError, OSError):
        os._exit(1)
    released.set()


def _pack(error: BaseException) -> tuple[bytes | None, tuple[str, str]]:
    """Returns the exception, pickled if it can be, and its text."""
    summary = "".join(traceback.format_exception_only(error)).strip()
    text = summary, "".join(traceback.format_exception(error))
    if not isinstance(error, Exception):
        return None, text  # SystemExit and its like must not end the caller
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)  # fails here if its __init__ takes other arguments
    except Exception:
        return None, text
    return pickled, text


# --- an unreliable network ------------------------------------------------------------


class _UnreliableGroup(Group):
    """Passes messages on to a group, but late and in any order, or not at all."""

    def __init__(self, group: Group, seed: int, lost: Mapping[int, int]) -> None:
        self.rank = group.rank
        self.device = group.device
        self._group = group
        self._seed = seed
        self._lost = lost
        self._steps = 0
        self._num_exchanges = 0
        # Of the exchange that is being driven.
        self._outbox: list[_Parcel] = []
        self._arriving: list[tuple[Handle, Tensor]] = []
        self._abandoned: list[Tensor] = []  # a backend may still write there

    def members(self, round: int) -> tuple[int, ...]:
        return self._group.members(round)

    def new_lane(self) -> int:
        return self._group.new_lane()

    def now(self) -> float:
        return self._group.now()

    def tick(self) -> None:
        self._steps += 1
        self._overwrite()
        self._group.tick()

    def send(self, peer: int, tensor: Tensor, tag: int) -> Handle:
        self._outbox.append(parcel := _Parcel(self._group, peer, tensor, tag))
        return parcel

    def recv(self, peer: int, tensor: Tensor, tag: int) -> Handle:
        handle = self._group.recv(peer, tensor, tag)
        self._arriving.append((handle, tensor))
        return handle

    def run(self, exchange: Exchange) -> Task:
        self._overwrite()
        self._num_exchanges += 1
        chance = random.Random(f"{self._seed} {self.rank} {self._num_exchanges}")
        ends_early = chance.random() < 0.5
        # The same on all workers, so that each gets as far as the others.
        num_left = random.Random(f"{self._seed} {self._num_exchanges}").randrange(8)
        left = dict.fromkeys(self._cut_off(), num_left)
        task = self._group.run(self._disturb(exchange, chance, left))
        if ends_early:
            with contextlib.suppress(SyncError):  # told again to whoever waits for it
                task.wait(_EARLY_S)
        return task

    def _cut_off(self) -> list[int]:
        """Workers that are out of reach from here."""
        gone = sorted(rank for rank, step in self._lost.items() if step <= self._steps)
        if self.rank in gone:
            gone = [rank for rank in self._group.members(0) if rank != self.rank]
        return gone

    def _disturb(
        self, exchange: Exchange, chance: random.Random, left: dict[int, int]
    ) -> Exchange:
        """Drives an exchange; of some workers only so many messages are left."""
        outbox: list[_Parcel] = []
        arriving: list[tuple[Handle, Tensor]] = []
        while True:
            # Of this exchange: one that was abandoned may go on beside it.
            self._outbox, self._arriving = outbox, arriving
            try:
                awaited = next(exchange)
            except StopIteration as stop:
                _post(outbox)
                if left:
                    raise _lost(min(left)) from None
                return stop.value
            chance.shuffle(outbox)
            _post(outbox, chance.randint(0, len(outbox)))
            if outbox or chance.random() < 0.5:
                chance.shuffle(arriving)
                early = arriving[: chance.randint(0, len(arriving))]
                yield _Pause(awaited.peer, [handle for handle, _ in early])
                _post(outbox)
            if awaited.peer in left:
                if left[awaited.peer] == 0:
                    self._abandoned += [tensor for _, tensor in arriving]
                    self._overwrite()
                    raise _lost(awaited.peer)
                left[awaited.peer] -= 1
            yield awaited.handle if isinstance(awaited, _Parcel) else awaited
            arriving[:] = [item for item in arriving if item[0] is not awaited]

    def _overwrite(self) -> None:
        for tensor in self._abandoned:
            tensor.view(torch.uint8).fill_(255)  # NaN in every floating dtype


class _Parcel:
    """A message that has not left yet."""

    def __init__(self, group: Group, peer: int, tensor: Tensor, tag: int) -> None:
        self.peer = peer
        self.handle: Handle = self  # until it is posted
        self._group = group
        self._tensor = tensor
        self._tag = tag

    def post(self) -> None:
        self.handle = self._group.send(self.peer, self._tensor, self._tag)

    def wait(self) -> None:
        assert self.handle is not self, "posted before it is awaited"
        self.handle.wait()


def _post(outbox: list[_Parcel], count: int | None = None) -> None:
    """Sends the first messages of an outbox; all if no count is given."""
    for parcel in outbox[:count]:
        parcel.post()
    del outbox[:count]


class _Pause:
    """Others go on first. A thread waits; workers who take turns ask if it is ready."""

    def __init__(self, peer: int, early: Sequence[Any]) -> None:
        self.peer = peer
        self.time = 0.0
        self._early = early
        self._was_asked = False

    def ready(self) -> bool:
        for handle in self._early:
            handle.ready()  # which takes it in
        was_asked, self._was_asked = self._was_asked, True
        return was_asked

    def wait(self) -> None:
        time.sleep(1e-3)


def _lost(rank: int) -> PeerLost:
    return PeerLost(f"rank {rank} was lost: it was cut off", rank)
