"""Launch, keep pending, collect, commit, apply.

The engine knows when and how; what a share is and what a result does is a stream's.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lowcomm.sync.errors import PeerLost, PeerMismatch, SyncError
from lowcomm.sync.flat import Flats, Layout, number_of
from lowcomm.sync.mean import (
    HEADER_BYTES,
    Greeting,
    Header,
    Job,
    Outcome,
    Wire,
    announce,
    await_finished,
    broadcast_,
    check_headers,
    cut_name,
    gather_bytes,
    handshake,
    mean_,
    serve_,
)
from lowcomm.sync.peers import Peers, everyone
from lowcomm.sync.seam import Exchange, Group, Task
from lowcomm.sync.staging import Staged
from lowcomm.sync.stats import Stats
from lowcomm.sync.stream import Landing, Stream

_log = logging.getLogger(__name__)

#: At the most so many rounds pass until all of the agreed values have been compared.
_FINGERPRINT_PARTS = 64

_NOT_FINITE = "round %d of %r goes without %s share: it is not finite"


@dataclass
class _Progress:
    """Where a stream is in its schedule."""

    stream: Stream
    due: int | None = None  # step of the next launch; None for not yet known, or never
    began: int | None = 0  # clock at the round's start, while `due` is not known
    round: int = 0
    launched_at: int = 0  # steps taken at its last launch
    settled_at: int = 0  # steps taken when workers were last made equal
    verified: bool = False  # whether the whole of `agreed` has been compared
    waiting: dict[str, Tensor] = field(default_factory=dict)  # to be taken in
    starts: dict[str, Tensor] = field(default_factory=dict)  # their values of then

    def plan(self, clock: int) -> None:
        """A round begins."""
        self.due, self.began = None, clock
        if not self.stream.schedule.is_late:
            self.decide()

    def decide(self) -> None:
        """Settles when the round ends."""
        if self.began is not None:
            self.due, self.began = self.stream.schedule.after(self.began), None


@dataclass(kw_only=True)
class _Pending:
    """An exchange under way: everything that landing it needs."""

    progress: _Progress
    clock: int  # at the launch
    steps: int  # at the launch
    finite: bool
    weight: float
    members: tuple[int, ...]
    partial: bool  # whether others may have rounds of their own at the same time
    shares: Flats
    results: Flats
    lost: Flats | None = None
    staged: Staged | None = None
    alone: bool = False
    wire: Wire | None = None  # None before it is sent
    task: Task | None = None

    @property
    def kept(self) -> bool:
        """Whether the shares are still there when the result comes."""
        return self.results is not self.shares

    @property
    def lands(self) -> int:
        return self.clock + self.progress.stream.schedule.overlap_at(self.clock)


class Engine:
    """Runs streams over a group.

    Args:
        streams: in the order in which they are launched.
        group: the workers.
        weight: this worker's weight in a mean, given the inner steps since the last.
        timeout_s: bound of every wait, in seconds.
        bucket_bytes: largest message.
        heal: called when the worker has taken a result in place of a broken state.
        check: called before a round; raises if the tensors are no longer right.
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
        check: Callable[[], None],
    ) -> None:
        self.group = group
        self.started = False
        # A dict subclass: torch's RemovableHandle refers to it weakly.
        self.hooks: OrderedDict[int, Callable[[Stats], None]] = OrderedDict()
        self._weight = weight
        self._timeout_s = timeout_s
        self._bucket_bytes = bucket_bytes
        self._heal = heal
        self._check = check
        self._lane: int | None = None  # taken when first used: a copy may never be
        self._stats = Stats()
        self._unreported: list[Stats] = []
        self._error: SyncError | None = None  # after which there is nothing more
        # Of rounds that go on without some: who is lost for good, how often each has
        # said that it is finished, and what has not been answered yet.
        self._lost: set[int] = set()
        self._finished: Counter[int] = Counter()
        self._unanswered: dict[int, Task] = {}
        # Counts steps as the schedules do; `finish` brings it to the same value
        # everywhere, while `stats.steps` stays this worker's own.
        self._clock = 0
        self._pending: list[_Pending] = []
        self._progress = [_Progress(stream) for stream in streams]
        for progress in self._progress:
            progress.plan(0)
        self._next: float = self._next_event()

    @property
    def stats(self) -> Stats:
        """A copy of the counts so far."""
        return self._stats.snapshot()

    @property
    def steps(self) -> int:
        """Inner steps attempted."""
        return self._stats.steps

    @property
    def streams(self) -> list[Stream]:
        """The streams in order."""
        return [progress.stream for progress in self._progress]

    # ------------------------------------------------------------------ every step

    def start(self) -> None:
        """Called before the first inner step."""
        for progress in self._progress:
            progress.stream.start_()
        self.started = True

    def advance(self) -> None:
        """Called after every inner step: lands and launches what is due."""
        self._stats.steps += 1
        self._clock += 1
        self.group.tick()
        if self._clock >= self._next:
            self._resend()
            for progress in self._progress:
                progress.decide()
            self._land_all(p for p in self._pending if p.lands <= self._clock)
            self._exchange_all(
                p for p in self._progress if p.due and p.due <= self._clock
            )
            self._next = self._next_event()
            self._report()

    def _next_event(self) -> float:
        due = [p.due for p in self._progress if p.due is not None]
        due += [0 for p in self._progress if p.began is not None]
        lands = [p.lands if p.task or p.alone else 0 for p in self._pending]
        return min(due + lands, default=float("inf"))

    def _exchange_all(self, due: Iterable[_Progress]) -> None:
        """Launches streams, and lands those that do not overlap."""
        due = list(due)
        if due:
            self._check()
        for progress in due:
            self._launch(progress)
        self._land_all(p for p in self._pending if p.lands <= self._clock)

    def _launch(self, progress: _Progress, peers: Peers | None = None) -> None:
        """Takes this worker's share, judges it and puts it on its way."""
        stream, layout = progress.stream, progress.stream.layout
        stream.locate()
        members, partial = self._partners(progress, peers or stream.peers)
        # Alone and at once, shares are not kept: nothing can fail between taking and
        # applying them, and taking them again while they are in the cache is faster.
        alone = len(members) == 1 and not stream.schedule.overlap_at(self._clock)
        if alone:
            shares, finite = layout.scratch(), layout.is_finite()
        else:
            shares, finite = self._shares(stream)
        weight = 0.0
        if stream.counts(self.group.rank, members):
            weight = self._weight(self._stats.steps - progress.launched_at)
        pending = self._new_pending(
            progress,
            clock=self._clock,
            steps=self._stats.steps,
            finite=finite or not stream.is_judged,
            weight=weight,
            members=members,
            partial=partial,
            shares=shares,
            alone=alone,
        )
        progress.plan(self._clock)
        self._pending.append(pending)
        self._send(pending)
        replaced = stream.launched_(shares, len(members), finite=pending.finite)
        if replaced and not pending.finite:
            self._heal()

    def _partners(
        self, progress: _Progress, peers: Peers
    ) -> tuple[tuple[int, ...], bool]:
        """With whom this round is exchanged, and whether others have their own."""
        members = self._members(peers, progress.round)
        if peers is everyone:
            return members, False
        partial = progress.stream.goes_alone or members != self._members(everyone, 0)
        if partial:
            members = tuple(m for m in members if m not in self._finished)
        if self._is_owed(members):
            # One round at a time with anybody: they go on without this worker.
            wire = self._wire(members, partial=True)
            absent = Header.of_absent(self._clock)
            self._run(announce(wire, absent, wire.others))
            self._stats.bytes_sent += len(wire.others) * HEADER_BYTES
            members = (self.group.rank,)
        return members, partial

    def _shares(self, stream: Stream) -> tuple[Flats, bool]:
        """This worker's contribution, with what an earlier code owes; is it finite?"""
        shares, sums = stream.layout.empty(), []
        for chunk in stream.layout.chunks:
            stream.share_(chunk, out := shares[chunk])
            if stream.residual is not None:
                out.add_(stream.residual[chunk])
            if out.is_floating_point():
                sums.append(out.sum())
        # A sum hides no inf and no NaN; over finite values it may overflow.
        if all(math.isfinite(total) for total in map(float, sums)):
            return shares, True
        return shares, all(bool(flat.isfinite().all()) for flat in shares.tensors)

    def _new_pending(
        self, progress: _Progress, *, alone: bool = False, **launch: Any
    ) -> _Pending:
        """A launched exchange with memory for what will come of it."""
        stream, shares, device = progress.stream, launch["shares"], self.group.device
        lost = staged = None
        results = shares
        if not alone:
            # What is still needed when the result comes is not overwritten by it.
            if stream.goes_alone or stream.schedule.overlap_at(launch["clock"]):
                results = stream.layout.empty()
            if stream.residual is not None:
                lost = stream.layout.empty(device)
            if any(flat.device.type != device.type for flat in shares.tensors):
                staged = Staged(shares, device, self.group.rank)
                results = stream.layout.empty(device)
        return _Pending(
            progress=progress,
            alone=alone,
            results=results,
            lost=lost,
            staged=staged,
            **launch,
        )

    def _send(self, pending: _Pending) -> None:
        """Puts a share on its way."""
        if pending.alone:
            return
        stream, header = pending.progress.stream, self._header(pending)
        wire = self._wire(pending.members, header, partial=pending.partial)
        shares = pending.shares if pending.staged is None else pending.staged.flats
        job = self._job(stream, shares, pending.results, wire)
        if pending.lost is not None:
            job = job._replace(lost=pending.lost.tensors)
        job = job._replace(staged=pending.staged)
        pending.wire, pending.task = wire, self._run(mean_(wire, job, header))

    def _resend(self) -> None:
        """Sends again what a checkpoint has brought."""
        for pending in self._pending:
            if pending.task is None:
                self._send(pending)

    def _land_all(self, pendings: Iterable[_Pending], *, settle: bool = False) -> None:
        for pending in list(pendings):
            since = self.group.now()
            outcome = None if pending.task is None else self._outcome(pending)
            self._pending.remove(pending)
            self._land(pending, outcome, self.group.now() - since, settle=settle)

    def _outcome(self, pending: _Pending) -> Outcome:
        """What has come of an exchange, alone if need be; raises if it has failed."""
        assert pending.task is not None
        others = [m for m in pending.members if m != self.group.rank]
        try:
            # Who is late already has had its time.
            timeout_s = 0.0 if self._is_owed(others) else self._timeout_s
            outcome: Outcome = pending.task.wait(timeout_s)
        except PeerLost as error:
            if not pending.progress.stream.goes_alone:
                self._give_up(error)
                raise
            return self._alone(pending, others, error)
        except SyncError as error:
            self._give_up(error)
            raise
        if pending.partial:
            self._finished.update(m for m, h in outcome.headers.items() if h.finished)
        return outcome

    def _alone(
        self, pending: _Pending, others: Sequence[int], error: PeerLost
    ) -> Outcome:
        """Goes on with this worker's own share."""
        assert pending.task is not None
        progress = pending.progress
        if pending.task.failed:  # a connection that is broken stays so
            self._lost.update(others)
        else:
            pending.task.abandon()
            self._unanswered |= dict.fromkeys(others, pending.task)
        reason = str(error).partition(". ")[0]
        name = progress.stream.name
        _log.warning("round %d of %r goes on alone: %s", progress.round, name, reason)
        # The buffers are the exchange's: others' messages may still come.
        pending.results = Flats([flat.clone() for flat in pending.shares.tensors])
        if pending.lost is not None:
            pending.lost = progress.stream.layout.new()
        included = (self.group.rank,) if pending.finite else ()
        assert pending.wire is not None
        return Outcome({}, included, pending.wire.bytes_sent)

    def _is_owed(self, members: Sequence[int]) -> bool:
        """Whether one of them has not answered an earlier exchange yet."""
        waiting = {m: task for m, task in self._unanswered.items() if not task.ended}
        self._unanswered = waiting
        return any(member in waiting for member in members)

    def _give_up(self, error: SyncError) -> None:
        """Messages may still come: nothing after this exchange can be trusted."""
        self._error = error
        self._drop_unkept()

    def _drop_unkept(self) -> None:
        """Forgets shares that results may have overwritten; they are taken anew."""
        for pending in [p for p in self._pending if not p.kept]:
            self._pending.remove(pending)
            pending.progress.due, pending.progress.began = pending.clock, None

    def _land(
        self,
        pending: _Pending,
        outcome: Outcome | None,
        exposed_s: float,
        *,
        settle: bool,
    ) -> None:
        """Applies the result of an exchange that has ended; None if alone."""
        progress, stream = pending.progress, pending.progress.stream
        applied, left_out, used = pending.finite, False, True
        if outcome is not None:
            self._count(stream, outcome, exposed_s)
            applied = bool(outcome.included) and self.group.commit(progress.round)
            left_out = not pending.finite
            used = self.group.rank in outcome.included
            _log_left_out(progress, outcome)
        elif not pending.finite:
            _log.warning(_NOT_FINITE, progress.round, stream.name, "this worker's")
        if applied:
            late = self._stats.steps - pending.steps
            landing = Landing(
                late=late,
                share=pending.shares if pending.kept and not left_out else None,
                settle=left_out or (settle and late == 0),
                num_workers=len(pending.members),
            )
            self._apply(stream, pending.results, landing, alone=pending.alone)
            if left_out:
                self._heal()
            elif used and pending.lost is not None and stream.residual is not None:
                pairs = zip(stream.residual.tensors, pending.lost.tensors, strict=True)
                for residual, lost in pairs:
                    residual.copy_(lost)
            progress.launched_at = pending.steps
            if stream.last is None and not pending.partial:
                progress.settled_at = pending.steps
        self._passed(progress, applied=applied)

    def _apply(
        self, stream: Stream, results: Flats, landing: Landing, *, alone: bool = False
    ) -> None:
        if not alone:  # then it has been located just now
            stream.locate()
        for chunk in stream.layout.chunks:
            result = results[chunk]
            if alone:
                stream.share_(chunk, result)
            device = stream.layout.device_of(chunk)
            stream.apply_(chunk, result.to(device, non_blocking=True), landing)

    def _passed(self, progress: _Progress, *, applied: bool) -> None:
        """Counts a round that is over."""
        progress.round += 1
        progress.verified = True
        if progress.waiting:
            self._extend(progress, progress.waiting, progress.starts)
            progress.waiting, progress.starts = {}, {}
        if not progress.stream.is_round:
            return
        if applied:
            self._stats.rounds += 1
            self._stats.of(progress.stream.name).rounds += 1
            if self.hooks:
                self._unreported.append(self.stats)
        else:
            self._stats.skipped_rounds += 1

    def _report(self) -> None:
        """Calls the hooks, when the step's rounds are over and may be saved."""
        rounds, self._unreported = self._unreported, []
        for stats in rounds:
            for hook in list(self.hooks.values()):
                hook(stats)

    def _count(self, stream: Stream, outcome: Outcome, exposed_s: float) -> None:
        stats = self._stats.of(stream.name)
        for counts in (self._stats, stats):
            counts.exposed_s += exposed_s
            counts.bytes_sent += outcome.bytes_sent
        if outcome.likeness is not None:
            stats.share_norm, stats.mean_norm, stats.cosine = outcome.likeness

    # ------------------------------------------------------------------ on request

    def average(self, stream: Stream) -> Flats:
        """The workers' mean of a stream that has no schedule; nothing is applied."""
        progress = self._find(cut_name(stream.name))
        stream.locate()
        shares, finite = self._shares(stream)
        pending = self._new_pending(
            progress,
            clock=self._clock,
            steps=self._stats.steps,
            finite=finite,
            weight=1.0,
            members=self._members(everyone, 0),
            partial=False,
            shares=shares,
        )
        self._send(pending)
        assert pending.task is not None
        outcome: Outcome = self._wait(pending.task)
        self._stats.setup_bytes += outcome.bytes_sent
        progress.round += 1
        return pending.results

    def finish(self, timeout_s: float | None = None) -> None:
        """One last exchange of whatever has changed since its last one.

        A worker that comes early serves the others' rounds until all have come.

        Args:
            timeout_s: bound of each wait in here; None for the usual one.
        """
        usual, self._timeout_s = self._timeout_s, timeout_s or self._timeout_s
        try:
            self._finish()
        finally:
            self._timeout_s = usual

    def _finish(self) -> None:
        if not self.started:
            self.start()
        self._check()
        self._resend()
        self._land_all(self._pending, settle=True)
        scheduled = [p.stream for p in self._progress if not p.stream.schedule.never]
        # Once for each exchange that another may have under way with this worker.
        times = sum(stream.peers is not everyone for stream in scheduled)
        told = self._tell_finished(times) if times else None
        if told and all(stream.goes_alone for stream in scheduled):
            self._await_finished(*told, times)  # nobody needs this worker meanwhile
        while True:
            wire = self._wire(self._members(everyone, 0))
            headers: dict[int, Header] = self._wait(
                self._run(handshake(wire, Header.of_finished(self._clock)))
            )
            working = [header for header in headers.values() if not header.finished]
            if not working:
                break
            self._stats.setup_bytes += wire.bytes_sent
            self._serve(headers, self._find(working[0].stream), working[0])
        self._stats.setup_bytes += wire.bytes_sent
        if told:
            self._await_finished(*told, times)
        self._finished.clear()
        # Rounds go on from the step of whoever took most.
        self._clock = max(header.step for header in headers.values())
        moved = self._moved_anywhere()
        # Two that have the same last round take it once.
        for name in dict.fromkeys((p.stream.last or p.stream).name for p in moved):
            self._launch(self._find(cut_name(name)), everyone)
        self._land_all(self._pending, settle=True)
        for progress in moved:
            progress.settled_at = self._stats.steps
        for progress in self._progress:
            progress.plan(self._clock)
        self._next = self._next_event()
        self._report()

    def _tell_finished(self, times: int) -> tuple[Wire, Greeting]:
        """Says to all that rounds of some go on without this worker."""
        wire = self._wire(self._members(everyone, 0), partial=True)
        answers = [peer for peer in wire.others if self._finished[peer] < times]
        header = Header.of_finished(self._clock)
        exchange = announce(wire, header, answers, times=times)
        return wire, self._wait(self._run(exchange))

    def _await_finished(self, wire: Wire, greeting: Greeting, times: int) -> None:
        """Returns when all have said the same, but for those that are lost."""
        for peer in wire.others:
            missing = times - self._finished[peer]
            if not missing:
                continue
            task = self._run(await_finished(wire, greeting, peer, missing))
            try:
                task.wait(self._timeout_s)
            except PeerLost as error:
                if not task.failed:
                    self._error = error
                    raise
                self._lost.add(peer)
            self._finished[peer] = times

    def _moved_anywhere(self) -> list[_Progress]:
        """Streams that have changed on some worker since workers were equal.

        Brings the counts of rounds to the same value: some may have had rounds in which
        others were missing.
        """
        scheduled = [p for p in self._progress if not p.stream.schedule.never]
        mine = [[p.settled_at < self._stats.steps, p.round] for p in scheduled]
        replies = self.gather(mine).values() if scheduled else ()
        moved = []
        for progress, *theirs in zip(scheduled, *replies, strict=True):
            progress.round = max(round for _, round in theirs)
            if any(has_moved for has_moved, _ in theirs):
                moved.append(progress)
        return moved

    def _serve(
        self, headers: dict[int, Header], progress: _Progress, theirs: Header
    ) -> None:
        """Takes part in others' round without a share that counts."""
        stream = progress.stream
        check_headers(headers, stream.name)
        wire = self._wire(self._members(everyone, 0), theirs)
        results = stream.layout.new(self.group.device)
        job = self._job(stream, results, results, wire)
        outcome: Outcome = self._wait(self._run(serve_(wire, job, headers)))
        if stream.schedule.never:
            self._stats.setup_bytes += outcome.bytes_sent
            progress.round += 1
            return
        self._count(stream, outcome, 0.0)
        if outcome.included:
            keep = progress.settled_at < self._stats.steps
            self._apply(stream, results, Landing(keep=keep, settle=not keep))
        self._passed(progress, applied=bool(outcome.included))

    def extend(self, stream: Stream, tensors: Mapping[str, Tensor]) -> None:
        """Takes further tensors into a stream, once nothing of it is under way."""
        (progress,) = (p for p in self._progress if p.stream is stream)
        starts = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        if any(pending.progress is progress for pending in self._pending):
            progress.waiting |= tensors
            progress.starts |= starts
        else:
            self._extend(progress, tensors, starts)

    def _extend(
        self,
        progress: _Progress,
        tensors: Mapping[str, Tensor],
        starts: Mapping[str, Tensor],
    ) -> None:
        stream = progress.stream
        residual = None
        if stream.residual is not None:
            residual = stream.layout.read(stream.residual)
        stream.extend_(tensors, starts)
        if residual is not None:
            stream.residual = stream.layout.new()
            stream.layout.write_(stream.residual, residual)
        progress.verified = False

    def agree(self, plan: Mapping[str, Any]) -> None:
        """Raises `PeerMismatch` on every worker unless all of them hold this plan."""
        digest = hashlib.sha256(json.dumps(plan).encode()).digest()
        if len(set(self._gather(digest).values())) == 1:
            return
        plans = self.gather(plan)
        (first, one), *others = plans.items()
        for rank, other in others:
            for key in [*one, *(key for key in other if key not in one)]:
                if one.get(key) != other.get(key):
                    raise PeerMismatch(
                        f"{key} must be the same on all workers, got "
                        f"{one.get(key, 'nothing')} on rank {first} and "
                        f"{other.get(key, 'nothing')} on rank {rank}. Build all "
                        "optimizers alike."
                    )

    def broadcast(self, tensors: Mapping[str, Tensor]) -> None:
        """Gives all workers the first one's tensors, bit by bit, in place."""
        layout = Layout(tensors, widen=False)
        flats = layout.gather_all_(layout.empty(self.group.device))
        header = Header.of_setup("broadcast")
        wire = self._wire(self._members(everyone, 0), header)
        exchange = broadcast_(wire, flats.tensors, self._bucket_bytes, header)
        self._stats.setup_bytes += self._wait(self._run(exchange))
        layout.scatter_all_(flats)

    def gather(self, mine: Any) -> dict[int, Any]:
        """Every worker's value of plain types, by rank."""
        replies = self._gather(json.dumps(mine).encode())
        return {rank: json.loads(reply) for rank, reply in replies.items()}

    def _gather(self, mine: bytes) -> dict[int, bytes]:
        header = Header.of_setup("check")
        wire = self._wire(self._members(everyone, 0), header)
        exchange = gather_bytes(wire, mine, header)
        replies: dict[int, bytes] = self._wait(self._run(exchange))
        self._stats.setup_bytes += wire.bytes_sent
        return replies

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Copies of all that the next step depends on, as tensors and plain types."""
        return {
            "started": self.started,
            "clock": self._clock,
            "stats": self._stats.state_dict(),
            "streams": {
                progress.stream.name: {
                    "due": progress.due,
                    "began": progress.began,
                    "round": progress.round,
                    "launched_at": progress.launched_at,
                    "settled_at": progress.settled_at,
                    "names": list(progress.stream.layout.specs),
                    "tensors": _state_of(progress.stream),
                }
                for progress in self._progress
            },
            # Each share as it was sent. It is sent again: no other worker keeps it.
            "pending": [
                {
                    "stream": pending.progress.stream.name,
                    "clock": pending.clock,
                    "steps": pending.steps,
                    "finite": pending.finite,
                    "weight": pending.weight,
                    "members": list(pending.members),
                    "partial": pending.partial,
                    "share": pending.progress.stream.layout.read(pending.shares),
                }
                for pending in self._pending
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool) -> None:
        """Copies everything back; the next exchange compares all agreed values.

        Args:
            state: what `state_dict` returned.
            strict: whether streams and schedules are those of the state. If not, each
                tensor goes by its name, rounds are planned anew, and what was under
                way is dropped.
        """
        self.started = state["started"]
        self._clock = state["clock"]
        self._stats = Stats.from_state_dict(state["stats"])
        tensors: dict[str, dict[str, Tensor]] = {}
        for saved in state["streams"].values():
            for kind, named in saved["tensors"].items():
                tensors.setdefault(kind, {}).update(named)
        for progress in self._progress:
            stream = progress.stream
            saved = state["streams"].get(stream.name, {})
            progress.plan(self._clock)
            if strict:
                progress.due, progress.began = saved["due"], saved["began"]
            progress.round = saved.get("round", 0)
            progress.launched_at = saved.get("launched_at", self._stats.steps)
            progress.settled_at = saved.get("settled_at", self._stats.steps)
            progress.verified = False
            stream.load_(tensors)
            if stream.residual is not None:
                stream.residual = stream.layout.new()
                stream.layout.write_(stream.residual, tensors.get("residual", {}))
        by_name = {progress.stream.name: progress for progress in self._progress}
        self._pending = [
            self._reloaded(saved, by_name[saved["stream"]])
            for saved in (state["pending"] if strict else ())
        ]
        self._next = self._next_event()

    def _reloaded(self, saved: Mapping[str, Any], progress: _Progress) -> _Pending:
        layout = progress.stream.layout
        if layout.specs.keys() != saved["share"].keys():
            raise ValueError(
                f"the share under way must hold the tensors of {saved['stream']!r}, "
                f"got {sorted(saved['share'])} with {sorted(layout.specs)}: a group "
                "came in meanwhile. Load an earlier or a later checkpoint, or drop the "
                "share with strict=False."
            )
        layout.write_(shares := layout.empty(), saved["share"])
        launch = {k: v for k, v in saved.items() if k not in ("stream", "share")}
        launch["members"] = tuple(saved["members"])
        return self._new_pending(progress, shares=shares, **launch)

    # ------------------------------------------------------------------ helpers

    def _find(self, name: str) -> _Progress:
        for progress in self._progress:
            if cut_name(progress.stream.name) == name:
                return progress
        names = [progress.stream.name for progress in self._progress]
        raise PeerMismatch(
            f"workers must exchange the same streams, got {name!r} from another with "
            f"{names} on rank {self.group.rank}. Build all optimizers alike, and call "
            "their methods on all workers."
        )

    def _members(self, peers: Peers, round: int) -> tuple[int, ...]:
        present = self.group.members(round)
        members = peers(present, self.group.rank, round, self._clock)
        return tuple(member for member in members if member not in self._lost)

    def _wire(
        self,
        members: Sequence[int],
        header: Header | None = None,
        *,
        partial: bool = False,
    ) -> Wire:
        """Messages of an exchange; of a header alone, if none is known before."""
        number = 0
        if header is not None:
            what = (header.stream, header.round, header.step, header.plan)
            number = number_of(repr(what))
        if self._lane is None:
            self._lane = self.group.new_lane()
        return Wire(self.group, members, self._lane, number, partial=partial)

    def _job(self, stream: Stream, shares: Flats, results: Flats, wire: Wire) -> Job:
        return Job(
            stream.name,
            shares.tensors,
            results.tensors,
            self._bucket_bytes,
            # Alone nothing is sent, so nothing need be lost.
            codec=stream.codec if wire.others else None,
            compare=stream.compares,
        )

    def _header(self, pending: _Pending) -> Header:
        """What this worker says of its share."""
        progress, stream = pending.progress, pending.progress.stream
        agreed = 0
        if stream.agreed is not None:
            chunks = stream.layout.chunks
            parts = min(_FINGERPRINT_PARTS, len(chunks)) if progress.verified else 1
            chunks = chunks[progress.round % max(parts, 1) :: max(parts, 1)]
            agreed = _fingerprint([stream.agreed[chunk] for chunk in chunks])
        return Header(
            stream=cut_name(stream.name),
            round=progress.round,
            step=pending.clock,
            contributes=int(pending.finite),
            weight=pending.weight,
            agreed=agreed,
            plan=stream.layout.plan,
        )

    def _run(self, exchange: Exchange) -> Task:
        if self._error is not None:
            raise self._error
        return self.group.run(exchange)

    def _wait(self, task: Task) -> Any:
        try:
            return task.wait(self._timeout_s)
        except SyncError as error:
            self._error = error
            raise


def _state_of(stream: Stream) -> dict[str, dict[str, Tensor]]:
    state = stream.state()
    if stream.residual is not None:
        state["residual"] = stream.layout.read(stream.residual)
    return state


def _log_left_out(progress: _Progress, outcome: Outcome) -> None:
    """Says whose shares were not finite."""
    for rank, header in outcome.headers.items():
        if not header.contributes and not header.finished:
            name = f"rank {rank}'s"
            _log.warning(_NOT_FINITE, progress.round, progress.stream.name, name)


def _fingerprint(values: Sequence[Tensor]) -> int:
    """A 63-bit number that changes with (nearly) any bit of any value."""
    sums = [part.sum(dtype=torch.int64) for value in values for part in _words(value)]
    number = 1
    for part in torch.stack(sums).tolist() if sums else ():
        number = (number * 1_000_003 + part) & (1 << 63) - 1
    return number


def _words(value: Tensor) -> list[Tensor]:
    """A chunk's bits as integers; of 64 bits, which are summed fastest."""
    narrow = value.view(torch.int32)
    even = len(narrow) // 2 * 2
    words = [narrow[:even].view(torch.int64)]
    return words if even == len(narrow) else [*words, narrow[even:]]
