"""The wire: `torch.distributed` process groups. Nothing else here knows of them."""

from __future__ import annotations

import contextlib
import itertools
import logging
import operator
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lowcomm.sync import threads
from lowcomm.sync.errors import PeerLost
from lowcomm.sync.seam import Exchange, Group, Handle, Task, current_group, no_answer
from lowcomm.sync.shard import ranks_of_worker
from lowcomm.sync.turns import alone

_log = logging.getLogger(__name__)

_lanes: weakref.WeakKeyDictionary[Any, itertools.count[int]] = (
    weakref.WeakKeyDictionary()
)

# Messages under way. gloo cannot cancel: it writes to a receiver's memory when the
# message comes, whether or not anybody still waits, and drops what was to be sent with
# the handle. So handles stay here until they are done, also after their group has
# failed: the others must get what was sent to learn who is missing.
_open: dict[int, _TorchHandle] = {}


# A wait of gloo's that runs out closes the connections to all workers, so no wait does:
# who waits for an exchange bounds it, and goes on without the message.
_NEVER = timedelta(days=3650)
_AT_ONCE = timedelta(milliseconds=1)


#: Exchanges that have not ended.
_running: set[_ThreadTask] = set()
_LONGEST_S = threading.TIMEOUT_MAX

if hasattr(os, "register_at_fork"):  # a child has neither threads nor connections
    os.register_at_fork(after_in_child=_running.clear)


class TorchGroup(Group):
    """A `torch.distributed` process group: gloo, NCCL, or whatever torch has.

    One background thread drives the exchanges: it spends its time in waits that release
    the interpreter, and Ctrl+C reaches the main thread at once.

    Args:
        group: the process group; the default one if None.
    """

    _is_default = False

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        if not dist.is_initialized():
            raise ValueError(
                "group must be an initialized process group, got "
                f"{group=}. Call torch.distributed.init_process_group first."
            )
        self._is_default = group is None
        world = dist.distributed_c10d._get_default_group()
        pg: dist.ProcessGroup = world if group is None else group
        rank = dist.get_rank(pg)
        if rank < 0:
            raise ValueError(
                "group must contain this process, got a group without global rank "
                f"{dist.get_rank()}. Build the optimizer only on the group's members."
            )
        members = range(dist.get_world_size(pg))
        self._over(pg, members, rank, is_gloo=_has_gloo(pg))
        self.global_ranks = tuple(dist.get_process_group_ranks(pg))
        if not self._is_gloo and torch.accelerator.is_available():
            # With its number: the thread that drives exchanges has a current device of
            # its own.
            kind = (torch.accelerator.current_accelerator() or self.device).type
            index = torch.accelerator.current_device_index()
            self.device = torch.device(kind, index)

    def _over(
        self, group: Any, members: Sequence[int], rank: int, *, is_gloo: bool
    ) -> None:
        """Takes a backend, whose ranks stand for these members in this order."""
        self._group = group
        self._members = tuple(members)
        self._places = {member: place for place, member in enumerate(members)}
        self.rank = rank
        self._is_gloo = self.matches_tags = is_gloo
        self.device = torch.device("cpu")
        self._unposted: list[tuple[_TorchHandle, Callable[..., Any], int, int]] = []
        self._tasks: _Tasks = queue.SimpleQueue()
        self._has_thread = False
        self._pace = _Pace()

    def members(self, round: int) -> tuple[int, ...]:
        return self._members

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
        _open[id(handle)] = handle
        if self._is_gloo:
            post = self._group.send if op is dist.isend else self._group.recv
            try:
                handle.works = [post([tensor], self._places[peer], tag)]
            except RuntimeError as error:
                # Raised when it is awaited: messages to the others go out before.
                handle.error = error
        else:
            # NCCL deadlocks when two workers each send before they receive; a batch
            # is posted as one. It goes out when the first of its messages is awaited.
            self._unposted.append((handle, op, peer, tag))
        return handle

    def _flush(self) -> None:
        batch, self._unposted = self._unposted, []
        if batch:
            ops = [
                dist.P2POp(
                    op, handle.tensor, group=self._group, tag=tag, group_peer=peer
                )
                for handle, op, peer, tag in batch
            ]
            works = dist.batch_isend_irecv(ops)
            for handle, *_ in batch:
                handle.works = works

    def run(self, exchange: Exchange) -> Task:
        task = _ThreadTask(self, exchange)
        if not self._has_thread:
            self._has_thread = True
            _start_thread(self._tasks)
            weakref.finalize(self, self._tasks.put, None)
        _running.add(task)
        self._tasks.put(task)
        return task

    def _abort(self) -> None:
        """Closes all connections: what is under way fails, here and on the others."""
        for member, place in self._places.items():
            if member != self.rank:  # a wait for one that is lost runs out no more
                _run_out(self._group, place)
        for handle in [handle for handle in _open.values() if handle.belongs_to(self)]:
            handle.error = RuntimeError("given up, as workers are settled anew")
            handle.forget()

    def __reduce__(self) -> tuple[Any, ...]:
        if not self._is_default:
            raise TypeError(
                "group must be None for the optimizer to be pickled, got a process "
                "group of its own, which exists in this process only. Save "
                "`state_dict()` instead."
            )
        return (TorchGroup, ())


