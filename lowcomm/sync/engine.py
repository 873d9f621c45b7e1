"""Launch, keep pending, collect, commit, apply.

The engine knows when and how; what a share is and what a result does is a stream's.
"""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lowcomm.sync.errors import PeerLost, PeerMismatch, SyncError
from lowcomm.sync.fingerprint import fingerprint, number_of
from lowcomm.sync.flat import Flats
from lowcomm.sync.handover import give, take
from lowcomm.sync.mean import (
    Header,
    Job,
    Outcome,
    Wire,
    check_headers,
    cut_name,
    handshake,
    mean_,
    serve_,
)
from lowcomm.sync.peers import Peers, everyone
from lowcomm.sync.presence import Presence
from lowcomm.sync.reform import Council, Facts, Place, UnderWay
from lowcomm.sync.seam import Group, Task
from lowcomm.sync.staging import Staged
from lowcomm.sync.stats import Stats
from lowcomm.sync.stream import Landing, Stream
from lowcomm.sync.talk import Talk, check_plans

_log = logging.getLogger(__name__)

#: At the most so many rounds pass until all of the agreed values have been compared.
_FINGERPRINT_PARTS = 64

_HANDOVER = Header.of_setup("handover")

_NOT_FINITE = "round %d of %r goes without %s share: it is not finite"


