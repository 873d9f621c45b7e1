"""The wire: the only interface to other workers, and its two fixed kinds.

`Group` is what everything above is written against. `TorchGroup` is a
`torch.distributed` process group, `LocalGroup` a worker among threads of one process
that take turns. Nothing else in the package knows that `torch.distributed` exists.
"""

from __future__ import annotations

import contextvars
import itertools
import queue
import random
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lowcomm.sync.errors import PeerLost, SyncError


class Handle(Protocol):
    """A message on its way."""

    peer: int

    def wait(self) -> None:
        """Returns when it has arrived or left; raises `PeerLost` if it cannot."""


#: An exchange: yields each message that it must wait for, returns its outcome.
Exchange = Generator[Handle, None, Any]


class Task(ABC):
    """An exchange that runs beside the caller."""

    @abstractmethod
    def wait(self, timeout_s: float) -> Any:
        """The exchange's outcome.

        Raises:
            PeerLost: if it has not ended `timeout_s` seconds from now, naming the
                worker that it waits for.
        """


class Group(ABC):
    """The workers that exchange with each other, seen from one of them.

    Ranks count from 0 within the group. A message is matched by its two ends and its
    tag; messages of one tag arrive in the order in which they were sent.
    """

    rank: int
    #: where tensors must lie to be sent
    device: torch.device

    @abstractmethod
    def members(self, round: int) -> tuple[int, ...]:
        """Ranks that take part in a round, sorted. Asked anew in every round."""

    @abstractmethod
    def send(self, peer: int, tensor: Tensor, tag: int) -> Handle:
        """Sends a contiguous tensor; it must not change until the handle is done."""

    @abstractmethod
    def recv(self, peer: int, tensor: Tensor, tag: int) -> Handle:
        """Receives into a contiguous tensor, which is updated."""

    @abstractmethod
    def run(self, exchange: Exchange) -> Task:
        """Drives an exchange beside the user's computing; one after another."""

    @abstractmethod
    def new_lane(self) -> int:
        """A number for the tags of one engine, the same on all workers."""

    def commit(self, round: int) -> bool:
        """Whether a round that ended here may be applied everywhere."""
        del round
        return True

    def now(self) -> float:
        """Seconds on the clock of waits."""
        return time.monotonic()

    def __deepcopy__(self, memo: dict[int, Any]) -> Group:
        # A copied optimizer talks to the same workers; sockets have no copies.
        return self


# --------------------------------------------------------------------------------------
# torch.distributed

_lanes: weakref.WeakKeyDictionary[Any, itertools.count[int]] = (
    weakref.WeakKeyDictionary()
)


