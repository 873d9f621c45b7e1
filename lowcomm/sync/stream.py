"""The interface between a method and the engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from lowcomm.sync.codec import Codec
from lowcomm.sync.flat import Chunk, Flats, Layout
from lowcomm.sync.mean import Robust
from lowcomm.sync.peers import Peers, everyone
from lowcomm.sync.schedule import Schedule


class Landing(NamedTuple):
    """In which circumstances a result is applied.

    Args:
        late: inner steps taken since the launch.
        share: this worker's share as it was launched, if it is in the mean and a step
            may have been taken since.
        keep: this worker's share is not in the mean, and its progress stays with it.
        settle: nothing of its progress is kept on top, so that all workers are equal.
        num_workers: how many were to take part.
    """

    late: int = 0
    share: Flats | None = None
    keep: bool = False
    settle: bool = False
    num_workers: int = 1


class Stream(ABC):
    """A state that workers exchange, and what it means to them.

    Args:
        name: of the stream, the same on all workers.
        layout: the tensors that it reads and writes.
        schedule: when it is launched, and how much later it lands.
        peers: with whom.
        goes_alone: whether a round goes on without members that are late or lost; else
            it ends with `PeerLost`.
        codec: of the shares and of their mean; None sends the layout's dtypes.
    """

    #: values that must be equal on all workers before a round; compared in each
    agreed: Flats | None = None
    #: what the codec has lost so far and is owed to the next share; None if forgotten
    residual: Flats | None = None
    #: what keeps bad shares from spoiling the mean
    robust = Robust()
    #: False for what only accompanies a round, such as buffers
    is_round = True
    #: whether a value that is not finite keeps a share out of the mean
    is_judged = True
    #: whether it holds the parameters, or part of them
    has_parameters = False
    #: whether `agreed` is what the workers agree the parameters are
    holds_global = False
    #: whether shares are displacements, whose likeness to the mean says something
    compares = False
    #: what is exchanged in its place in the last round
    last: Stream | None = None

    def __init__(
        self,
        name: str,
        layout: Layout,
        schedule: Schedule,
        *,
        peers: Peers = everyone,
        goes_alone: bool = False,
        codec: Codec | None = None,
    ) -> None:
        self.name = name
        self.layout = layout
        self.schedule = schedule
        self.peers = peers
        self.goes_alone = goes_alone
        self.codec = codec

    @abstractmethod
    def share_(self, chunk: Chunk, out: Tensor) -> None:
        """Writes this worker's contribution to a chunk into `out`, which is updated."""

    @abstractmethod
    def apply_(self, chunk: Chunk, result: Tensor, landing: Landing) -> None:
        """Uses the mean of a chunk over the counted workers.

        Args:
            chunk: the chunk.
            result: the mean, shape `(chunk.stop - chunk.start,)`; may be used up.
            landing: the circumstances.
        """

    def counts(self, rank: int, members: Sequence[int]) -> bool:
        """Whether a worker's share is to be in the mean."""
        del rank, members
        return True

    def launched_(self, shares: Flats, num_workers: int, *, finite: bool) -> bool:
        """Called when the shares have been taken, which must be left as they are.

        Returns:
            Whether the stream's tensors have been replaced.
        """
        del shares, num_workers, finite
        return False

    def locate(self) -> None:
        """Points the layout at the tensors as they are now."""
        self.layout.refresh()

    def start_(self) -> None:  # noqa: B027 - most streams keep nothing
        """Takes the values before the first step as the common starting point."""

    def extend_(
        self, tensors: Mapping[str, Tensor], starts: Mapping[str, Tensor]
    ) -> None:
        """Takes in further tensors, by name, and their common starting values."""
        del starts
        self.layout = self.layout.extended(tensors)

    def follow_(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:  # noqa: B027
        """Takes what all workers agree on from another's `state`; own progress stays.

        For a worker that has missed rounds.
        """

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Copies of all tensors that the next round depends on, by kind and name."""
        return {}

    def load_(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:  # noqa: B027
        """Copies the tensors of `state()` back, as far as they are there."""
