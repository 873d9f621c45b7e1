"""The seam to the network: what everything above is written against.

`Group` is the only interface to other workers. A `torch.distributed` process group is
behind it in `group.py`, threads that take turns in `turns.py`.
"""

from __future__ import annotations

import contextvars
import time
from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from lowcomm.sync.errors import PeerLost


class Handle(Protocol):
    """A message on its way."""

    peer: int

    def wait(self) -> None:
        """Returns when it has arrived or left; raises `PeerLost` if it cannot."""


#: An exchange: yields each message that it must wait for, returns its outcome.
Exchange = Generator[Handle, None, Any]


class Task(ABC):
    """An exchange that runs beside the caller."""

    #: what has come of it, once it has come to a good end
    outcome: Any = None

    @property
    @abstractmethod
    def ended(self) -> bool:
        """Whether it has come to its end, good or bad."""

    @property
    @abstractmethod
    def failed(self) -> bool:
        """Whether it has come to a bad end."""

    @abstractmethod
    def abandon(self) -> None:
        """Lets the exchanges behind it pass. It goes on, for whoever comes late."""

    @abstractmethod
    def wait(self, timeout_s: float) -> Any:
        """The exchange's outcome.

        Raises:
            PeerLost: if it has not ended `timeout_s` seconds from now, naming the
                worker that it waits for.
        """


def no_answer(peer: int | None, timeout_s: float) -> PeerLost:
    """The error of a wait that has run out."""
    return PeerLost(
        f"rank {peer} did not answer within {timeout_s} s. Raise timeout_s if it is "
        "only slow; else restart from a checkpoint.",
        peer,
    )


class Group(ABC):
    """The workers that exchange with each other, seen from one of them.

    Ranks count from 0 within the group. A message is matched by its two ends and its
    tag; messages of one tag arrive in the order in which they were sent.
    """

    rank: int
    #: the members' ranks in `torch.distributed`; none where it does not know the group
    global_ranks: tuple[int, ...] = ()
    #: whether a message is matched by its tag; else by order alone
    matches_tags = True
    #: whether workers come and go: a lost one then ends no run
    is_elastic = False
    #: whether all confirm to each other that they hold a result before it is used
    confirms = False
    #: among which workers messages go at present; another one after each `reform`
    epoch = ""
    #: ranks that were among each other before the last `reform` too
    main: tuple[int, ...] = ()
    #: whether others wait for this worker to `reform`
    calls = False
    #: whether workers wait to be let in
    awaited = False
    #: whether this worker has no more rounds to come, so that none is waited for
    is_done = False
    #: bound of every wait where nothing else is said, in seconds
    timeout_s = 600.0
    #: where tensors must lie to be sent
    device: torch.device

    @abstractmethod
    def members(self, round: int) -> tuple[int, ...]:
        """Ranks that take part in a round, sorted. Asked anew in every round."""

    @abstractmethod
    def send(self, peer: int, tensor: Tensor, tag: int) -> Handle:
        """Sends a contiguous tensor; it must not change until the handle is done."""

    @abstractmethod
    def recv(self, peer: int, tensor: Tensor, tag: int) -> Handle:
        """Receives into a contiguous tensor, which is updated."""

    @abstractmethod
    def run(self, exchange: Exchange) -> Task:
        """Drives an exchange beside the user's computing; one after another."""

    @abstractmethod
    def new_lane(self) -> int:
        """A number for the tags of one engine, the same on all workers."""

    def channel(self) -> Group:
        """What carries an exchange that begins now, to its end."""
        return self

    def reform(self, rounds: int) -> None:
        """Gives up what is under way, and returns when the workers are settled anew.

        Args:
            rounds: applied so far: without one in between, attempts are counted.

        Raises:
            SyncError: if this worker is to give up.
        """
        raise NotImplementedError("only in groups whose workers come and go")

    def tell(self) -> Any:  # noqa: B027
        """What the user lets the workers know of each other when they change."""

    def tell_change(  # noqa: B027
        self, before: Sequence[int], steps: int, told: Mapping[int, Any]
    ) -> None:
        """Called when a change of the workers is complete.

        Args:
            before: who was there.
            steps: most inner steps that anybody has taken.
            told: what each worker has told, by rank.
        """

    def note_progress(self) -> None:  # noqa: B027
        """Called when a state is a message further, for those who wait meanwhile."""

    def close(self) -> None:  # noqa: B027
        """Leaves, where the others go on without."""

    def now(self) -> float:
        """Seconds on the clock of waits."""
        return time.monotonic()

    def tick(self) -> None:  # noqa: B027 - time passes by itself elsewhere
        """Called after every inner step, for clocks that are driven by hand."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Group:
        # A copied optimizer talks to the same workers; sockets have no copies.
        return self


_current: contextvars.ContextVar[Group | None] = contextvars.ContextVar(
    "lowcomm_group", default=None
)


def enter_group(group: Group) -> None:
    """Makes `group` the one that this thread's optimizers find by themselves."""
    _current.set(group)


def current_group() -> Group | None:
    """The group that `enter_group` has set in this thread."""
    return _current.get()
