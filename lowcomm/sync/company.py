"""Those with whom an engine has its rounds, and what it means when they change."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from lowcomm.sync.errors import PeerLost, SyncError
from lowcomm.sync.flat import Flats
from lowcomm.sync.handover import give, take
from lowcomm.sync.mean import Header
from lowcomm.sync.peers import Peers, everyone
from lowcomm.sync.presence import Presence
from lowcomm.sync.reform import Council, Facts, Place, UnderWay
from lowcomm.sync.rounds import Pending, Progress, Rounds
from lowcomm.sync.stream import Stream
from lowcomm.sync.talk import Talk, check_plans

_log = logging.getLogger(__name__)

_HANDOVER = Header.of_setup("handover")


class Company(ABC):
    """The other workers, as an engine sees them.

    Args:
        talk: with them.
        presence: what is known of each in rounds of some.
        rounds: this worker's.
    """

    def __init__(self, talk: Talk, presence: Presence, rounds: Rounds) -> None:
        self._talk = talk
        self._presence = presence
        self._rounds = rounds
        self._group = talk.group

    def enter(
        self,
        plan: Mapping[str, Any],
        tensors: Mapping[str, Tensor],
        work: Callable[[], None],
    ) -> None:
        """Comes among them.

        Args:
            plan: in which they must not differ, as named lines.
            tensors: that begin as the first worker has them.
            work: what may be due at once, where a run is under way.
        """
        self._plan, self._first = plan, tensors
        self._enter(work)

    @abstractmethod
    def _enter(self, work: Callable[[], None]) -> None:
        pass

    def _begin(self) -> None:
        """All begin together."""
        self._talk.agree(self._plan)
        if self._first:
            self._talk.broadcast(self._first)

    @abstractmethod
    def do(self, work: Callable[[], None]) -> None:
        """Does what needs the others.

        Args:
            work: may be begun again at any time.
        """

    def let_in(self) -> None:  # noqa: B027 - nobody waits
        """Called when a round is over: those who wait to enter do so."""

    def partners(
        self, progress: Progress, peers: Peers
    ) -> tuple[tuple[int, ...], bool]:
        """With whom a round is exchanged, and whether others have their own."""
        present = self._group.members(progress.round)
        clock = self._rounds.clock
        members = peers(present, self._group.rank, progress.round, clock)
        members = tuple(m for m in members if m not in self._talk.gone)
        if peers is everyone:
            return members, False
        partial = progress.stream.goes_alone or members != self._talk.everyone()
        return self._presence.without_finished(members) if partial else members, partial

    @abstractmethod
    def goes_alone(self, stream: Stream, error: SyncError) -> bool:
        """Whether a round that has failed is taken with this worker's share alone."""

    @abstractmethod
    def has_nothing_to_give(self, progress: Progress) -> bool:
        """Whether this worker was let in, and has taken no step since."""

    @abstractmethod
    def known_mean(self, stream: Stream) -> Flats | None:
        """The workers' mean of a stream, where it is not asked for.

        Raises:
            ValueError: if it can be neither known nor asked for now.
        """


class Fixed(Company):
    """Always the same; a lost one ends the rounds that need everybody."""

    def _enter(self, work: Callable[[], None]) -> None:
        self._begin()  # and nothing is due

    def do(self, work: Callable[[], None]) -> None:
        try:
            work()
        except SyncError:
            self._rounds.drop_unkept()
            raise

    def goes_alone(self, stream: Stream, error: SyncError) -> bool:
        return stream.goes_alone and isinstance(error, PeerLost)

    def has_nothing_to_give(self, progress: Progress) -> bool:
        return False

    def known_mean(self, stream: Stream) -> Flats | None:
        return None