def _run_out(group: Any, place: int) -> None:
    """A wait that runs out, which in gloo closes the connections of this process."""
    with contextlib.suppress(RuntimeError):
        group.recv([torch.zeros(1)], place, 0).wait(_AT_ONCE)


def _has_gloo(group: dist.ProcessGroup) -> bool:
    """Whether tensors on the CPU go over gloo, be it beside another backend."""
    try:
        return group._get_backend(torch.device("cpu")).name() == "gloo"
    except RuntimeError:
        return False


class _TorchHandle:
    def __init__(self, group: TorchGroup, peer: int, tensor: Tensor) -> None:
        self._group = group
        self.peer = peer
        self.tensor = tensor
        self.works: list[Any] | None = None
        self.error: RuntimeError | None = None

    def wait(self) -> None:
        try:
            if self.works is None and self.error is None:
                self._group._flush()
            for work in self.works or ():
                work.wait(_NEVER) if self._group._is_gloo else work.wait()
            # After the wait: it may be forgotten meanwhile, and has not arrived then.
            if self.error is not None:
                raise self.error
        except RuntimeError as error:
            # The backend's words do not say which worker is meant.
            reason = str(error).splitlines()[0].split("] ")[-1]
            message = f"rank {self.peer} was lost: {reason}"
            raise PeerLost(message, self.peer) from None
        finally:
            self.forget()

    def belongs_to(self, group: TorchGroup) -> bool:
        return self._group is group

    def forget(self) -> None:
        # A finished Work keeps the sockets of its group open.
        self.works = []
        _open.pop(id(self), None)


#: Exchanges that a group's thread has yet to drive; None ends it.
_Tasks: TypeAlias = "queue.SimpleQueue[_ThreadTask | None]"


@dataclass
class _Pace:
    """How far a group's threads have come."""

    at: float = 0.0  # when the last message came
    peer: int | None = None  # whose message is waited for


class _ThreadTask(Task):
    def __init__(self, group: TorchGroup, exchange: Exchange) -> None:
        self._exchange: Exchange | None = exchange
        self._tasks = group._tasks
        self._pace = group._pace
        self._backend, self._places = group._group, group._places
        self._handle: Handle | None = None  # that is waited for
        self._started = False
        self._done = threading.Event()
        self._lock = threading.Lock()  # of what follows and the end
        self.abandoned = False
        self._error: BaseException | None = None

    @property
    def ended(self) -> bool:
        return self._done.is_set()

    @property
    def failed(self) -> bool:
        return self.ended and self._error is not None

    def abandon(self) -> None:
        with self._lock:
            if not self.ended and not self.abandoned:
                self.abandoned = True
                if self._started:  # else another one is being driven
                    _start_thread(self._tasks)

    def belongs_to(self, tasks: _Tasks) -> bool:
        return self._tasks is tasks

    def cancel(self) -> None:
        """Ends the wait for a message, and all connections of this process."""
        if self._handle is not None:
            _run_out(self._backend, self._places[self._handle.peer])

    def drive(self) -> bool:
        """Drives the exchange to its end; was it abandoned on the way?"""
        with self._lock:
            self._started, was_abandoned = True, self.abandoned
        exchange, self._exchange = self._exchange, None
        assert exchange is not None
        try:
            with torch.no_grad():
                while True:
                    self._handle = handle = next(exchange)
                    if not self.abandoned:
                        self._pace.peer = handle.peer
                    handle.wait()
                    if not self.abandoned:
                        self._pace.at = time.monotonic()
        except StopIteration as stop:
            self.outcome = stop.value
        except BaseException as error:
            self._error = error
        _running.discard(self)
        with self._lock:
            self._done.set()
        return self.abandoned and not was_abandoned

    def wait(self, timeout_s: float) -> Any:
        # A long exchange is no silence: what counts is that messages come, be it for
        # one that is ahead in the queue.
        since = time.monotonic()
        while not self._done.wait(
            min(max(since, self._pace.at) + timeout_s - time.monotonic(), _LONGEST_S)
        ):
            if time.monotonic() >= max(since, self._pace.at) + timeout_s:
                raise no_answer(self._pace.peer, timeout_s)
        if self._error is not None:
            raise self._error
        return self.outcome


