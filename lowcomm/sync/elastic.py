"""The wire when workers come and go."""

from __future__ import annotations

import hashlib
import logging
import math
import socket
import threading
import time
import uuid
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from lowcomm.sync import threads
from lowcomm.sync.errors import PeerLost, PeerMismatch, SyncError
from lowcomm.sync.group import TorchGroup, split_address
from lowcomm.sync.roll import (
    Entry,
    Roll,
    Settlement,
    Sheet,
    address_towards,
    latest,
    settle,
    settlement,
    staying,
    stores_of,
)
from lowcomm.sync.schedule import check_number, check_positive
from lowcomm.sync.seam import Exchange, Group, Handle, Task

_log = logging.getLogger(__name__)

# torch's types know less of these than there is.
_dist: Any = dist

#: Connections take milliseconds; who has not come after so long is dead.
_BUILD_S = 5.0
_GOODBYE_S = 1.0


class Change(NamedTuple):
    """How the workers have changed.

    Args:
        members: ranks of all that are there now, sorted.
        joined: those that were not among this worker's before.
        left: those that were, and are not now.
        steps: most inner steps that anybody has taken.
        told: what each has told the others at the change, by rank: the same on all, so
            that they can take the same new positions in shared data.
    """

    members: tuple[int, ...]
    joined: tuple[int, ...]
    left: tuple[int, ...]
    steps: int
    told: Mapping[int, Any]


