"""Launch, keep pending, collect, commit, apply.

The engine knows when and how; what a share is and what a result does is a stream's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from lowcomm.sync.company import ComeAndGo, Company, Fixed
from lowcomm.sync.errors import PeerLost, SyncError
from lowcomm.sync.flat import Flats
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
from lowcomm.sync.rounds import Pending, Progress, Rounds, Share
from lowcomm.sync.seam import Group
from lowcomm.sync.stream import Stream
from lowcomm.sync.talk import Talk

_log = logging.getLogger(__name__)


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
        #: where this worker is, and what it has counted
        self.rounds = Rounds(streams, group, heal)
        #: with the others, outside of rounds too
        self.talk = Talk(group, timeout_s, bucket_bytes, self.rounds.stats)
        self._presence = Presence(self.talk)
        around = self.talk, self._presence, self.rounds
        self._company: Company
        if group.is_elastic:
            self._company = ComeAndGo(*around, give, take)
        else:
            self._company = Fixed(*around)
        self._weight = weight
        self._check = check

    def enter(self, plan: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Comes among the workers.

        Args:
            plan: in which they must not differ, as named lines.
            tensors: that begin as the first worker has them.
        """
        self._company.enter(plan, tensors, self._exchange_due)

    # ------------------------------------------------------------------ every step

    def advance(self) -> None:
        """Called after every inner step: lands and launches what is due."""
        rounds = self.rounds
        rounds.stats.steps += 1
        rounds.clock += 1
        self.group.tick()
        if rounds.clock >= rounds.next or self.group.calls:
            before = rounds.stats.rounds
            self._company.do(self._exchange_due)
            rounds.report()
            if rounds.stats.rounds > before:
                self._company.let_in()

    def _exchange_due(self) -> None:
        rounds = self.rounds
        self._resend()
        for progress in rounds.progress:
            progress.decide()
        self._land_all(rounds.landing)
        if due := rounds.due:
            self._check()
        if due and self.group.is_done:
            self.group.is_done = False
        for progress in due:
            self._launch(progress, progress.due or rounds.clock)
        self._land_all(rounds.landing)  # those that do not overlap
        rounds.look_ahead()

    def _launch(
        self, progress: Progress, clock: int, peers: Peers | None = None
    ) -> None:
        """Takes this worker's share, judges it and puts it on its way."""
        stream, layout = progress.stream, progress.stream.layout
        stream.locate()
        members, partial = self._company.partners(progress, peers or stream.peers)
        declined = partial and self._presence.owes(members)
        alone = declined or len(members) == 1
        # Alone and at once, shares are not kept: nothing can fail between taking and
        # applying them, and taking them again while they are in the cache is faster.
        in_place = alone and not stream.schedule.overlap_at(clock)
        if in_place:
            share = Share(layout.scratch(), layout.is_finite(), 0.0)
        else:
            share = self.rounds.take_share(stream)
        weight = 0.0
        # Who has just come would halve what others do.
        has_nothing = self._company.has_nothing_to_give(progress)
        if stream.counts(self.group.rank, members) and not has_nothing:
            weight = self._weight(self.rounds.stats.steps - progress.launched_at)
        pending = self.rounds.new_pending(
            progress,
            clock=clock,
            steps=self.rounds.stats.steps,
            finite=share.finite or not stream.is_judged,
            norm=share.norm,
            weight=weight,
            members=members,
            partial=partial,
            declined=declined,
            num_workers=len(members),
            shares=share.flats,
            in_place=in_place,
        )
        progress.plan(clock)
        self.rounds.pending.append(pending)
        self._send(pending)
        if has_nothing:  # to a round that its donor has launched
            return
        replaced = stream.launched_(share.flats, len(members), finite=pending.finite)
        if replaced and not pending.finite:
            self.rounds.heal()

    def _send(self, pending: Pending) -> None:
        """Puts a share on its way."""
        stream, header = pending.progress.stream, self.rounds.header(pending)
        members, pending.epoch = pending.members, self.group.epoch
        if pending.declined:
            wire = self.talk.wire(members, partial=True)
            self._presence.decline(wire, pending.clock)
            self.rounds.count_bytes(stream, wire.bytes_sent)
            members = (self.group.rank,)
        if pending.in_place:
            return
        wire = self.talk.wire(members, header, partial=pending.partial)
        shares = pending.shares if pending.staged is None else pending.staged.flats
        job = self._job(stream, shares, pending.results, wire)
        if pending.lost is not None:
            job = job._replace(lost=pending.lost.tensors)
        job = job._replace(staged=pending.staged)
        pending.wire, pending.task = wire, self.talk.run(mean_(wire, job, header))

    def _resend(self) -> None:
        """Sends again what a checkpoint has brought."""
        for pending in self.rounds.pending:
            if pending.task is None:
                self._send(pending)

    def _land_all(self, pendings: Iterable[Pending], *, settle: bool = False) -> None:
        for pending in list(pendings):
            since = self.group.now()
            outcome = None if pending.task is None else self._outcome(pending)
            exposed_s = self.group.now() - since
            self.rounds.land(pending, outcome, exposed_s, settle=settle)

    def _outcome(self, pending: Pending) -> Outcome:
        """What has come of an exchange, alone if need be; raises if it has failed."""
        task, wire, stream = pending.task, pending.wire, pending.progress.stream
        assert task is not None and wire is not None
        others = wire.others
        # Who is late already has had its time.
        is_late = self._presence.owes(others)
        try:
            outcome: Outcome = task.wait(0.0 if is_late else self.talk.timeout_s)
        except SyncError as error:
            if not self._company.goes_alone(stream, error):
                self.talk.end(error)
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

    def _own_outcome(self, pending: Pending, wire: Wire) -> Outcome:
        """The outcome of an exchange of this worker's share alone."""
        # The buffers are the exchange's: others' messages may still come.
        pending.results = Flats([flat.clone() for flat in pending.shares.tensors])
        if pending.lost is not None:
            pending.lost = pending.progress.stream.layout.new()
        included = (self.group.rank,) if pending.finite else ()
        return Outcome({}, included, wire.bytes_sent)

    # ------------------------------------------------------------------ on request

    def average(self, stream: Stream) -> Flats:
        """The workers' mean of a stream that has no schedule; nothing is applied."""
        progress = self.rounds.find(cut_name(stream.name))
        stream.locate()
        if (known := self._company.known_mean(stream)) is not None:
            return known
        members = self.talk.everyone()
        share = self.rounds.take_share(stream)
        pending = self.rounds.new_pending(
            progress,
            clock=self.rounds.clock,
            steps=self.rounds.stats.steps,
            finite=share.finite,
            norm=share.norm,
            weight=1.0,
            members=members,
            partial=False,
            declined=False,
            num_workers=len(members),
            shares=share.flats,
        )
        self._send(pending)
        task = pending.task
        assert task is not None
        progress.round += 1
        try:
            outcome: Outcome = task.wait(self.talk.timeout_s)
        except SyncError as error:
            if not self._goes_alone():
                self.talk.end(error)
            elif isinstance(error, PeerLost):  # rounds go on without it
                others = [m for m in members if m != self.group.rank]
                self._presence.missed(task, others, error)
            raise
        self.rounds.stats.setup_bytes += outcome.bytes_sent
        return pending.results

    def _goes_alone(self) -> bool:
        """Whether no round needs everybody."""
        return all(p.stream.goes_alone for p in self.rounds.scheduled)

    def finish(self, timeout_s: float | None = None) -> None:
        """One last exchange of whatever has changed since its last one.

        A worker that comes early serves the others' rounds until all have come.

        Args:
            timeout_s: bound of each wait in here; None for the usual one.
        """
        usual = self.talk.timeout_s
        self.talk.timeout_s = timeout_s or usual
        try:
            self._company.do(self._finish)
        finally:
            self.talk.timeout_s = usual
        self.group.is_done = True
        self.rounds.report()

    def _finish(self) -> None:
        rounds = self.rounds
        if not rounds.started:
            rounds.start()
        self._check()
        self._resend()
        self._land_all(rounds.pending, settle=True)
        # Once for each exchange that another may have under way with this worker.
        times = sum(p.stream.peers is not everyone for p in rounds.scheduled)
        told = self._presence.tell_finished(times, rounds.clock) if times else None
        is_served = not self._goes_alone()
        if told and not is_served:  # nobody needs this worker meanwhile
            self._presence.await_finished(told, times, rounds.clock)
        headers = self._serve_until_finished()
        if told and is_served:
            self._presence.await_finished(told, times, rounds.clock)
        # Rounds go on from the step of whoever took most.
        rounds.clock = max(header.step for header in headers.values())
        moved = self._moved_anywhere()
        # Two that have the same last round take it once.
        for name in dict.fromkeys((p.stream.last or p.stream).name for p in moved):
            self._launch(rounds.find(cut_name(name)), rounds.clock, everyone)
        self._land_all(rounds.pending, settle=True)
        for progress in moved:
            progress.settled_at = self.rounds.stats.steps
        rounds.plan()

    def _serve_until_finished(self) -> dict[int, Header]:
        """Takes part in others' rounds until all have come; their last headers."""
        while True:
            wire = self.talk.wire(self.talk.everyone())
            mine = Header.of_finished(self.rounds.clock)
            headers: dict[int, Header] = self.talk.wait(
                self.talk.run(handshake(wire, mine))
            )
            self.rounds.stats.setup_bytes += wire.bytes_sent
            working = [header for header in headers.values() if not header.finished]
            if not working:
                return headers
            self._serve(headers, working[0])

    def _moved_anywhere(self) -> list[Progress]:
        """Streams that have changed on some worker since workers were equal.

        Brings the counts of rounds to the same value: some may have had rounds in which
        others were missing.
        """
        scheduled = self.rounds.scheduled
        mine = [[p.settled_at < self.rounds.stats.steps, p.round] for p in scheduled]
        gone = sorted(self.talk.gone)
        replies = self.talk.gather([gone, mine]) if scheduled else {}
        for rank, (theirs, _) in replies.items():
            if theirs != gone:
                error = PeerLost(
                    f"workers must agree on who is lost, got {gone} on rank "
                    f"{self.group.rank} and {theirs} on rank {rank}. Restart from a "
                    "checkpoint."
                )
                self.talk.end(error)
                raise error
        moved = []
        for progress, *all_of in zip(
            scheduled, *(streams for _, streams in replies.values()), strict=True
        ):
            progress.round = max(round for _, round in all_of)
            if any(has_moved for has_moved, _ in all_of):
                moved.append(progress)
        return moved

    def _serve(self, headers: dict[int, Header], theirs: Header) -> None:
        """Takes part in others' round without a share that counts."""
        progress = self.rounds.find(theirs.stream)
        stream = progress.stream
        check_headers(headers, stream.name)
        wire = self.talk.wire(self.talk.everyone(), theirs)
        results = stream.layout.new(self.group.device)
        job = self._job(stream, results, results, wire)
        pending = Pending(
            progress=progress,
            clock=theirs.step,
            steps=self.rounds.stats.steps,
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
            task=self.talk.run(serve_(wire, job, headers)),
        )
        self.rounds.pending.append(pending)
        assert pending.task is not None
        self.rounds.land(pending, self.talk.wait(pending.task))

    def _job(self, stream: Stream, shares: Flats, results: Flats, wire: Wire) -> Job:
        return Job(
            stream.name,
            shares.tensors,
            results.tensors,
            self.talk.bucket_bytes,
            # Alone nothing is sent, so nothing need be lost.
            codec=stream.codec if wire.others else None,
            compare=stream.compares,
            robust=stream.robust,
        )