class TorchGroup(Group):
    """A `torch.distributed` process group: gloo, NCCL, or whatever torch has.

    One background thread drives the exchanges: it spends its time in waits that release
    the interpreter, and Ctrl+C reaches the main thread at once.

    Args:
        group: the process group; the default one if None.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        if not dist.is_initialized():
            raise ValueError(
                "group must be an initialized process group, got "
                f"{group=}. Call torch.distributed.init_process_group first."
            )
        self._is_default = group is None
        world = dist.distributed_c10d._get_default_group()
        self._group: dist.ProcessGroup = world if group is None else group
        self.rank = dist.get_rank(self._group)
        if self.rank < 0:
            raise ValueError(
                "group must contain this process, got a group without global rank "
                f"{dist.get_rank()}. Build the optimizer only on the group's members."
            )
        self._size = dist.get_world_size(self._group)
        self._is_gloo = dist.get_backend(self._group) == "gloo"
        self.device = torch.device("cpu")
        if not self._is_gloo and torch.accelerator.is_available():
            self.device = torch.accelerator.current_accelerator() or self.device
        self._unposted: list[tuple[_TorchHandle, Callable[..., Any], int, int]] = []
        # gloo cannot cancel: memory of a message that nobody waits for any more is
        # written to when it comes, so every handle stays here until it is done.
        self._open: dict[int, _TorchHandle] = {}
        self._tasks: queue.SimpleQueue[_ThreadTask | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def members(self, round: int) -> tuple[int, ...]:
        return tuple(range(self._size))

    def new_lane(self) -> int:
        return next(_lanes.setdefault(self._group, itertools.count()))

    def send(self, peer: int, tensor: Tensor, tag: int) -> Handle:
        return self._post(dist.isend, peer, tensor, tag)

    def recv(self, peer: int, tensor: Tensor, tag: int) -> Handle:
        return self._post(dist.irecv, peer, tensor, tag)

    def _post(
        self, op: Callable[..., Any], peer: int, tensor: Tensor, tag: int
    ) -> _TorchHandle:
        handle = _TorchHandle(self, peer, tensor)
        self._open[id(handle)] = handle
        if self._is_gloo:
            post = self._group.send if op is dist.isend else self._group.recv
            handle.works = [_or_lost(peer, lambda: post([tensor], peer, tag))]
        else:
            # NCCL deadlocks when two workers each send before they receive; a batch
            # is posted as one. It goes out when the first of its messages is awaited.
            self._unposted.append((handle, op, peer, tag))
        return handle

    def _flush(self) -> None:
        batch, self._unposted = self._unposted, []
        if batch:
            ops = [
                dist.P2POp(op, handle.tensor, group=self._group, group_peer=peer)
                for handle, op, peer, _ in batch
            ]
            works = dist.batch_isend_irecv(ops)
            for handle, *_ in batch:
                handle.works = works

    def run(self, exchange: Exchange) -> Task:
        task = _ThreadTask(exchange)
        if self._thread is None:
            self._thread = threading.Thread(
                target=_drive, args=(self._tasks,), name="lowcomm", daemon=True
            )
            self._thread.start()
            weakref.finalize(self, self._tasks.put, None)
        self._tasks.put(task)
        return task

    def __reduce__(self) -> tuple[Any, ...]:
        if not self._is_default:
            raise TypeError(
                "group must be None for the optimizer to be pickled, got a process "
                "group of its own, which exists in this process only. Save "
                "`state_dict()` instead."
            )
        return (TorchGroup, ())


class _TorchHandle:
    def __init__(self, group: TorchGroup, peer: int, tensor: Tensor) -> None:
        self._group = group
        self.peer = peer
        self.tensor = tensor
        self.works: list[Any] | None = None

    def wait(self) -> None:
        if self.works is None:
            _or_lost(self.peer, self._group._flush)
        for work in self.works or ():
            _or_lost(self.peer, work.wait)
        # A finished Work keeps the sockets of its group open.
        self.works = []
        self._group._open.pop(id(self), None)


def _or_lost(peer: int, call: Callable[[], Any]) -> Any:
    """Calls into the backend, whose errors do not say which worker is meant."""
    try:
        return call()
    except RuntimeError as error:
        reason = str(error).splitlines()[0].split("] ")[-1]
        raise PeerLost(f"rank {peer} was lost: {reason}") from None


class _ThreadTask(Task):
    def __init__(self, exchange: Exchange) -> None:
        self._exchange: Exchange | None = exchange
        self._done = threading.Event()
        self._outcome: Any = None
        self._error: BaseException | None = None
        self._peer: int | None = None

    def drive(self) -> None:
        exchange, self._exchange = self._exchange, None
        assert exchange is not None
        try:
            with torch.no_grad():
                while True:
                    handle = next(exchange)
                    self._peer = handle.peer
                    handle.wait()
        except StopIteration as stop:
            self._outcome = stop.value
        except BaseException as error:
            self._error = error
        self._done.set()

    def wait(self, timeout_s: float) -> Any:
        if not self._done.wait(timeout_s):
            raise PeerLost(
                f"rank {self._peer} did not answer within {timeout_s} s. Raise "
                "timeout_s if it is only slow; else restart from a checkpoint."
            )
        if self._error is not None:
            raise self._error
        return self._outcome


def _drive(tasks: queue.SimpleQueue[_ThreadTask | None]) -> None:
    # Knows the queue only, so that the group can be collected and end this thread.
    while (task := tasks.get()) is not None:
        task.drive()
        del task


# --------------------------------------------------------------------------------------
# Threads that take turns


class World:
    """Workers of one process, of which one runs at a time.

    The turn passes only when its holder cannot go on, in rank order, and takes the
    random number generators' states with it: a run is the same every time.

    Args:
        num_workers: how many there are.
    """

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self._mail: dict[tuple[int, int, int], deque[Tensor]] = {}
        self._tasks: list[_TurnTask] = []
        self._turns = [threading.Semaphore(0) for _ in range(num_workers)]
        self._alive = set(range(num_workers))
        self._rng: dict[int, Any] = {}
        self._stalled = 0
        self._lanes = [itertools.count() for _ in range(num_workers)]
        self._stopped = False

    def group(self, rank: int) -> LocalGroup:
        """The group as worker `rank` sees it."""
        return LocalGroup(self, rank)

    def enter(self, rank: int) -> None:
        """Called by a worker's thread: waits for its first turn."""
        self._turns[rank].acquire()
        _set_rng_state(self._rng[rank])

    @contextmanager
    def running(self, threads: Sequence[threading.Thread]) -> Iterator[None]:
        """Starts the workers' threads; every one begins with the caller's generators.

        An exception that leaves makes all of them end at their next wait.
        """
        before = _rng_state()
        self._rng = dict.fromkeys(range(self.num_workers), before)
        for thread in threads:
            thread.start()
        self._turns[0].release()
        try:
            yield
        except BaseException:
            self._stopped = True
            raise
        finally:
            _set_rng_state(before)

    def leave(self, rank: int) -> None:
        """Called by a worker's thread when it has ended."""
        self._alive.discard(rank)
        self._stalled = 0
        if self._alive:
            self._turns[self._next(rank)].release()

    def wait(self, rank: int, task: _TurnTask) -> None:
        """Lets others run until the task is done."""
        while True:
            self._pump()
            if task.done:
                return
            if self._stopped:
                raise SyncError("the simulation was stopped")
            self._stalled += 1
            if self._stalled > len(self._alive):
                # Everybody waits and nothing moves: no time would change that.
                raise PeerLost(
                    f"rank {task.peer} will never answer rank {rank}: it "
                    + ("waits too." if task.peer in self._alive else "has ended.")
                )
            following = self._next(rank)
            if following != rank:
                self._rng[rank] = _rng_state()
                self._turns[following].release()
                self._turns[rank].acquire()
                _set_rng_state(self._rng[rank])

    def post(self, source: int, target: int, tag: int, tensor: Tensor) -> None:
        """Puts a message where its receiver finds it."""
        key = (source, target, tag)
        self._mail.setdefault(key, deque()).append(tensor.clone())
        self._stalled = 0

    def take(self, source: int, target: int, tag: int) -> Tensor | None:
        """The oldest message for a receiver, if there is one."""
        key = (source, target, tag)
        if key not in self._mail:
            return None
        message = self._mail[key].popleft()
        if not self._mail[key]:
            del self._mail[key]
        return message

    def add(self, task: _TurnTask) -> None:
        """Takes a task among those that are driven."""
        self._tasks.append(task)

    def new_lane(self, rank: int) -> int:
        """A number that counts the engines of each worker."""
        return next(self._lanes[rank])

    def _pump(self) -> None:
        """Drives every exchange as far as it goes; of one worker, one at a time."""
        moved = True
        while moved:
            moved = False
            busy: set[int] = set()
            for task in list(self._tasks):
                if task.rank not in busy:
                    moved |= task.advance()
                    busy.add(task.rank)
                if task.done:
                    self._tasks.remove(task)
            if moved:
                self._stalled = 0

    def _next(self, rank: int) -> int:
        return min(self._alive, key=lambda other: (other - rank - 1) % self.num_workers)


