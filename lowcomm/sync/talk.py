"""What one worker says to the others, and how it waits for what they say."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from lowcomm.sync.errors import PeerMismatch, SyncError
from lowcomm.sync.fingerprint import number_of
from lowcomm.sync.flat import Layout
from lowcomm.sync.mean import Header, Wire, broadcast_, gather_bytes
from lowcomm.sync.seam import Exchange, Group, Task
from lowcomm.sync.stats import Stats


class Talk:
    """One engine's exchanges over a group. After one has failed there is none.

    Args:
        group: the workers.
        timeout_s: bound of every wait, in seconds.
        bucket_bytes: largest message.
        stats: where what is sent by checks, broadcasts and the like is counted.
    """

    def __init__(
        self,
        group: Group,
        timeout_s: float,
        bucket_bytes: int,
        stats: Stats | None = None,
    ) -> None:
        self.group = group
        self.timeout_s = timeout_s
        self.bucket_bytes = bucket_bytes
        #: workers whose connection is lost for good, in rounds that do without
        self.gone: set[int] = set()
        self.stats = stats or Stats()
        self._error: SyncError | None = None
        self._lane: int | None = None  # taken when first used: a copy may never be

    def everyone(self) -> tuple[int, ...]:
        """All that are there, sorted."""
        return tuple(m for m in self.group.members(0) if m not in self.gone)

    def wire(
        self,
        members: Sequence[int],
        header: Header | None = None,
        *,
        partial: bool = False,
    ) -> Wire:
        """Messages of an exchange; of a header alone, if none is known before."""
        number = 0
        if header is not None:
            what = (header.stream, header.round, header.step, header.tensors)
            number = number_of(repr(what))
        if self._lane is None:
            self._lane = self.group.new_lane()
        channel = self.group.channel()
        return Wire(channel, members, self._lane, number, partial=partial)

    def run(self, exchange: Exchange) -> Task:
        """Starts an exchange."""
        if self._error is not None:
            raise self._error
        return self.group.channel().run(exchange)

    def wait(self, task: Task) -> Any:
        """The outcome of an exchange that must not fail."""
        try:
            return task.wait(self.timeout_s)
        except SyncError as error:
            self.end(error)
            raise

    def end(self, error: SyncError) -> None:
        """Messages may still come: nothing after a failed exchange can be trusted."""
        self._error = error

    def renew(self) -> None:
        """Begins anew, among workers that have been settled anew."""
        self._error = None
        self.gone.clear()

    def gather(self, mine: Any) -> dict[int, Any]:
        """Every worker's value of plain types, by rank."""
        replies = self._gather(json.dumps(mine).encode())
        return {rank: json.loads(reply) for rank, reply in replies.items()}

    def agree(self, plan: Mapping[str, Any]) -> None:
        """Raises `PeerMismatch` on every worker unless all of them hold this plan."""
        digest = hashlib.sha256(json.dumps(plan).encode()).digest()
        if len(set(self._gather(digest).values())) == 1:
            return
        (first, one), *others = self.gather(plan).items()
        for rank, other in others:
            check_plans(first, one, rank, other)

    def broadcast(self, tensors: Mapping[str, Tensor]) -> None:
        """Gives all workers the first one's tensors, bit by bit, in place."""
        layout = Layout(tensors, widen=False)
        flats = layout.gather_all_(layout.empty(self.group.device))
        header = Header.of_setup("broadcast")
        wire = self.wire(self.everyone(), header)
        exchange = broadcast_(wire, flats.tensors, self.bucket_bytes, header)
        self.stats.setup_bytes += self.wait(self.run(exchange))
        layout.scatter_all_(flats)

    def _gather(self, mine: bytes) -> dict[int, bytes]:
        header = Header.of_setup("check")
        wire = self.wire(self.everyone(), header)
        exchange = gather_bytes(wire, mine, header)
        replies: dict[int, bytes] = self.wait(self.run(exchange))
        self.stats.setup_bytes += wire.bytes_sent
        return replies


def check_plans(
    first: int, one: Mapping[str, Any], rank: int, other: Mapping[str, Any]
) -> None:
    """Raises unless two workers hold the same plan."""
    for key in [*one, *(key for key in other if key not in one)]:
        if one.get(key) != other.get(key):
            raise PeerMismatch(
                f"{key} must be the same on all workers, got "
                f"{one.get(key, 'nothing')} on rank {first} and "
                f"{other.get(key, 'nothing')} on rank {rank}. Build all "
                "optimizers alike."
            )