def _start_thread(tasks: _Tasks) -> None:
    ends = {"stop": partial(_stop, tasks), "force": partial(_force, tasks)}
    threads.start(partial(_drive, tasks), "lowcomm", **ends)


def _stop(tasks: _Tasks) -> None:
    tasks.put(None)
    for task in _running_of(tasks):
        if task.abandoned:
            task.cancel()


def _force(tasks: _Tasks) -> None:
    for task in _running_of(tasks):
        _log.error("the process ends with an exchange that others do not join")
        task.cancel()


def _running_of(tasks: _Tasks) -> list[_ThreadTask]:
    return [task for task in list(_running) if task.belongs_to(tasks)]


def _drive(tasks: _Tasks) -> None:
    # Knows the queue only, so that the group can be collected and end this thread.
    while (task := tasks.get()) is not None:
        if task.drive():
            return  # another thread has taken over
        del task


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
        current = current_group()
        if current is not None:
            return current
        if dist.is_available() and dist.is_initialized():
            return TorchGroup()
        started = os.environ.get("WORLD_SIZE", "1")
        if started != "1":
            raise ValueError(
                "group must be a process group where several workers were started, got "
                f"None with WORLD_SIZE={started}: each would train by itself. Call "
                "torch.distributed.init_process_group() first."
            )
        return alone()
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


def split_address(address: str) -> tuple[str, int] | None:
    """Host and port of "host:29510"; None of what is no such address.

    >>> split_address("10.0.0.1:29510"), split_address("[::1]:80"), split_address("a:b")
    (('10.0.0.1', 29510), ('::1', 80), None)
    """
    host, _, port = address.rpartition(":")
    return (host.strip("[]"), int(port)) if host and port.isdigit() else None


def check_sharded(group: Group, tensors: Iterable[Tensor]) -> None:
    """Raises if the workers of a group cannot be sharded as these tensors are.

    Args:
        group: the workers.
        tensors: of this one.

    Raises:
        ValueError: if workers come and go, or several ranks of one are in the group.
    """
    worker = ranks_of_worker(tensors)
    if worker and group.is_elastic:
        raise ValueError(
            "group must be of fixed workers where parameters are sharded, got an "
            "ElasticGroup: the shards of a worker would settle by themselves, and not "
            "alike. Take a dimension of the mesh, as in group=mesh['replicate']."
        )
    if len(both := worker.intersection(group.global_ranks)) > 1:
        raise ValueError(
            "group must have one rank of each worker, got one with the global ranks "
            f"{sorted(both)}, on which one worker's parameters are sharded or copied. "
            "Take the dimension of the mesh that FSDP does not have, as in "
            "group=mesh['replicate']."
        )


def check_has_shards(group: Group, tensors: Iterable[Tensor]) -> None:
    """Raises unless a group has all ranks on which these tensors are sharded.

    Args:
        group: the ranks.
        tensors: of this worker.
    """
    worker = ranks_of_worker(tensors)
    ranks = list(group.global_ranks)
    if ranks and not worker.issubset(ranks):
        raise ValueError(
            "group must have all ranks of every worker, got one with the global ranks "
            f"{ranks} for a worker on {sorted(worker)}. Leave it out, for all ranks "
            "that there are."
        )


def ranks_of(site: Any, group: Group) -> tuple[int, ...]:
    """The ranks within `group` that a site in `levels` stands for, sorted.

    Args:
        site: ranks, a process group, or a one-dimensional device mesh.
        group: the whole.

    Raises:
        TypeError: if it is none of these.
        ValueError: if its ranks are not among those of the group.
    """
    if isinstance(site, DeviceMesh):
        site = site.get_group()
    if isinstance(site, dist.ProcessGroup):
        ranks = dist.get_process_group_ranks(site)
        if isinstance(group, TorchGroup):
            ranks = [dist.get_group_rank(group._group, rank) for rank in ranks]
    else:
        try:
            ranks = [operator.index(rank) for rank in site]
        except TypeError:
            raise TypeError(
                f"levels must have sites of ranks or process groups, got {site!r}. The "
                "period of all workers is sync_every."
            ) from None
    members = group.members(0)
    if len(set(ranks)) < len(ranks) or not set(ranks) <= set(members):
        raise ValueError(
            f"levels must have sites of different ranks among {members}, got {ranks}."
        )
    return tuple(sorted(ranks))