def _rng_state() -> tuple[Tensor, Any, Any]:
    return torch.get_rng_state(), np.random.get_state(), random.getstate()


def _set_rng_state(state: tuple[Tensor, Any, Any]) -> None:
    torch.set_rng_state(state[0])
    np.random.set_state(state[1])
    random.setstate(state[2])


class LocalGroup(Group):
    """A worker of a `World`."""

    def __init__(self, world: World, rank: int) -> None:
        self._world = world
        self.rank = rank
        self.device = torch.device("cpu")

    def members(self, round: int) -> tuple[int, ...]:
        return tuple(range(self._world.num_workers))

    def new_lane(self) -> int:
        return self._world.new_lane(self.rank)

    def send(self, peer: int, tensor: Tensor, tag: int) -> Handle:
        self._world.post(self.rank, peer, tag, tensor)
        return _Sent(peer)

    def recv(self, peer: int, tensor: Tensor, tag: int) -> Handle:
        return _Letter(self._world, peer, self.rank, tensor, tag)

    def run(self, exchange: Exchange) -> Task:
        task = _TurnTask(self._world, self.rank, exchange)
        self._world.add(task)
        return task

    def __reduce__(self) -> tuple[Any, ...]:
        if self._world.num_workers > 1:
            raise TypeError(
                "group must be None for the optimizer to be pickled, got a simulated "
                "worker's. Save `state_dict()` instead."
            )
        return (alone, ())


