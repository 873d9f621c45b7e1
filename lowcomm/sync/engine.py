"""Streams: launch, keep pending, collect, commit, apply.

A stream is one state of the model with its schedule, its peers and its meaning: what a
worker contributes, and what the result does. The engine knows when and how; a method is
a list of streams.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowcomm.sync.errors import PeerMismatch, SyncError
from lowcomm.sync.flat import Chunk, Flats, Layout
from lowcomm.sync.mean import (
    Header,
    Outcome,
    Wire,
    broadcast_,
    check_headers,
    gather_bytes,
    handshake,
    mean_,
    serve_,
)
from lowcomm.sync.peers import Peers, everyone
from lowcomm.sync.schedule import Periodic
from lowcomm.sync.seam import Exchange, Group, Task

_log = logging.getLogger(__name__)

#: One part in so many of the agreed values is compared in every round.
_FINGERPRINT_PARTS = 16

_NOT_FINITE = "round %d of %r goes without %s share: it is not finite"


class Stream(ABC):
    """A state that workers exchange, and what it means to them.

    Args:
        name: of the stream, the same on all workers.
        layout: the tensors that it reads and writes.
        schedule: when it is launched.
        peers: with whom.
    """

    #: values that must be equal on all workers before a round; compared in each
    agreed: Flats | None = None
    #: False for what only accompanies a round, such as buffers
    is_round = True
    #: whether it holds the parameters, or part of them
    has_parameters = False
    #: whether the first worker's values are taken instead of a mean
    takes_first = False

    def __init__(
        self,
        name: str,
        layout: Layout,
        schedule: Periodic,
        *,
        peers: Peers = everyone,
    ) -> None:
        self.name = name
        self.layout = layout
        self.schedule = schedule
        self.peers = peers

    @abstractmethod
    def share_(self, chunk: Chunk, out: Tensor) -> None:
        """Writes this worker's contribution to a chunk into `out`, which is updated."""

    @abstractmethod
    def apply_(self, chunk: Chunk, result: Tensor, *, keep: bool) -> None:
        """Uses the mean of a chunk over the counted workers.

        Args:
            chunk: the chunk.
            result: the mean, shape `(chunk.stop - chunk.start,)`; may be used up.
            keep: whether this worker's share is not in the mean and stays with it.
        """

    def locate(self) -> None:
        """Points the layout at the tensors as they are now."""
        self.layout.refresh()

    def start_(self) -> None:  # noqa: B027 - most streams keep nothing
        """Takes the values before the first step as the common starting point."""

    def extend_(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes in further tensors, by name."""
        self.layout = self.layout.extended(tensors)

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Copies of all tensors that the next round depends on, by kind and name."""
        return {}

    def load_(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:  # noqa: B027
        """Copies the tensors of `state()` back, as far as they are there."""


@dataclass
class Stats:
    """What synchronization has done so far, on this worker.

    Args:
        steps: inner steps attempted.
        rounds: exchanges applied, one for each fragment or state.
        bytes_sent: by exchanges, headers included.
        setup_bytes: by checks, broadcasts and `global_parameters`.
        exposed_s: seconds that `step()` waited for the network.
        skipped_rounds: due, and not applied here.
    """

    steps: int = 0
    rounds: int = 0
    bytes_sent: int = 0
    setup_bytes: int = 0
    exposed_s: float = 0.0
    skipped_rounds: int = 0


@dataclass
class _Progress:
    """Where a stream is in its schedule."""

    stream: Stream
    due: int | None
    round: int = 0
    settled_at: int = 0  # steps taken when it was last exchanged
    verified: bool = False  # whether the whole of `agreed` has been compared


class _Pending(NamedTuple):
    """A launched exchange: everything that landing it needs."""

    progress: _Progress
    finite: bool
    shares: Flats
    task: Task | None  # None if nobody else takes part
    clock: int
    steps: int


class Engine:
    """Runs streams over a group.

    Args:
        streams: in the order in which they are launched.
        group: the workers.
        weight: this worker's weight in a mean, given the inner steps since the last.
        timeout_s: bound of every wait, in seconds.
        bucket_bytes: largest message.
        heal: called when the worker has taken a result in place of a broken state.
    """

    def __init__(
        self,
        streams: Sequence[Stream],
        group: Group,
        *,
        weight: Callable[[int], float],
        timeout_s: float,
        bucket_bytes: int,
        heal: Callable[[], None],
    ) -> None:
        self.group = group
        self.started = False
        # A dict subclass: torch's RemovableHandle refers to it weakly.
        self.hooks: OrderedDict[int, Callable[[Stats], None]] = OrderedDict()
        self._weight = weight
        self._timeout_s = timeout_s
        self._bucket_bytes = bucket_bytes
        self._heal = heal
        self._lane = group.new_lane()
        self._exchange = 0
        self._stats = Stats()
        self._lost: SyncError | None = None
        # Counts steps as the schedules do; `finish` brings it to the same value
        # everywhere, while `stats.steps` stays this worker's own.
        self._clock = 0
        self._progress = [
            _Progress(stream, stream.schedule.after(0)) for stream in streams
        ]
        self._next = self._next_due()

    @property
    def stats(self) -> Stats:
        """A copy of the counts so far."""
        return dataclasses.replace(self._stats)

    @property
    def streams(self) -> list[Stream]:
        """The streams in order."""
        return [progress.stream for progress in self._progress]

    # ------------------------------------------------------------------ every step

    def start(self) -> None:
        """Called before the first inner step."""
        for progress in self._progress:
            progress.stream.locate()
            progress.stream.start_()
        self.started = True

    def advance(self) -> None:
        """Called after every inner step: launches and lands what is due."""
        self._stats.steps += 1
        self._clock += 1
        if self._clock >= self._next:
            self._exchange_all(
                [p for p in self._progress if p.due and p.due <= self._clock]
            )

    def _exchange_all(self, due: list[_Progress]) -> None:
        for pending in [self._launch(progress) for progress in due]:
            self._land(pending)
        self._next = self._next_due()

    def _next_due(self) -> float:
        return min((p.due for p in self._progress if p.due), default=float("inf"))

    def _launch(self, progress: _Progress) -> _Pending:
        """Takes this worker's share, judges it and puts it on its way."""
        stream, layout = progress.stream, progress.stream.layout
        stream.locate()
        wire = self._wire(stream.peers, progress.round)
        # Alone, shares are not kept: nothing can fail between taking and applying them,
        # and taking them again while they are in the cache is faster.
        shares = layout.empty() if wire.others else layout.scratch()
        finite = layout.is_finite()
        for chunk in layout.chunks if wire.others else ():
            stream.share_(chunk, shares[chunk])
        task = None
        if wire.others:
            if stream.takes_first:
                weight = float(self.group.rank == wire.members[0])
            else:
                weight = self._weight(self._stats.steps - progress.settled_at)
            header = self._header(progress, finite, weight)
            exchange = mean_(
                wire, shares.tensors, header, stream.name, self._bucket_bytes
            )
            task = self._run(exchange)
        clock, steps = self._clock, self._stats.steps
        return _Pending(progress, finite, shares, task, clock, steps)

    def _land(self, pending: _Pending) -> None:
        """Waits for the result of a launched exchange and applies it."""
        progress, finite, shares, task, clock, steps = pending
        applied, healed = finite, False
        if task is not None:
            since = self.group.now()
            outcome: Outcome = self._wait(task)
            self._stats.exposed_s += self.group.now() - since
            self._stats.bytes_sent += outcome.bytes_sent
            applied = bool(outcome.included) and self.group.commit(progress.round)
            healed = not finite
            _log_left_out(progress, outcome)
        elif not finite:
            _log.warning(_NOT_FINITE, progress.round, progress.stream.name, "this")
        if applied:
            stream = progress.stream
            for chunk in stream.layout.chunks:
                if task is None:
                    stream.share_(chunk, shares[chunk])
                stream.apply_(chunk, shares[chunk], keep=False)
            if healed:
                self._heal()
        self._passed(progress, clock, applied=applied)
        progress.settled_at = steps

    def _passed(self, progress: _Progress, clock: int, *, applied: bool) -> None:
        """Counts a round that is over."""
        progress.round += 1
        progress.verified = True
        progress.due = progress.stream.schedule.after(clock)
        if not progress.stream.is_round:
            return
        if applied:
            self._stats.rounds += 1
            for hook in list(self.hooks.values()):
                hook(self.stats)
        else:
            self._stats.skipped_rounds += 1

    # ------------------------------------------------------------------ on request

    def average(self, stream: Stream) -> Flats:
        """The workers' mean of a stream that has no schedule; nothing is applied."""
        progress = self._find(_number(stream.name))
        pending = self._launch(progress)
        progress.round += 1
        if pending.task is None:
            for chunk in stream.layout.chunks:
                stream.share_(chunk, (flats := stream.layout.empty())[chunk])
            return flats
        outcome: Outcome = self._wait(pending.task)
        self._stats.setup_bytes += outcome.bytes_sent
        return pending.shares

    def finish(self) -> None:
        """One last exchange of whatever has changed since its last one.

        A worker that comes early serves the others' rounds until all have come.
        """
        if not self.started:
            self.start()
        while True:
            wire = self._wire(everyone, 0)
            headers: dict[int, Header] = self._wait(
                self._run(handshake(wire, self._header(None, True, 0.0)))
            )
            working = [h for h in headers.values() if not h.finished]
            if not working:
                break
            self._serve(wire, headers, self._find(working[0].stream))
        self._stats.setup_bytes += wire.bytes_sent
        # Rounds go on from the step of whoever took most.
        self._clock = max(header.step for header in headers.values())
        settled = [header.settled for header in headers.values()]
        moved = [
            progress
            for i, progress in enumerate(self._progress)
            if not all(bits >> i & 1 for bits in settled)
        ]
        self._exchange_all(moved)
        for progress in self._progress:
            if progress.due and progress.due <= self._clock:
                progress.due = progress.stream.schedule.after(self._clock)
        self._next = self._next_due()

    def _serve(
        self, wire: Wire, headers: dict[int, Header], progress: _Progress
    ) -> None:
        """Takes part in others' round without a share that counts."""
        stream = progress.stream
        check_headers(headers, stream.name)
        stream.locate()
        shares = stream.layout.new()
        outcome: Outcome = self._wait(
            self._run(serve_(wire, shares.tensors, headers, self._bucket_bytes))
        )
        self._stats.bytes_sent += outcome.bytes_sent
        if progress.due is None:
            progress.round += 1
            return
        keep = progress.settled_at < self._stats.steps
        if outcome.included:
            for chunk in stream.layout.chunks:
                stream.apply_(chunk, shares[chunk], keep=keep)
        clock = max(header.step for header in headers.values() if not header.finished)
        self._passed(progress, clock, applied=bool(outcome.included))

    def agree(self, plan: Mapping[str, Any]) -> None:
        """Raises `PeerMismatch` on every worker unless all of them hold this plan."""
        text = json.dumps(plan).encode()
        digest = hashlib.sha256(text).digest()
        if len(set(self._gather(digest).values())) == 1:
            return
        plans = {rank: json.loads(own) for rank, own in self._gather(text).items()}
        (first, one), *others = plans.items()
        for rank, other in others:
            for key in [*one, *(key for key in other if key not in one)]:
                if one.get(key) != other.get(key):
                    raise PeerMismatch(
                        f"{key} must be the same on all workers, got "
                        f"{one.get(key, 'nothing')} on rank {first} and "
                        f"{other.get(key, 'nothing')} on rank {rank}."
                    )

    def broadcast(self, tensors: Mapping[str, Tensor]) -> None:
        """Gives all workers the first one's tensors, bit by bit, in place."""
        layout = Layout(tensors, widen=False)
        layout.refresh()
        flats = layout.empty()
        for chunk in layout.chunks:
            layout.gather_(chunk, flats[chunk])
        wire = self._wire(everyone, 0)
        exchange = broadcast_(wire, flats.tensors, self._bucket_bytes)
        self._stats.setup_bytes += self._wait(self._run(exchange))
        for chunk in layout.chunks:
            layout.scatter_(chunk, flats[chunk])

    def _gather(self, mine: bytes) -> dict[int, bytes]:
        wire = self._wire(everyone, 0)
        replies: dict[int, bytes] = self._wait(self._run(gather_bytes(wire, mine)))
        self._stats.setup_bytes += wire.bytes_sent
        return replies

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Copies of all that the next step depends on, as tensors and plain types."""
        return {
            "started": self.started,
            "clock": self._clock,
            "stats": dataclasses.asdict(self._stats),
            "streams": {
                progress.stream.name: {
                    "due": progress.due,
                    "round": progress.round,
                    "settled_at": progress.settled_at,
                    "tensors": progress.stream.state(),
                }
                for progress in self._progress
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Copies everything back; the next exchange compares all agreed values."""
        self.started = state["started"]
        self._clock = state["clock"]
        self._stats = Stats(**state["stats"])
        # Tensors go by their own names: streams may be cut differently.
        tensors: dict[str, dict[str, Tensor]] = {}
        for saved in state["streams"].values():
            for kind, named in saved["tensors"].items():
                tensors.setdefault(kind, {}).update(named)
        for progress in self._progress:
            after = progress.stream.schedule.after(self._clock)
            saved = state["streams"].get(progress.stream.name, {})
            progress.due = saved.get("due", after)
            progress.round = saved.get("round", 0)
            progress.settled_at = saved.get("settled_at", self._stats.steps)
            progress.verified = False
            progress.stream.locate()
            progress.stream.load_(tensors)
        self._next = self._next_due()

    # ------------------------------------------------------------------ helpers

    def _find(self, number: int) -> _Progress:
        for progress in self._progress:
            if _number(progress.stream.name) == number:
                return progress
        names = [progress.stream.name for progress in self._progress]
        raise PeerMismatch(
            f"workers must exchange the same streams, got one that is not in {names}."
        )

    def _wire(self, peers: Peers, round: int) -> Wire:
        members = peers(self.group.members(round), self.group.rank, round)
        self._exchange += 1
        return Wire(self.group, members, self._lane, self._exchange)

    def _header(
        self, progress: _Progress | None, finite: bool, weight: float
    ) -> Header:
        """What this worker says of a stream's next round; of all, if it has none."""
        settled = sum(
            1 << i
            for i, other in enumerate(self._progress)
            if other.due is None or other.settled_at == self._stats.steps
        )
        if progress is None:
            return Header(0, 0, self._clock, settled, 0, weight, 0, 0)
        stream = progress.stream
        agreed = 0
        if stream.agreed is not None:
            parts = 1 if not progress.verified else _FINGERPRINT_PARTS
            chunks = stream.layout.chunks[progress.round % parts :: parts]
            agreed = _fingerprint([stream.agreed[chunk] for chunk in chunks])
        return Header(
            stream=_number(stream.name),
            round=progress.round,
            step=self._clock,
            settled=settled,
            contributes=int(finite),
            weight=weight,
            agreed=agreed,
            plan=_number(repr(stream.layout.specs)),
        )

    def _run(self, exchange: Exchange) -> Task:
        if self._lost is not None:
            raise self._lost
        return self.group.run(exchange)

    def _wait(self, task: Task) -> Any:
        try:
            return task.wait(self._timeout_s)
        except SyncError as error:
            # Messages of this exchange may still come; nothing after it can be trusted.
            self._lost = error
            raise


def _number(text: str) -> int:
    """A positive 63-bit number for a text, the same in every process."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1 or 1


def _log_left_out(progress: _Progress, outcome: Outcome) -> None:
    """Says whose shares were not finite."""
    for rank, header in outcome.headers.items():
        if not header.contributes and not header.finished:
            name = f"rank {rank}'s"
            _log.warning(_NOT_FINITE, progress.round, progress.stream.name, name)


def _fingerprint(values: Sequence[Tensor]) -> int:
    """A 63-bit number that changes with (nearly) any bit of any value."""
    sums = [value.view(torch.int32).sum(dtype=torch.int64) for value in values]
    number = 1
    for part in torch.stack(sums).tolist() if sums else ():
        number = (number * 1_000_003 + part) & (1 << 63) - 1
    return number
