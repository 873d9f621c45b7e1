"""Who is there in rounds of some of the workers, which go on without the others.

Between two workers each header is received by the other's next receive, so both post as
many as the other sends: one for each round that has both, whether or not its result is
still wanted. A round with who owes an answer is declined by a header; who is finished
says so ahead, and to each header that still comes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from lowcomm.sync.errors import PeerLost, SyncError
from lowcomm.sync.mean import Header, Outcome, Wire, announce, drain
from lowcomm.sync.seam import Handle, Task
from lowcomm.sync.talk import Talk


class Presence:
    """What one engine knows of the others.

    Args:
        talk: with them.
    """

    def __init__(self, talk: Talk) -> None:
        self._talk = talk
        self.renew()

    def renew(self) -> None:
        """Begins anew, among workers that have been settled anew."""
        self._finished: set[int] = set()
        #: exchanges that were not waited for, and the worker that has not answered
        self._unanswered: list[tuple[int, Task]] = []
        self._announced: list[Wire] = []
        #: by worker, messages that are under way and that nobody waits for
        self._loose: dict[int, list[Handle]] = {}

    def without_finished(self, members: Sequence[int]) -> tuple[int, ...]:
        """The members of a round that may still be in it."""
        self._update()
        return tuple(member for member in members if member not in self._finished)

    def owes(self, members: Sequence[int]) -> bool:
        """Whether one of them has not answered an earlier exchange yet."""
        self._update()
        return any(peer in members for peer, _ in self._unanswered)

    def decline(self, wire: Wire, step: int) -> None:
        """Lets the others have their round without this worker."""
        header = Header.of_absent(step)
        self._talk.run(announce(wire, header, awaits=True))
        self._announced.append(wire)  # which runs when its turn has come

    def met(self, wire: Wire, outcome: Outcome) -> None:
        """An exchange has come to its end."""
        self._keep(wire)
        for rank, header in outcome.headers.items():
            if header.finished:
                self._finished.add(rank)
            if not header.absent:  # messages of one tag come in order
                self._settle(rank)

    def missed(self, task: Task, others: Sequence[int], error: PeerLost) -> None:
        """This worker goes on without waiting for an exchange any longer."""
        missing = [peer for peer in others if peer == error.rank] or [*others]
        if task.failed:  # a connection that is broken stays so
            self._talk.gone.update(missing)
        else:
            task.abandon()
            self._unanswered += [(peer, task) for peer in missing]

    def tell_finished(self, times: int, step: int) -> Wire:
        """Says to all, ahead of `times` rounds with each, that they go on without."""
        wire = self._talk.wire(self._talk.everyone(), partial=True)
        header = Header.of_finished(step)
        self._talk.wait(self._talk.run(announce(wire, header, times=times)))
        return wire

    def await_finished(self, wire: Wire, times: int, step: int) -> None:
        """Returns when all have said the same, but for those that are lost."""
        for peer in wire.others:
            exchange = drain(wire, Header.of_finished(step), peer, times)
            task = self._talk.run(exchange)
            try:
                task.wait(self._talk.timeout_s)
            except PeerLost as error:
                if not task.failed:
                    self._talk.end(error)
                    raise
                self._talk.gone.add(peer)
        self._talk.stats.setup_bytes += wire.bytes_sent
        self._keep(wire)
        for peer in wire.others:
            self._settle(peer)
        self._finished.clear()
        self._unanswered.clear()

    def _update(self) -> None:
        """Learns from exchanges that have come to their end by now."""
        ended = [(peer, task) for peer, task in self._unanswered if task.ended]
        for peer, task in ended:
            self._unanswered.remove((peer, task))
            if task.failed:
                self._talk.gone.add(peer)
            elif task.outcome.headers[peer].finished:
                self._finished.add(peer)

    def _keep(self, wire: Wire) -> None:
        for handle in wire.loose:
            self._loose.setdefault(handle.peer, []).append(handle)
        wire.loose.clear()

    def _settle(self, peer: int) -> None:
        """Frees messages that have arrived or left, as later ones have."""
        for wire in [wire for wire in self._announced if wire.loose]:
            self._announced.remove(wire)
            self._keep(wire)
        for handle in self._loose.pop(peer, ()):
            if peer not in self._talk.gone:
                with contextlib.suppress(SyncError):
                    handle.wait()