class ElasticGroup(Group):
    """Workers that come and go, without an end of the run.

    They meet at a lighthouse, `torchft_lighthouse` or `python -m lowcomm lighthouse`,
    which sees who is alive; tensors go between the workers over gloo. When one is lost,
    the others drop what was not finished and keep their own progress; a round is
    applied by all that are left or by none of them. When one comes, it is let in after
    the next round, with the state of another. When one was away, it takes what it has
    missed and keeps its own progress.

    Between rounds nothing depends on the lighthouse: it may be stopped and started
    again.

    Build one for each optimizer, before it; `rank` is known when the optimizer is
    built. It needs no `torch.distributed` process group.

    Args:
        lighthouse: its address, "host:port".
        name: of this worker, which no other has; made up if None. A worker that starts
            again needs another name than before only if that may still be alive.
        run: the run it belongs to. Workers of another one are refused.
        token: a secret word that all workers of a run share, against mistakes: it is
            compared as a digest. The network must be one that you trust.
        address: of this machine, for the others; if None the one from which the
            lighthouse is reached. It is listened on no other.
        min_workers: with fewer no round is taken: the run waits for others.
        start_with: so many begin; `min_workers` if None.
        max_failed_rounds: so often in a row workers are settled anew without a round in
            between; then it ends with `SyncError`.
        on_peer_loss: "continue", or "raise": `PeerLost` when a worker is lost.
        timeout_s: bound of every wait for another worker, in seconds. Who is silent for
            so long is left out until it comes back.
        tell: returns what the others are to know of this worker when the workers
            change, in plain types: its position in the data, say.

    Raises:
        TypeError: if an argument is of another kind.
        ValueError: if an argument is out of its range.
        ImportError: without torchft.

    Later, out of the optimizer: `PeerMismatch` if this worker does not belong to the
    others, `SyncError` when it gives up, `PeerLost` if that is wanted.

    Example::

        with ElasticGroup("10.0.0.1:29510", start_with=2) as group:
            opt = lowcomm.DiLoCo(model.parameters(), group=group, sync_every=100)
            while opt.stats.steps < num_steps:
                ...
            opt.finish()
    """

    is_elastic = True
    confirms = True
    device = torch.device("cpu")

    def __init__(
        self,
        lighthouse: str,
        *,
        name: str | None = None,
        run: str = "",
        token: str | None = None,
        address: str | None = None,
        min_workers: int = 1,
        start_with: int | None = None,
        max_failed_rounds: int = 10,
        on_peer_loss: str = "continue",
        timeout_s: float = 60.0,
        tell: Callable[[], Any] | None = None,
    ) -> None:
        check_number("min_workers", min_workers, int, least=1)
        start_with = min_workers if start_with is None else start_with
        check_number("start_with", start_with, int, least=min_workers)
        check_number("max_failed_rounds", max_failed_rounds, int, least=1)
        check_positive("timeout_s", timeout_s)
        if on_peer_loss not in ("continue", "raise"):
            raise ValueError(
                f"on_peer_loss must be 'continue' or 'raise', got {on_peer_loss!r}."
            )
        words = {"lighthouse": lighthouse, "name": name or "", "run": run}
        for what, value in (words | {"token": token or ""}).items():
            if not isinstance(value, str):
                raise TypeError(f"{what} must be a string, got {value!r}.")
        if tell is not None and not callable(tell):
            raise TypeError(f"tell must be a function or None, got {tell!r}.")
        if address in ("0.0.0.0", "::"):
            raise ValueError(
                f"address must be one that others can reach, got {address!r}. Leave it "
                "out, or name that of an interface."
            )
        lighthouse = lighthouse.removeprefix("http://")
        host, port = _split(lighthouse)
        self.timeout_s = timeout_s
        self.name = name or f"{socket.gethostname()}-{uuid.uuid4().hex[:8]}"
        self.address = address or address_towards(host, port)
        self._tell = tell
        self._raises = on_peer_loss == "raise"
        self._max_failed_rounds = max_failed_rounds
        self._channel: _Channel | None = None
        self._members: tuple[int, ...] = ()
        self._has_lane = False
        self._failed = 0
        self._rounds = -1
        self.main: tuple[int, ...] = ()
        self._is_done = False
        self.hooks: OrderedDict[int, Callable[[Change], None]] = OrderedDict()
        # Of the last sheet, and what follows from it; changed by the roll's thread.
        self._news = threading.Condition()
        self._sheet: Sheet = {}
        self._strangers: Sheet = {}
        self._namesake: Entry | None = None
        self._waits = False
        self._settlement: Settlement | None = None
        self._sheet_at = -math.inf
        self._saw_run = 0.0  # when, on the clock of waits
        self._progress = 0
        self._store, port_of_store = _listen(self.address)
        digest = hashlib.sha256(f"{run}\0{token}".encode()).hexdigest()
        self._roll = Roll(
            lighthouse,
            self.name,
            Entry(
                run,
                "" if token is None else digest,
                f"{self.address}:{port_of_store}",
                min_workers=min_workers,
                start_with=start_with,
                patience_s=timeout_s,
            ),
            _weakly(self._on_sheet),
        )
        self._roll.start()
        weakref.finalize(self, self._roll.close)
        _log.info(
            "%s at %s, lighthouse %s: waits %g s for a worker (timeout_s), %g s for a "
            "connection, and gives up when workers were settled %d times without a "
            "round",
            *(self.name, self.address, lighthouse, timeout_s),
            *(min(_BUILD_S, timeout_s), max_failed_rounds),
        )

    # ------------------------------------------------------------------ the seam

    @property
    def rank(self) -> int:  # type: ignore[override]
        """This worker's number, which it keeps; others' numbers may be any."""
        rank = self._roll.entry.rank
        if rank is None:
            raise RuntimeError(
                "rank must be asked for when the optimizer has been built, got a call "
                "before: workers are numbered when they meet."
            )
        return rank

    def members(self, round: int = 0) -> tuple[int, ...]:
        return self._members

    def channel(self) -> Group:
        if self._channel is None:
            raise SyncError(
                "group must be open, got one that was closed, or has given up. Build "
                "it and the optimizer again."
            )
        return self._channel

    def send(self, peer: int, tensor: Tensor, tag: int) -> Handle:
        return self.channel().send(peer, tensor, tag)

    def recv(self, peer: int, tensor: Tensor, tag: int) -> Handle:
        return self.channel().recv(peer, tensor, tag)

    def run(self, exchange: Exchange) -> Task:
        return self.channel().run(exchange)

    def new_lane(self) -> int:
        if self._has_lane:
            raise ValueError(
                "group must be used by one optimizer, got a second one. Put several "
                "into one wrapper as a list, or build a group for each; a Checkpointer "
                "takes none."
            )
        self._has_lane = True
        return 0

    @property
    def is_done(self) -> bool:
        return self._is_done

    @is_done.setter
    def is_done(self, is_done: bool) -> None:
        self._is_done = is_done
        self._roll.say(is_done=is_done)

    def register_change_hook(self, hook: Callable[[Change], None]) -> RemovableHandle:
        """Calls `hook(change)` when the workers have changed, until it is removed."""
        if not callable(hook):
            raise TypeError(f"hook must be a function of the change, got {hook!r}.")
        handle = RemovableHandle(self.hooks)
        self.hooks[handle.id] = hook
        return handle

    def note_progress(self) -> None:
        self._roll.say(progress=self._roll.entry.progress + 1)

    def close(self) -> None:
        """Says goodbye, so that the others need not find out; after `finish`."""
        if self._roll.is_closed:
            return
        self._roll.say(leaves=True, ready=False)
        with self._news:
            self._news.wait_for(
                lambda: self.name in self._sheet and self._sheet[self.name].leaves,
                _GOODBYE_S,
            )
        self._roll.close()
        self._drop_channel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------ settling

    def reform(self, rounds: int) -> None:
        before = self._members
        self._drop_channel()
        self._failed = self._failed + 1 if rounds == self._rounds else 0
        self._rounds = rounds
        while True:
            if self._failed >= self._max_failed_rounds:
                raise self._given_up()
            new = self._await_settlement()
            if new is not None and self._build(new):
                break
            self._failed += 1
            ready = sorted(name for name, e in self._sheet.items() if e.ready)
            _log.warning("%s still waits, ready are %s", self.name, ready)
        left = [rank for rank in before if rank not in self._members]
        if left and self._raises:
            raise PeerLost(
                f"ranks {left} were lost, and on_peer_loss='raise'. Start from a "
                "checkpoint.",
                left[0],
            )

    def _given_up(self) -> SyncError:
        if not self._sheet:
            return SyncError(
                f"lighthouse must answer, got nothing from {self._roll.address} on "
                f"{self.name}. Start it with `python -m lowcomm lighthouse`, and see "
                "that its port is open."
            )
        if self._roll.entry.generation == 0:
            return SyncError(
                f"start_with={self._roll.entry.start_with} workers must be there to "
                f"begin, got {sorted(self._sheet)} for {self._max_failed_rounds} "
                f"times {2 * self.timeout_s:g} s. Start the others, or raise "
                "max_failed_rounds or timeout_s."
            )
        return SyncError(
            f"workers must have a round in {self._max_failed_rounds} attempts, got "
            f"none on {self.name} with {sorted(self._sheet)} alive. Start from a "
            "checkpoint, or raise max_failed_rounds or timeout_s."
        )

    def tell(self) -> Any:
        return None if self._tell is None else self._tell()

    def tell_change(
        self, before: Sequence[int], steps: int, told: Mapping[int, Any]
    ) -> None:
        """Calls the hooks, when a change is complete."""
        now = self._members
        change = Change(
            now,
            tuple(rank for rank in now if rank not in before),
            tuple(rank for rank in before if rank not in now),
            steps,
            told,
        )
        _log.info("%s is rank %d among %s", self.name, self.rank, now)
        for hook in list(self.hooks.values()):
            hook(change)

    def _await_settlement(self) -> Settlement | None:
        """What all come to, if they do in time."""
        if self._roll.entry.generation == 0 and self._roll.entry.start_with == 1:
            self._look_round()
        with self._news:
            self._settlement, self._waits = None, True
        self._roll.say(ready=True)
        try:
            with self._news:
                deadline = time.monotonic() + 2 * self.timeout_s
                while self._settlement is None and time.monotonic() < deadline:
                    self._news.wait(0.5)
                    self._check_company()
                    if self._others_train():
                        deadline = time.monotonic() + 2 * self.timeout_s
        finally:
            with self._news:
                self._waits, new = False, self._settlement
                if new is None:
                    self._roll.say(ready=False)
        return new

    def _look_round(self) -> None:
        """Returns when it is sure whether there is a run, which one alone would miss.

        A lighthouse that has just come back knows nobody.
        """
        with self._news:
            self._news.wait_for(
                lambda: latest(self._sheet)[0] > 0 or self._roll.is_sure,
                self.timeout_s,
            )

    def _others_train(self) -> bool:
        """Whether there is a run under way that this worker waits to be let into."""
        if time.monotonic() > self._sheet_at + self.timeout_s:
            return False  # as far as is known
        generation, epoch = latest(self._sheet)
        if (
            not generation
            and self._saw_run
            and time.monotonic() > self._saw_run + self.timeout_s
        ):
            raise SyncError(
                "the run must be under way when a worker is let in, got its end while "
                f"{self.name} waited."
            )
        train = any(e.epoch == epoch and not e.is_done for e in self._sheet.values())
        return generation > 0 and epoch != self._roll.entry.epoch and train

    def _check_company(self) -> None:
        if self._roll.error is not None:
            raise self._roll.error
        self._check_name()
        if self._is_stray():
            mine, (name, entry) = self._roll.entry, min(self._strangers.items())
            what, more = "run", ""
            if entry.run == mine.run:
                what, more = "token", " with another token"
            raise PeerMismatch(
                f"{what} must be that of the workers at {self._roll.address}, got "
                f"{mine.run!r} on {self.name} and {entry.run!r} on {name}{more}. Give "
                "each run a lighthouse of its own."
            )

    def _is_stray(self) -> bool:
        """Whether it is this worker that has come to the wrong place."""
        if not self._strangers or latest(self._sheet)[0]:
            return False
        # Of two runs that begin at one lighthouse, the one with more workers does.
        runs = Counter((e.run, e.token) for e in self._strangers.values())
        runs[self._roll.entry.run, self._roll.entry.token] = len(self._sheet)
        most = max(runs, key=lambda run: (runs[run], run))
        is_least = most != (self._roll.entry.run, self._roll.entry.token)
        return is_least or latest(self._strangers)[0] > 0

    def _check_name(self) -> None:
        me, other = self._roll.entry, self._namesake
        if other is not None and other.generation >= me.generation:
            self._roll.close()  # without a goodbye, which would be the other's
            raise PeerMismatch(
                f"name must be that of one worker, got {self.name!r} at {me.store} and "
                f"at {other.store}. Leave it out, or wait for the other one's end."
            )

    def _on_sheet(self, sheet: Sheet, key: str) -> None:
        """Called in the roll's thread."""
        me = self._roll.entry
        with self._news:
            self._sheet_at = time.monotonic()
            if self.name in sheet and sheet[self.name].store != me.store:
                self._namesake = sheet[self.name]
                self._news.notify_all()
                return
            self._sheet = {
                name: entry
                for name, entry in sheet.items()
                if (entry.run, entry.token) == (me.run, me.token)
            }
            for name in sheet.keys() - self._sheet.keys() - self._strangers.keys():
                _log.warning("refused %s, of another run or without the token", name)
            self._strangers = {
                name: sheet[name] for name in sheet.keys() - self._sheet.keys()
            }
            if latest(self._sheet)[0]:
                self._saw_run = time.monotonic()
            self._decide(key)
            self._news.notify_all()

    def _decide(self, key: str) -> None:
        sheet, me = self._sheet, self._roll.entry
        names = settle(sheet)
        if self._saw_run and not latest(staying(sheet))[0]:
            names = None  # the run has not ended because nobody of it is seen for now
        if self._is_stray():
            names = None
        if self._waits and self._settlement is None:
            if names and self.name in names:
                self._settlement = new = settlement(sheet, names, key)
                self._roll.say(
                    ready=False,
                    misses=False,
                    generation=new.generation,
                    epoch=new.epoch,
                    rank=new.ranks[self.name],
                    among=stores_of({name: sheet[name] for name in names}),
                )
            return
        if self.name not in sheet or sheet[self.name].epoch != me.epoch:
            return
        is_latest = latest(sheet) == (me.generation, me.epoch)
        others = [entry for name, entry in sheet.items() if name != self.name]
        progress = sum(entry.progress for entry in others)
        channel = self._channel  # which the main thread may drop at any time
        if progress > self._progress and channel is not None:
            channel.be_patient()
        self._progress = progress
        ready = [entry.epoch == me.epoch for entry in others if entry.ready]
        self.calls = not is_latest or any(ready)
        self.awaited = not all(ready)

    def _build(self, new: Settlement) -> bool:
        """Connects the workers; has it been done in time?"""
        built: list[_Channel] = []
        timeout_s = min(_BUILD_S, self.timeout_s)

        def build() -> None:
            try:
                channel = _Channel(new, self.name, self.address, timeout_s)
            except RuntimeError as error:  # torch's, of whichever worker is missing
                _log.info("no connection: %s", str(error).splitlines()[0])
            else:
                built.append(channel)

        threads.start(build, "lowcomm build").join(timeout_s)
        if not built:
            return False
        (self._channel,) = built
        self._members = self._channel.members(0)
        self.epoch, self.main = new.epoch, new.main
        self.calls = self.awaited = False
        return True

    def _drop_channel(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.abort()


def _weakly(method: Callable[[Sheet, str], None]) -> Callable[[Sheet, str], None]:
    """The method, as long as its owner is there: a thread must not keep it."""
    reference = weakref.WeakMethod(method)

    def call(sheet: Sheet, key: str) -> None:
        if (found := reference()) is not None:
            found(sheet, key)

    return call


class _Channel(TorchGroup):
    """Connections between workers that have been settled."""

    confirms = True

    def __init__(
        self, new: Settlement, name: str, address: str, timeout_s: float
    ) -> None:
        members = sorted(new.ranks.values())
        rank = new.ranks[name]
        group = None
        if len(members) > 1:
            host, port = _split(new.store)
            limit = timedelta(seconds=timeout_s)
            store = _dist.TCPStore(
                host, port, is_master=False, wait_for_workers=False, timeout=limit
            )
            options = _dist.ProcessGroupGloo._Options()
            options._timeout = limit
            options._devices = [_dist.ProcessGroupGloo.create_device(hostname=address)]
            group = _dist.ProcessGroupGloo(
                _dist.PrefixStore(new.epoch, store),
                members.index(rank),
                len(members),
                options,
            )
        self._over(group, members, rank, is_gloo=True)

    def abort(self) -> None:
        self._abort()

    def be_patient(self) -> None:
        """Counts as a message: others are at work."""
        self._pace.at = time.monotonic()


def _listen(address: str) -> tuple[Any, int]:
    """A store at which workers meet if this one is the first of them."""
    listener = socket.create_server((address, 0), backlog=128)
    store = _dist.TCPStore(
        address,
        port := listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=_BUILD_S),
        master_listen_fd=listener.detach(),
    )
    return store, port


def _split(address: str) -> tuple[str, int]:
    place = split_address(address)
    if place is None:
        raise ValueError(
            f"lighthouse must be an address like 'host:29510', got {address!r}."
        )
    return place
