"""With whom: which of the present workers exchange with each other. Integers only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lowcomm.sync.fingerprint import number_of

#: (members present, own rank, round, step) -> those the worker exchanges with, sorted,
#: itself included. The same on every worker of the result.
Peers = Callable[[tuple[int, ...], int, int, int], tuple[int, ...]]


def everyone(
    members: tuple[int, ...], rank: int, round: int, step: int
) -> tuple[int, ...]:
    """All present workers, in every round.

    >>> everyone((0, 1, 2), rank=1, round=7, step=70)
    (0, 1, 2)
    """
    del rank, round, step
    return members


@dataclass(frozen=True)
class Pairs:
    """Pairs at random, anew in every round; of an odd number one stays alone.

    >>> [Pairs(seed=0)((0, 1, 2, 3, 4), rank, round=7, step=70) for rank in range(5)]
    [(0, 3), (1, 4), (2,), (0, 3), (1, 4)]

    Args:
        seed: of the pairings, the same on all workers.
    """

    seed: int

    def __call__(
        self, members: tuple[int, ...], rank: int, round: int, step: int
    ) -> tuple[int, ...]:
        # Sorted by a hash: the same in every version of every library.
        order = sorted(members, key=lambda m: number_of(f"{self.seed} {round} {m}"))
        first = order.index(rank) // 2 * 2
        return tuple(sorted(order[first : first + 2]))


@dataclass(frozen=True)
class Listed:
    """Groups as a function of the round lists them; who is in none stays alone.

    >>> peers = Listed(lambda round: [(0, 1), (2, 3)] if round % 2 else [(0, 2)])
    >>> [peers((0, 1, 2, 3), 2, round, step=0) for round in range(2)]
    [(0, 2), (2, 3)]

    Args:
        groups: the groups of a round, the same on all workers.
    """

    groups: Callable[[int], Sequence[Sequence[int]]]

    def __call__(
        self, members: tuple[int, ...], rank: int, round: int, step: int
    ) -> tuple[int, ...]:
        groups = self.groups(round)
        if not isinstance(groups, Sequence):
            raise TypeError(
                f"peers must return groups of ranks, got {groups!r} for round {round}. "
                "Return a list such as [(0, 1), (2, 3)]."
            )
        for group in groups:
            if rank in group:
                return tuple(member for member in members if member in group)
        return (rank,)


@dataclass(frozen=True)
class Sites:
    """The workers of a site, of several sites, ..., of all; by the level of a step.

    >>> peers = Sites(((0, 1),), level=lambda step: int(step % 4 == 0))
    >>> [peers((0, 1, 2, 3), 0, round=0, step=step) for step in (2, 4)]
    [(0, 1), (0, 1, 2, 3)]

    Args:
        sites: ranks, by level; above the last one are all.
        level: of a step.
    """

    sites: tuple[tuple[int, ...], ...]
    level: Callable[[int], int]

    def __call__(
        self, members: tuple[int, ...], rank: int, round: int, step: int
    ) -> tuple[int, ...]:
        level = self.level(step)
        if level == len(self.sites):
            return members
        return tuple(member for member in members if member in self.sites[level])