class _Sent:
    def __init__(self, peer: int) -> None:
        self.peer = peer

    def ready(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class _Letter:
    def __init__(
        self, world: World, peer: int, rank: int, tensor: Tensor, tag: int
    ) -> None:
        self.peer = peer
        self._key = (peer, rank, tag)
        self._world = world
        self._tensor: Tensor | None = tensor

    def ready(self) -> bool:
        if self._tensor is not None:
            message = self._world.take(*self._key)
            if message is None:
                return False
            self._tensor.copy_(message)
            self._tensor = None
        return True

    def wait(self) -> None:
        assert self.ready()


class _TurnTask(Task):
    def __init__(self, world: World, rank: int, exchange: Exchange) -> None:
        self._world = world
        self.rank = rank
        self._exchange = exchange
        self._awaited: Any = None
        self.done = False
        self._outcome: Any = None
        self._error: BaseException | None = None

    @property
    def peer(self) -> int | None:
        return None if self._awaited is None else self._awaited.peer

    def advance(self) -> bool:
        """Goes on until a message is missing; says whether it went on at all."""
        moved = False
        try:
            with torch.no_grad():
                while self._awaited is None or self._awaited.ready():
                    self._awaited = next(self._exchange)
                    moved = True
        except StopIteration as stop:
            self.done, self._outcome, moved = True, stop.value, True
        except BaseException as error:
            self.done, self._error, moved = True, error, True
        return moved

    def wait(self, timeout_s: float) -> Any:
        self._world.wait(self.rank, self)
        if self._error is not None:
            raise self._error
        return self._outcome


# --------------------------------------------------------------------------------------

_current: contextvars.ContextVar[Group | None] = contextvars.ContextVar(
    "lowcomm_group", default=None
)


def enter_group(group: Group) -> None:
    """Makes `group` the one that this thread's optimizers find by themselves."""
    _current.set(group)


def alone() -> Group:
    """A world of one: the same path as many, and no `torch.distributed`."""
    return World(1).group(0)


def resolve_group(group: Any) -> Group:
    """What the argument `group` of an optimizer stands for.

    Args:
        group: a `Group`, a process group, a one-dimensional device mesh; None for the
            own group inside `lowcomm.simulate`, else the default process group, else
            a world of one.
    """
    if isinstance(group, Group):
        return group
    if group is None:
        current = _current.get()
        if current is not None:
            return current
        initialized = dist.is_available() and dist.is_initialized()
        return TorchGroup() if initialized else alone()
    if isinstance(group, dist.ProcessGroup):
        return TorchGroup(group)
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"group must be a one-dimensional mesh, got {group!r}. Name the "
                "dimension that replicates, as in mesh['replicate']."
            )
        return TorchGroup(group.get_group())
    raise TypeError(
        "group must be a ProcessGroup, a one-dimensional DeviceMesh, a "
        f"lowcomm.sync.Group or None, got {group!r}."
    )
