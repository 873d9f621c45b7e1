"""What becomes of rounds and states when workers have been settled anew.

Each worker tells the others where it is; what follows is a function of what all have
told, the same on every worker.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lowcomm.sync.errors import PeerMismatch


@dataclass(frozen=True)
class UnderWay:
    """A round that had been launched and not landed.

    Args:
        epoch: among whom it was sent.
        members: whose shares were to be in it.
        clock: at its launch.
        prepared: whether the worker holds all of its result.
    """

    epoch: str
    members: tuple[int, ...]
    clock: int
    prepared: bool


@dataclass(frozen=True)
class Place:
    """Where a worker is in a stream.

    Args:
        round: the next one to land.
        landed_in: the epoch of the last one that has landed.
        under_way: the one that has been launched, if any.
    """

    round: int
    landed_in: str
    under_way: UnderWay | None


@dataclass(frozen=True)
class Facts:
    """What a worker tells of itself.

    Args:
        fresh: whether it has no part in the run yet.
        steps: inner steps that it has taken.
        clock: its position in the schedules.
        places: by stream.
        told: what the user lets the others know.
    """

    fresh: bool
    steps: int
    clock: int
    places: Mapping[str, Place]
    told: Any = None

    def pack(self) -> dict[str, Any]:
        """Plain types, for `unpack`."""
        return asdict(self)

    @classmethod
    def unpack(cls, packed: Mapping[str, Any]) -> Facts:
        """What `pack` has made."""
        places = {}
        for name, place in packed["places"].items():
            if (under_way := place["under_way"]) is not None:
                members = tuple(under_way["members"])
                under_way = UnderWay(**{**under_way, "members": members})
            places[name] = Place(**{**place, "under_way": under_way})
        return cls(**{**packed, "places": places})


class Council:
    """What all workers have told, and what follows.

    A result that was prepared is used if every worker that is left and had a share in
    it holds it: as nobody uses a result before all have confirmed that they hold it,
    one that anybody has used, be it somebody who is gone, is used by all. What not all
    hold was used by nobody, and is exchanged again.

    Args:
        facts: by rank.
        main: ranks that were among each other until now. The others come, or come
            back, and follow these.
    """

    def __init__(self, facts: Mapping[int, Facts], main: Sequence[int]) -> None:
        self.facts = facts
        self.old = {r: f for r, f in facts.items() if not f.fresh}
        self._main = [rank for rank in main if rank in self.old] or self._latest()
        #: ranks that have no part in the run yet
        self.fresh = [rank for rank, f in facts.items() if f.fresh]
        #: ranks that have missed rounds
        self.behind = [rank for rank in self.old if self._is_behind(rank)]
        self._donors = [rank for rank in self._main if rank not in self.behind]
        if self.old and not self._donors:
            raise PeerMismatch(
                "workers must have had the same rounds, got none that has had all of "
                f"them among {sorted(self.old)}. Resume from a checkpoint."
            )

    def is_used(self, rank: int, name: str) -> bool:
        """Whether a worker takes the result of its round under way."""
        place = self.facts[rank].places[name]
        mine = place.under_way
        if mine is None or not mine.prepared:
            return False
        return all(
            _holds(self.old[other].places[name], place.round, mine.epoch)
            for other in mine.members
            if other in self.old
        )

    def _latest(self) -> list[int]:
        """One that has had most rounds; for when those that had more are gone."""
        if not self.old:
            return []
        names = next(iter(self.old.values())).places
        return [max(self.old, key=lambda rank: [self._had(rank, n) for n in names])]

    def _had(self, rank: int, name: str) -> tuple[int, str]:
        """A worker's next round, and where its last was, when results are used."""
        place = self.old[rank].places[name]
        if place.under_way is not None and self.is_used(rank, name):
            return place.round + 1, place.under_way.epoch
        return place.round, place.landed_in

    def _is_behind(self, rank: int) -> bool:
        """Whether it lacks a round, or had others than those that the rest has had."""
        for name in self.old[rank].places:
            had, all_had = (
                self._had(rank, name),
                [self._had(r, name) for r in self._main],
            )
            if rank in self._main:
                if had[0] < max(all_had)[0]:
                    return True
            elif had != max(all_had):
                return True
        return False

    def donors(self) -> dict[int, int]:
        """From whom each takes who is fresh or behind; spread over all that can give.

        Empty if the run begins.
        """
        takers = sorted(self.fresh + self.behind) if self.old else []
        donors = sorted(self._donors)
        return {taker: donors[i % len(donors)] for i, taker in enumerate(takers)}

    def sent_again(self, name: str) -> int | None:
        """Clock of the launch of a stream's round that is exchanged again, if any."""
        clocks = [
            under_way.clock
            for rank in self._donors
            if (under_way := self.old[rank].places[name].under_way) is not None
            and not self.is_used(rank, name)
        ]
        return max(clocks, default=None)

    @property
    def steps(self) -> int:
        """Most inner steps that anybody has taken."""
        return max(f.steps for f in self.facts.values())


def _holds(place: Place, round: int, epoch: str) -> bool:
    """Whether a worker has the result of a round, or has used it."""
    if place.round == round:
        other = place.under_way
        return other is not None and other.prepared and other.epoch == epoch
    # In pairs it may have had later ones, of the same epoch, with others.
    return place.round > round and place.landed_in == epoch