@dataclass
class _Progress:
    """Where a stream is in its schedule."""

    stream: Stream
    due: int | None = None  # step of the next launch; None for not yet known, or never
    began: int | None = 0  # clock at the round's start, while `due` is not known
    round: int = 0
    launched_at: int = 0  # steps taken at its last launch
    landed_in: str = ""  # among whom its last round was
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
    norm: float
    weight: float
    members: tuple[int, ...]
    partial: bool  # whether others may have rounds of their own at the same time
    declined: bool  # whether the others go on without this worker
    num_workers: int  # at the launch
    shares: Flats
    results: Flats
    serves: bool = False  # has no share, and was not launched by this worker
    lost: Flats | None = None
    staged: Staged | None = None
    in_place: bool = False  # alone and at once: shares are taken as they are applied
    epoch: str = ""  # among whom it was sent
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
        give: returns the whole state, for a worker that comes.
        take: takes it.
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
        give: Callable[[], Any],
        take: Callable[[Any], None],
    ) -> None:
        if not group.matches_tags:
            for stream in streams:
                if stream.peers is not everyone:
                    raise ValueError(
                        "group must match messages by their tags for rounds of some of "
                        f"the workers, got one that does not for {stream.name!r}. "
                        "Build it with gloo, which carries all devices' tensors."
                    )
        self.group = group
        self.started = False
        self._talk = Talk(group, timeout_s, bucket_bytes)
        self._presence = Presence(self._talk)
        # A dict subclass: torch's RemovableHandle refers to it weakly.
        self.hooks: OrderedDict[int, Callable[[Stats], None]] = OrderedDict()
        self._weight = weight
        self._heal = heal
        self._check = check
        self._give, self._take = give, take
        self._is_fresh = True
        self._stats = Stats()
        self._unreported: list[Stats] = []
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
        self._stats.setup_bytes = self._talk.setup_bytes
        return self._stats.snapshot()

    @property
    def steps(self) -> int:
        """Inner steps attempted."""
        return self._stats.steps

    @property
    def streams(self) -> list[Stream]:
        """The streams in order."""
        return [progress.stream for progress in self._progress]

    # ------------------------------------------------------------------ workers

    def enter(self, plan: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Comes among the workers.

        Args:
            plan: in which they must not differ, as named lines.
            tensors: that begin as the first worker has them.
        """
        self._plan, self._first = plan, tensors
        if self.group.is_elastic:
            self._with_workers(self._exchange_due, anew=True)
        else:
            self._begin()

    def _begin(self) -> None:
        self._talk.agree(self._plan)
        if self._first:
            self._talk.broadcast(self._first)

    def _with_workers(self, work: Callable[[], None], *, anew: bool = False) -> None:
        """Does what needs the others; where they come and go, with those that are left.

        Args:
            work: may be begun again at any time.
            anew: whether they are settled anew before.
        """
        try:
            self._try_with_workers(work, anew)
        except (SyncError, KeyboardInterrupt):
            self.group.close()  # the others need not wait to find out
            raise

    def _try_with_workers(self, work: Callable[[], None], anew: bool) -> None:
        anew = anew or self.group.calls
        while True:
            if anew:
                self._reform()
            try:
                return work()
            except PeerLost as error:
                if not self.group.is_elastic:
                    raise
                # As text: who keeps a record would keep all that has failed with it.
                _log.warning("settling anew: %s", str(error))
                anew = True

    def _reform(self) -> None:
        """Goes on with the workers that are there now."""
        for pending in self._pending:  # before anything of them can go wrong
            if pending.wire is not None:
                pending.wire.seal()
        before = self.group.members(0)
        while True:
            self.group.reform(self._stats.rounds)
            self._talk.renew()
            self._presence = Presence(self._talk)
            try:
                council = self._meet()
            except PeerLost:
                continue
            except BaseException:
                self.group.close()  # the others need not wait to find out
                raise
            self._next = self._next_event()
            told = {rank: facts.told for rank, facts in council.facts.items()}
            self.group.tell_change(before, council.steps, told)
            return

    def _meet(self) -> Council:
        """Settles what becomes of rounds under way, and who takes a state from whom."""
        facts = self._talk.gather(self._facts().pack())
        council = Council(
            {rank: Facts.unpack(told) for rank, told in facts.items()}, self.group.main
        )
        if council.old:
            self._settle_rounds(council)
            for taker, donor in council.donors().items():
                if donor == self.group.rank:
                    self._give_to(taker, council)
                elif taker == self.group.rank:
                    self._take_from(donor, council)
        else:
            self._begin()
        for progress in self._progress:
            progress.verified = False  # as with those that have just come
        self._is_fresh = False
        return council

    def _facts(self) -> Facts:
        under_way = {
            pending.progress.stream.name: UnderWay(
                pending.epoch,
                pending.members,
                pending.clock,
                pending.wire is not None and pending.wire.seal() is not None,
            )
            for pending in self._pending
        }
        places = {
            p.stream.name: Place(p.round, p.landed_in, under_way.get(p.stream.name))
            for p in self._progress
        }
        told = self.group.tell()
        return Facts(self._is_fresh, self._stats.steps, self._clock, places, told)

    def _settle_rounds(self, council: Council) -> None:
        pendings, self._pending = self._pending, []
        for pending in pendings:
            progress, wire = pending.progress, pending.wire
            if council.is_used(self.group.rank, progress.stream.name):
                assert wire is not None
                outcome = wire.seal()
                assert outcome is not None
                if pending.serves:
                    self._land_served(pending, outcome)
                else:
                    # Else `finish` would find it equal, and leave what is mixed in.
                    self._land(pending, outcome, 0.0, settle=True)
            elif pending.serves or self.group.rank in council.behind:
                pass  # what was done here is still in the tensors
            elif pending.kept:
                self._pending.append(self._again(pending))
            elif not progress.stream.schedule.never:
                progress.due, progress.began = pending.clock, None

    def _again(self, pending: _Pending) -> _Pending:
        """The same share for another exchange; the old one's memory is left to it."""
        progress = pending.progress
        members, partial = self._partners(progress, progress.stream.peers)
        return self._new_pending(
            progress,
            clock=pending.clock,
            steps=pending.steps,
            finite=pending.finite,
            norm=pending.norm,
            weight=pending.weight,
            members=members,
            partial=partial,
            declined=False,
            num_workers=pending.num_workers,
            shares=pending.shares,
        )

    def _give_to(self, taker: int, council: Council) -> None:
        if taker in council.fresh:
            state = {"plan": self._plan, "all": self._give()}
        else:
            state = {"clock": self._clock, "streams": self._agreed()}
        state["landed_in"] = [progress.landed_in for progress in self._progress]
        wire = self._talk.wire(sorted((taker, self.group.rank)), _HANDOVER)
        how = self._talk.bucket_bytes, self.group.note_progress
        try:
            exchange = give(wire, taker, state, *how)
        except TypeError as error:  # which is the taker's end, not this worker's
            exchange = give(wire, taker, {"error": str(error)}, *how)
        self._talk.wait(self._talk.run(exchange))
        self._talk.setup_bytes += wire.bytes_sent

    def _agreed(self) -> dict[str, Any]:
        """Where each stream is, and what all workers agree on."""
        return {
            progress.stream.name: {
                "due": progress.due,
                "began": progress.began,
                "round": progress.round,
                "tensors": progress.stream.state(),
            }
            for progress in self._progress
        }

    def _take_from(self, donor: int, council: Council) -> None:
        wire = self._talk.wire(sorted((donor, self.group.rank)), _HANDOVER)
        state = self._talk.wait(self._talk.run(take(wire, donor)))
        if "error" in state:
            raise TypeError(state["error"])
        if "plan" in state:
            check_plans(donor, state["plan"], self.group.rank, self._plan)
            self._take(state["all"])
            self._stats.restart()
        else:
            self._clock = state["clock"]
            self._follow(state["streams"])
        for progress, landed_in in zip(self._progress, state["landed_in"], strict=True):
            progress.landed_in = landed_in
            clock = council.sent_again(progress.stream.name)
            # The others wait for this worker's share.
            if clock is not None and not progress.stream.schedule.never:
                progress.due, progress.began = clock, None

    def _follow(self, streams: Mapping[str, Any]) -> None:
        for progress in self._progress:
            theirs = streams[progress.stream.name]
            if progress.stream.is_round and not progress.stream.schedule.never:
                missed = theirs["round"] - progress.round
                self._stats.skipped_rounds += max(0, missed)
            progress.due, progress.began = theirs["due"], theirs["began"]
            progress.round = theirs["round"]
            progress.stream.locate()
            progress.stream.follow_(theirs["tensors"])

    def begin_share(self) -> None:
        """What this worker gives is counted from here."""
        for progress in self._progress:
            progress.launched_at = self._stats.steps

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
        if self._clock >= self._next or self.group.calls:
            rounds = self._stats.rounds
            self._with_workers(self._exchange_due)
            self._report()
            if self.group.awaited and self._stats.rounds > rounds:
                self._with_workers(lambda: None, anew=True)

    def _exchange_due(self) -> None:
        self._resend()
        for progress in self._progress:
            progress.decide()
        self._land_all(p for p in self._pending if p.lands <= self._clock)
        self._exchange_all(p for p in self._progress if p.due and p.due <= self._clock)
        self._next = self._next_event()

    def _next_event(self) -> float:
        due = [p.due for p in self._progress if p.due is not None]
        due += [0 for p in self._progress if p.began is not None]
        lands = [p.lands if p.task or p.in_place else 0 for p in self._pending]
        return min(due + lands, default=float("inf"))

    def _exchange_all(self, due: Iterable[_Progress]) -> None:
        """Launches streams, and lands those that do not overlap."""
        due = list(due)
        if due:
            self._check()
        if due and self.group.is_done:
            self.group.is_done = False
        for progress in due:
            self._launch(progress, progress.due or self._clock)
        self._land_all(p for p in self._pending if p.lands <= self._clock)

    def _launch(
        self, progress: _Progress, clock: int, peers: Peers | None = None
    ) -> None:
        """Takes this worker's share, judges it and puts it on its way."""
        stream, layout = progress.stream, progress.stream.layout
        stream.locate()
        members, partial = self._partners(progress, peers or stream.peers)
        declined = partial and self._presence.owes(members)
        alone = declined or len(members) == 1
        # Alone and at once, shares are not kept: nothing can fail between taking and
        # applying them, and taking them again while they are in the cache is faster.
        in_place = alone and not stream.schedule.overlap_at(clock)
        if in_place:
            shares, finite, norm = layout.scratch(), layout.is_finite(), 0.0
        else:
            shares, finite, norm = self._shares(stream)
        weight = 0.0
        # Who has just come has nothing to give, and would halve what others do.
        has_just_come = self._has_just_come(progress)
        if stream.counts(self.group.rank, members) and not has_just_come:
            weight = self._weight(self._stats.steps - progress.launched_at)
        pending = self._new_pending(
            progress,
            clock=clock,
            steps=self._stats.steps,
            finite=finite or not stream.is_judged,
            norm=norm,
            weight=weight,
            members=members,
            partial=partial,
            declined=declined,
            num_workers=len(members),
            shares=shares,
            in_place=in_place,
        )
        progress.plan(clock)
        self._pending.append(pending)
        self._send(pending)
        if has_just_come:  # to a round that its donor has launched
            return
        replaced = stream.launched_(shares, len(members), finite=pending.finite)
        if replaced and not pending.finite:
            self._heal()

    def _has_just_come(self, progress: _Progress) -> bool:
        """Whether this worker was let in, and has taken no step since."""
        return self.group.is_elastic and self._stats.steps == progress.launched_at

    def _partners(
        self, progress: _Progress, peers: Peers
    ) -> tuple[tuple[int, ...], bool]:
        """With whom this round is exchanged, and whether others have their own."""
        present = self.group.members(progress.round)
        members = peers(present, self.group.rank, progress.round, self._clock)
        members = tuple(m for m in members if m not in self._talk.gone)
        if peers is everyone:
            return members, False
        partial = progress.stream.goes_alone or members != self._talk.everyone()
        return self._presence.without_finished(members) if partial else members, partial

    def _shares(self, stream: Stream) -> tuple[Flats, bool, float]:
        """This worker's contribution, with what an earlier code owes.

        Is it finite? And how long is it, if that is limited; else 0.
        """
        shares, sums, squares = stream.layout.empty(), [], []
        for chunk in stream.layout.chunks:
            stream.share_(chunk, out := shares[chunk])
            if stream.residual is not None:
                out.add_(stream.residual[chunk])
            if out.is_floating_point():
                sums.append(out.sum())
            if stream.robust.clip is not None:
                squares.append(out.dot(out))
        norm = math.sqrt(sum(map(float, squares)))
        # A sum hides no inf and no NaN; over finite values it may overflow.
        if all(math.isfinite(total) for total in map(float, sums)):
            return shares, True, norm
        finite = all(bool(flat.isfinite().all()) for flat in shares.tensors)
        return shares, finite, norm

    def _new_pending(
        self, progress: _Progress, *, in_place: bool = False, **launch: Any
    ) -> _Pending:
        """A launched exchange with memory for what will come of it."""
        stream, shares, device = progress.stream, launch["shares"], self.group.device
        lost = staged = None
        results = shares
        if not in_place:
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
            in_place=in_place,
            results=results,
            lost=lost,
            staged=staged,
            **launch,
        )

    def _send(self, pending: _Pending) -> None:
        """Puts a share on its way."""
        stream, header = pending.progress.stream, self._header(pending)
        members, pending.epoch = pending.members, self.group.epoch
        if pending.declined:
            wire = self._talk.wire(members, partial=True)
            self._presence.decline(wire, pending.clock)
            self._count_bytes(stream, wire.bytes_sent)
            members = (self.group.rank,)
        if pending.in_place:
            return
        wire = self._talk.wire(members, header, partial=pending.partial)
        shares = pending.shares if pending.staged is None else pending.staged.flats
        job = self._job(stream, shares, pending.results, wire)
        if pending.lost is not None:
            job = job._replace(lost=pending.lost.tensors)
        job = job._replace(staged=pending.staged)
        pending.wire, pending.task = wire, self._talk.run(mean_(wire, job, header))

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
        task, wire, stream = pending.task, pending.wire, pending.progress.stream
        assert task is not None and wire is not None
        others = wire.others
        # Who is late already has had its time.
        is_late = self._presence.owes(others)
        try:
            outcome: Outcome = task.wait(0.0 if is_late else self._talk.timeout_s)
        except SyncError as error:
            is_lost = isinstance(error, PeerLost)
            if self.group.is_elastic and is_lost:  # which ends what is under way
                raise
            if not (stream.goes_alone and is_lost):
                self._talk.end(error)
                self._drop_unkept()
                raise
            assert isinstance(error, PeerLost)
            self._presence.missed(task, others, error)
            if not is_late:
                reason = str(error).partition(". ")[0]
                round, name = pending.progress.round, stream.name
                _log.warning("round %d of %r goes on alone: %s", round, name, reason)
            return self._own_outcome(pending, wire)
        if pending.partial:
            self._presence.met(wire, outcome)
        return outcome

    def _own_outcome(self, pending: _Pending, wire: Wire) -> Outcome:
        """The outcome of an exchange of this worker's share alone."""
        # The buffers are the exchange's: others' messages may still come.
        pending.results = Flats([flat.clone() for flat in pending.shares.tensors])
        if pending.lost is not None:
            pending.lost = pending.progress.stream.layout.new()
        included = (self.group.rank,) if pending.finite else ()
        return Outcome({}, included, wire.bytes_sent)

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
            applied = bool(outcome.included)
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
                num_workers=pending.num_workers,
            )
            self._apply(stream, pending.results, landing, in_place=pending.in_place)
            if left_out:
                self._heal()
            elif used and pending.lost is not None and stream.residual is not None:
                pairs = zip(stream.residual.tensors, pending.lost.tensors, strict=True)
                for residual, lost in pairs:
                    residual.copy_(lost)
            progress.launched_at = pending.steps
            if stream.last is None and not pending.partial:
                progress.settled_at = pending.steps
        progress.landed_in = pending.epoch
        self._passed(progress, applied=applied)

    def _apply(
        self,
        stream: Stream,
        results: Flats,
        landing: Landing,
        *,
        in_place: bool = False,
    ) -> None:
        if not in_place:  # then it has been located just now
            stream.locate()
        for chunk in stream.layout.chunks:
            result = results[chunk]
            if in_place:
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
        self._count_bytes(stream, outcome.bytes_sent)
        for counts in (self._stats, stats):
            counts.exposed_s += exposed_s
        if outcome.likeness is not None:
            stats.share_norm, stats.mean_norm, stats.cosine = outcome.likeness

    def _count_bytes(self, stream: Stream, bytes_sent: int) -> None:
        for counts in (self._stats, self._stats.of(stream.name)):
            counts.bytes_sent += bytes_sent

    # ------------------------------------------------------------------ on request

    def average(self, stream: Stream) -> Flats:
        """The workers' mean of a stream that has no schedule; nothing is applied."""
        progress = self._find(cut_name(stream.name))
        stream.locate()
        if self.group.is_elastic:
            self._check_settled()
            return stream.layout.gather_all_(stream.layout.empty())
        shares, finite, norm = self._shares(stream)
        pending = self._new_pending(
            progress,
            clock=self._clock,
            steps=self._stats.steps,
            finite=finite,
            norm=norm,
            weight=1.0,
            members=self._talk.everyone(),
            partial=False,
            declined=False,
            num_workers=len(self._talk.everyone()),
            shares=shares,
        )
        self._send(pending)
        task = pending.task
        assert task is not None
        progress.round += 1
        try:
            outcome: Outcome = task.wait(self._talk.timeout_s)
        except SyncError as error:
            if not self._goes_alone():
                self._talk.end(error)
            elif isinstance(error, PeerLost):  # rounds go on without it
                others = [m for m in pending.members if m != self.group.rank]
                self._presence.missed(task, others, error)
            raise
        self._talk.setup_bytes += outcome.bytes_sent
        return pending.results

    def _check_settled(self) -> None:
        """Raises unless all workers hold equal parameters, as far as is known here."""
        # Workers that come and go are at different steps, and would not enter together.
        if any(
            p.stream.has_parameters and p.settled_at < self._stats.steps
            for p in self._progress
        ):
            raise ValueError(
                "global_parameters must be asked for when workers are equal, got a "
                "call between rounds of workers that come and go. Call it in a round "
                "hook or after finish(), or evaluate the local parameters."
            )

    def _scheduled(self) -> list[Stream]:
        return [s for s in self.streams if not s.schedule.never]

    def _goes_alone(self) -> bool:
        """Whether no round needs everybody."""
        return all(stream.goes_alone for stream in self._scheduled())

    def finish(self, timeout_s: float | None = None) -> None:
        """One last exchange of whatever has changed since its last one.

        A worker that comes early serves the others' rounds until all have come.

        Args:
            timeout_s: bound of each wait in here; None for the usual one.
        """
        usual = self._talk.timeout_s
        self._talk.timeout_s = timeout_s or usual
        try:
            self._with_workers(self._finish)
        finally:
            self._talk.timeout_s = usual
        self.group.is_done = True
        self._report()

    def _finish(self) -> None:
        if not self.started:
            self.start()
        self._check()
        self._resend()
        self._land_all(self._pending, settle=True)
        # Once for each exchange that another may have under way with this worker.
        times = sum(stream.peers is not everyone for stream in self._scheduled())
        told = self._presence.tell_finished(times, self._clock) if times else None
        is_served = not self._goes_alone()
        if told and not is_served:  # nobody needs this worker meanwhile
            self._presence.await_finished(told, times, self._clock)
        headers = self._serve_until_finished()
        if told and is_served:
            self._presence.await_finished(told, times, self._clock)
        # Rounds go on from the step of whoever took most.
        self._clock = max(header.step for header in headers.values())
        moved = self._moved_anywhere()
        # Two that have the same last round take it once.
        for name in dict.fromkeys((p.stream.last or p.stream).name for p in moved):
            self._launch(self._find(cut_name(name)), self._clock, everyone)
        self._land_all(self._pending, settle=True)
        for progress in moved:
            progress.settled_at = self._stats.steps
        for progress in self._progress:
            progress.plan(self._clock)
        self._next = self._next_event()

    def _serve_until_finished(self) -> dict[int, Header]:
        """Takes part in others' rounds until all have come; their last headers."""
        while True:
            wire = self._talk.wire(self._talk.everyone())
            mine = Header.of_finished(self._clock)
            headers: dict[int, Header] = self._talk.wait(
                self._talk.run(handshake(wire, mine))
            )
            self._talk.setup_bytes += wire.bytes_sent
            working = [header for header in headers.values() if not header.finished]
            if not working:
                return headers
            self._serve(headers, self._find(working[0].stream), working[0])

    def _moved_anywhere(self) -> list[_Progress]:
        """Streams that have changed on some worker since workers were equal.

        Brings the counts of rounds to the same value: some may have had rounds in which
        others were missing.
        """
        scheduled = [p for p in self._progress if not p.stream.schedule.never]
        mine = [[p.settled_at < self._stats.steps, p.round] for p in scheduled]
        gone = sorted(self._talk.gone)
        replies = self._talk.gather([gone, mine]) if scheduled else {}
        for rank, (theirs, _) in replies.items():
            if theirs != gone:
                error = PeerLost(
                    f"workers must agree on who is lost, got {gone} on rank "
                    f"{self.group.rank} and {theirs} on rank {rank}. Restart from a "
                    "checkpoint."
                )
                self._talk.end(error)
                raise error
        moved = []
        for progress, *all_of in zip(
            scheduled, *(streams for _, streams in replies.values()), strict=True
        ):
            progress.round = max(round for _, round in all_of)
            if any(has_moved for has_moved, _ in all_of):
                moved.append(progress)
        return moved

    def _serve(
        self, headers: dict[int, Header], progress: _Progress, theirs: Header
    ) -> None:
        """Takes part in others' round without a share that counts."""
        stream = progress.stream
        check_headers(headers, stream.name)
        wire = self._talk.wire(self._talk.everyone(), theirs)
        results = stream.layout.new(self.group.device)
        job = self._job(stream, results, results, wire)
        pending = _Pending(
            progress=progress,
            clock=theirs.step,
            steps=self._stats.steps,
            finite=True,
            norm=0.0,
            weight=0.0,
            members=wire.members,
            partial=False,
            declined=False,
            num_workers=len(wire.members),
            shares=results,
            results=results,
            serves=True,
            epoch=self.group.epoch,
            wire=wire,
            task=self._talk.run(serve_(wire, job, headers)),
        )
        assert pending.task is not None
        self._pending.append(pending)
        try:
            outcome = self._talk.wait(pending.task)
        except SyncError:
            if not self.group.is_elastic:
                self._pending.remove(pending)
            raise
        self._pending.remove(pending)
        self._land_served(pending, outcome)

    def _land_served(self, pending: _Pending, outcome: Outcome) -> None:
        progress, stream = pending.progress, pending.progress.stream
        if stream.schedule.never:
            self._talk.setup_bytes += outcome.bytes_sent
            progress.round += 1
            return
        self._count(stream, outcome, 0.0)
        if outcome.included:
            keep = progress.settled_at < self._stats.steps
            landing = Landing(keep=keep, settle=not keep)
            self._apply(stream, pending.results, landing)
        progress.landed_in = pending.epoch
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

    def gather(self, mine: Any) -> dict[int, Any]:
        """Every worker's value of plain types, by rank."""
        return self._talk.gather(mine)

    def agree(self, plan: Mapping[str, Any]) -> None:
        """Raises `PeerMismatch` on every worker unless all of them hold this plan."""
        self._talk.agree(plan)

    def broadcast(self, tensors: Mapping[str, Tensor]) -> None:
        """Gives all workers the first one's tensors, bit by bit, in place."""
        self._talk.broadcast(tensors)

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Copies of all that the next step depends on, as tensors and plain types."""
        return {
            "started": self.started,
            "clock": self._clock,
            "stats": self.stats.state_dict(),
            "streams": {
                progress.stream.name: {
                    "due": progress.due,
                    "began": progress.began,
                    "round": progress.round,
                    "launched_at": progress.launched_at,
                    "settled_at": progress.settled_at,
                    "names": list(progress.stream.layout.specs),
                    "agreed": progress.stream.agreed is not None,
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
                    "norm": pending.norm,
                    "weight": pending.weight,
                    "members": list(pending.members),
                    "partial": pending.partial,
                    "declined": pending.declined,
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
        self._talk.setup_bytes = self._stats.setup_bytes
        tensors: dict[str, dict[str, Tensor]] = {}
        for saved in state["streams"].values():
            for kind, named in saved["tensors"].items():
                tensors.setdefault(kind, {}).update(named)
        rounds = [saved["round"] for saved in state["streams"].values()]
        for progress in self._progress:
            stream = progress.stream
            saved = state["streams"].get(stream.name, {})
            progress.plan(self._clock)
            if strict:
                progress.due, progress.began = saved["due"], saved["began"]
            # Streams that pair workers must do it alike.
            progress.round = saved["round"] if strict else max(rounds, default=0)
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
        launch.setdefault("num_workers", len(saved["members"]))
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

    def _job(self, stream: Stream, shares: Flats, results: Flats, wire: Wire) -> Job:
        return Job(
            stream.name,
            shares.tensors,
            results.tensors,
            self._talk.bucket_bytes,
            # Alone nothing is sent, so nothing need be lost.
            codec=stream.codec if wire.others else None,
            compare=stream.compares,
            robust=stream.robust,
        )

    def _header(self, pending: _Pending) -> Header:
        """What this worker says of its share."""
        progress, stream = pending.progress, pending.progress.stream
        agreed = 0
        if stream.agreed is not None:
            chunks = stream.layout.chunks
            parts = min(_FINGERPRINT_PARTS, len(chunks)) if progress.verified else 1
            chunks = chunks[progress.round % max(parts, 1) :: max(parts, 1)]
            agreed = fingerprint([stream.agreed[chunk] for chunk in chunks])
        return Header(
            stream=cut_name(stream.name),
            round=progress.round,
            step=pending.clock,
            contributes=int(pending.finite),
            weight=pending.weight,
            agreed=agreed,
            tensors=stream.layout.fingerprint,
            members=0 if pending.partial else number_of(repr(pending.members)),
            norm=pending.norm,
        )


def _state_of(stream: Stream) -> dict[str, dict[str, Tensor]]:
    state = stream.state()
    if stream.residual is not None:
        state["residual"] = stream.layout.read(stream.residual)
    return state


def _log_left_out(progress: _Progress, outcome: Outcome) -> None:
    """Says whose shares were not finite, and whose were too long."""
    round, stream = progress.round, progress.stream.name
    for rank, header in outcome.headers.items():
        if not header.contributes and not header.absent:
            _log.warning(_NOT_FINITE, round, stream, f"rank {rank}'s")
        if rank in outcome.factors:
            words = "round %d of %r takes %.2g times rank %d's share: it is %.2g long"
            _log.warning(words, round, stream, outcome.factors[rank], rank, header.norm)
