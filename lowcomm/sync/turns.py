"""Workers of one process that take turns."""

from __future__ import annotations

import itertools
import math
import random
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from lowcomm.sync.errors import PeerLost, SyncError
from lowcomm.sync.link import Clock, Link
from lowcomm.sync.seam import Exchange, Group, Handle, Task, no_answer

T = TypeVar("T")


class World:
    """Workers of one process, of which one runs at a time.

    The turn passes only when its holder cannot go on, in rank order, and takes the
    random number generators' states with it: a run is the same every time.

    Args:
        num_workers: how many there are.
        link: the network between them; None for one that takes no time.
    """

    def __init__(self, num_workers: int, link: Link | None = None) -> None:
        self.num_workers = num_workers
        self.clock = Clock(link, num_workers)
        # By both ends and the tag: messages not yet asked for, or who waits for one.
        self._mail: dict[tuple[int, int, int], deque[_Message]] = {}
        self._letters: dict[tuple[int, int, int], deque[_Letter]] = {}
        self._free_at = [0.0] * num_workers  # when each one's last exchange has ended
        self._driven: _TurnTask | None = None
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
        self.clock.mark()

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

    def wait(self, rank: int, task: _TurnTask, timeout_s: float) -> None:
        """Lets others run until the task is done."""
        task.await_from(self.clock.now(rank), timeout_s)
        while True:
            self._pump()
            self.clock.mark()
            if task.is_late:
                self.clock.wait_until(rank, task.deadline)
                raise no_answer(task.peer, timeout_s)
            if task.done:
                self.clock.wait_until(rank, task.time)
                return
            if self._stopped:
                raise SyncError("the simulation was stopped")
            self._stalled += 1
            if self._stalled > len(self._alive):
                # Everybody waits and nothing moves: no time would change that. What
                # this worker does now may help the next one.
                self._stalled = 0
                raise PeerLost(
                    f"rank {task.peer} will never answer rank {rank}: it "
                    + ("waits too." if task.peer in self._alive else "has ended."),
                    task.peer,
                )
            following = self._next(rank)
            if following != rank:
                self._rng[rank] = _rng_state()
                self._turns[following].release()
                self._turns[rank].acquire()
                _set_rng_state(self._rng[rank])
                self.clock.mark()

    def post(self, source: int, target: int, tag: int, tensor: Tensor) -> float:
        """Puts a message where its receiver finds it; returns when it has left."""
        assert self._driven is not None, "messages are sent by exchanges"
        left, arrives = self.clock.send(
            source, tensor.nbytes, self._driven.time, beside=self._driven.abandoned
        )
        message = _Message(tensor.clone(), arrives)
        key = (source, target, tag)
        if key in self._letters:
            _pop(self._letters, key).deliver(message)
        else:
            self._mail.setdefault(key, deque()).append(message)
        self._stalled = 0
        return left

    def expect(self, source: int, target: int, tag: int, tensor: Tensor) -> _Letter:
        """Receives the oldest message that nobody was waiting for, or the next."""
        key, letter = (source, target, tag), _Letter(source, tensor)
        if key in self._mail:
            letter.deliver(_pop(self._mail, key))
        else:
            self._letters.setdefault(key, deque()).append(letter)
        return letter

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
                if task.rank in busy:
                    continue
                if not task.abandoned:
                    busy.add(task.rank)
                task.time = max(task.time, self._free_at[task.rank])
                self._driven = task
                moved |= task.advance()
                if task.done:
                    self._tasks.remove(task)
                    if not task.abandoned:
                        self._free_at[task.rank] = task.time
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


def _pop(queues: dict[tuple[int, int, int], deque[T]], key: tuple[int, int, int]) -> T:
    """Takes the oldest entry of a queue, and the queue away if it was the last."""
    oldest = queues[key].popleft()
    if not queues[key]:
        del queues[key]
    return oldest


class _Message(NamedTuple):
    tensor: Tensor
    arrives: float


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
        return _Sent(peer, self._world.post(self.rank, peer, tag, tensor))

    def recv(self, peer: int, tensor: Tensor, tag: int) -> Handle:
        return self._world.expect(peer, self.rank, tag, tensor)

    def run(self, exchange: Exchange) -> Task:
        task = _TurnTask(self._world, self.rank, exchange)
        self._world.add(task)
        return task

    def now(self) -> float:
        return self._world.clock.now(self.rank)

    def tick(self) -> None:
        self._world.clock.tick(self.rank)

    def __reduce__(self) -> tuple[Any, ...]:
        if self._world.num_workers > 1:
            raise TypeError(
                "group must be None for the optimizer to be pickled, got a simulated "
                "worker's. Save `state_dict()` instead."
            )
        return (alone, ())


class _Sent:
    def __init__(self, peer: int, time: float) -> None:
        self.peer = peer
        self.time = time

    def ready(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class _Letter:
    def __init__(self, peer: int, tensor: Tensor) -> None:
        self.peer = peer
        self.time = 0.0
        self._tensor: Tensor | None = tensor

    def deliver(self, message: _Message) -> None:
        assert self._tensor is not None
        self._tensor.copy_(message.tensor)
        self._tensor = None
        self.time = message.arrives

    def ready(self) -> bool:
        return self._tensor is None

    def wait(self) -> None:
        assert self.ready()


class _TurnTask(Task):
    def __init__(self, world: World, rank: int, exchange: Exchange) -> None:
        self._world = world
        self.rank = rank
        self.time = world.clock.now(rank)
        self._exchange = exchange
        self._awaited: Any = None
        self.done = False
        self.deadline = math.inf
        self.abandoned = False
        self._timeout_s = math.inf
        self._times: list[float] = []  # at which messages came, later and later
        self._error: BaseException | None = None

    @property
    def ended(self) -> bool:
        return self.done

    @property
    def failed(self) -> bool:
        return self._error is not None

    def await_from(self, moment: float, timeout_s: float) -> None:
        """From a moment on, messages must not be further apart than a timeout."""
        self._timeout_s = timeout_s
        self.deadline = moment + timeout_s
        for time in self._times:
            if moment < time <= self.deadline:
                self.deadline = time + timeout_s

    @property
    def is_late(self) -> bool:
        """Whether a message has come, or comes, after the deadline."""
        if self._times and self._times[-1] > self.deadline:
            return True
        awaited = self._awaited
        return awaited is not None and awaited.ready() and awaited.time > self.deadline

    def abandon(self) -> None:
        self.abandoned, self.deadline, self._timeout_s = True, math.inf, math.inf

    @property
    def peer(self) -> int | None:
        return None if self._awaited is None else self._awaited.peer

    def advance(self) -> bool:
        """Goes on until a message is missing; says whether it went on at all."""
        moved = False
        try:
            with torch.no_grad():
                while self._awaited is None or self._awaited.ready():
                    if self.is_late:
                        break
                    if self._awaited is not None:
                        self._take(self._awaited.time)
                    self._awaited = next(self._exchange)
                    moved = True
        except StopIteration as stop:
            self.done, self.outcome, moved = True, stop.value, True
        except BaseException as error:
            self.done, self._error, moved = True, error, True
        return moved

    def _take(self, moment: float) -> None:
        """A message has come."""
        if moment > self.time:
            self._times.append(moment)
            self.deadline = max(self.deadline, moment + self._timeout_s)
            self.time = moment

    def wait(self, timeout_s: float) -> Any:
        self._world.wait(self.rank, self, timeout_s)
        if self._error is not None:
            raise self._error
        return self.outcome


def alone() -> Group:
    """A world of one: the same path as many, and no `torch.distributed`."""
    return World(1).group(0)