class ComeAndGo(Company):
    """Settled anew when one is lost or comes; work then begins again.

    Args:
        talk: with them.
        presence: what is known of each in rounds of some.
        rounds: this worker's.
        give: returns the whole state, for a worker that comes.
        take: takes it.
    """

    def __init__(
        self,
        talk: Talk,
        presence: Presence,
        rounds: Rounds,
        give: Callable[[], Any],
        take: Callable[[Any], None],
    ) -> None:
        super().__init__(talk, presence, rounds)
        self._give, self._take = give, take
        self._is_fresh = True

    def _enter(self, work: Callable[[], None]) -> None:
        self._do(work, anew=True)

    def do(self, work: Callable[[], None]) -> None:
        self._do(work, anew=self._group.calls)

    def let_in(self) -> None:
        if self._group.awaited:
            self._do(lambda: None, anew=True)

    def _do(self, work: Callable[[], None], *, anew: bool) -> None:
        try:
            self._try(work, anew)
        except (SyncError, KeyboardInterrupt):
            self._rounds.drop_unkept()
            self._group.close()  # the others need not wait to find out
            raise

    def _try(self, work: Callable[[], None], anew: bool) -> None:
        while True:
            if anew:
                self._reform()
            try:
                return work()
            except PeerLost as error:
                # As text: who keeps a record would keep all that has failed with it.
                _log.warning("settling anew: %s", str(error))
                anew = True

    def goes_alone(self, stream: Stream, error: SyncError) -> bool:
        return False  # a loss ends what is under way

    def has_nothing_to_give(self, progress: Progress) -> bool:
        return self._rounds.stats.steps == progress.launched_at

    def known_mean(self, stream: Stream) -> Flats:
        # They are at different steps, and would not ask together.
        if any(
            p.stream.has_parameters and p.settled_at < self._rounds.stats.steps
            for p in self._rounds.progress
        ):
            raise ValueError(
                "global_parameters must be asked for when workers are equal, got a "
                "call between rounds of workers that come and go. Call it in a round "
                "hook or after finish(), or evaluate the local parameters."
            )
        return stream.layout.gather_all_(stream.layout.empty())

    # ------------------------------------------------------------------ settling

    def _reform(self) -> None:
        """Goes on with the workers that are there now."""
        for pending in self._rounds.pending:  # before anything of them can go wrong
            if pending.wire is not None:
                pending.wire.seal()
        before = self._group.members(0)
        while True:
            self._group.reform(self._rounds.stats.rounds)
            self._talk.renew()
            self._presence.renew()
            try:
                council = self._meet()
            except PeerLost:
                continue
            except BaseException:
                self._group.close()  # the others need not wait to find out
                raise
            self._rounds.look_ahead()
            told = {rank: facts.told for rank, facts in council.facts.items()}
            self._group.tell_change(before, council.steps, told)
            return

    def _meet(self) -> Council:
        """Settles what becomes of rounds under way, and who takes a state from whom."""
        told = self._talk.gather(self._facts().pack())
        facts = {rank: Facts.unpack(packed) for rank, packed in told.items()}
        council = Council(facts, self._group.main)
        if council.old:
            self._settle_rounds(council)
            for taker, donor in council.donors().items():
                if donor == self._group.rank:
                    self._give_to(taker, council)
                elif taker == self._group.rank:
                    self._take_from(donor, council)
        else:
            self._begin()
        for progress in self._rounds.progress:
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
            for pending in self._rounds.pending
        }
        places = {
            p.stream.name: Place(p.round, p.landed_in, under_way.get(p.stream.name))
            for p in self._rounds.progress
        }
        steps, clock = self._rounds.stats.steps, self._rounds.clock
        return Facts(self._is_fresh, steps, clock, places, self._group.tell())

    def _settle_rounds(self, council: Council) -> None:
        for pending in list(self._rounds.pending):
            progress, wire = pending.progress, pending.wire
            if council.is_used(self._group.rank, progress.stream.name):
                assert wire is not None
                # Else `finish` would find it equal, and leave what is mixed in.
                self._rounds.land(pending, wire.seal(), settle=True)
                continue
            self._rounds.pending.remove(pending)
            if pending.serves or self._group.rank in council.behind:
                pass  # what was done here is still in the tensors
            elif pending.kept:
                self._rounds.pending.append(self._again(pending))
            elif not progress.stream.schedule.never:
                progress.due, progress.began = pending.clock, None

    def _again(self, pending: Pending) -> Pending:
        """The same share for another exchange; the old one's memory is left to it."""
        progress = pending.progress
        members, partial = self.partners(progress, progress.stream.peers)
        return self._rounds.new_pending(
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
            state = {"clock": self._rounds.clock, "streams": self._rounds.agreed()}
        state["landed_in"] = [p.landed_in for p in self._rounds.progress]
        wire = self._talk.wire(sorted((taker, self._group.rank)), _HANDOVER)
        how = self._talk.bucket_bytes, self._group.note_progress
        try:
            exchange = give(wire, taker, state, *how)
        except TypeError as error:  # which is the taker's end, not this worker's
            exchange = give(wire, taker, {"error": str(error)}, *how)
        self._talk.wait(self._talk.run(exchange))
        self._talk.stats.setup_bytes += wire.bytes_sent

    def _take_from(self, donor: int, council: Council) -> None:
        wire = self._talk.wire(sorted((donor, self._group.rank)), _HANDOVER)
        state = self._talk.wait(self._talk.run(take(wire, donor)))
        if "error" in state:
            raise TypeError(state["error"])
        if "plan" in state:
            check_plans(donor, state["plan"], self._group.rank, self._plan)
            self._take(state["all"])
            self._rounds.stats.restart()
        else:
            self._rounds.follow(state["clock"], state["streams"])
        pairs = zip(self._rounds.progress, state["landed_in"], strict=True)
        for progress, landed_in in pairs:
            progress.landed_in = landed_in
            clock = council.sent_again(progress.stream.name)
            # The others wait for this worker's share.
            if clock is not None and not progress.stream.schedule.never:
                progress.due, progress.began = clock, None
