"""What synchronization has done so far: counters, never lists."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class StreamStats:
    r"""What has been done for one stream, on this worker.

    Args:
        rounds: exchanges applied.
        bytes_sent: by its exchanges, headers included.
        exposed_s: seconds that `step()` waited for them.
        share_norm: Euclidean length of this worker's last pseudo-gradient.
        mean_norm: length of the workers' mean.
        cosine: between the two: 1 if all workers go the same way, about
            :math:`1/\sqrt{M}` if their ways are unrelated. None, as both lengths, where
            no pseudo-gradients are exchanged.
    """

    rounds: int = 0
    bytes_sent: int = 0
    exposed_s: float = 0.0
    share_norm: float | None = None
    mean_norm: float | None = None
    cosine: float | None = None


@dataclass
class Stats:
    """What synchronization has done so far, on this worker.

    Args:
        steps: inner steps attempted.
        rounds: exchanges applied, one for each fragment or state.
        bytes_sent: by exchanges, headers included.
        setup_bytes: by checks, broadcasts and `global_parameters`.
        exposed_s: seconds that `step()` and `finish()` waited for rounds.
        skipped_rounds: due, and not applied here.
        streams: the same for each fragment or state, by name.
    """

    steps: int = 0
    rounds: int = 0
    bytes_sent: int = 0
    setup_bytes: int = 0
    exposed_s: float = 0.0
    skipped_rounds: int = 0
    streams: dict[str, StreamStats] = field(default_factory=dict)

    def of(self, stream: str) -> StreamStats:
        """The counts of one stream."""
        return self.streams.setdefault(stream, StreamStats())

    def snapshot(self) -> Stats:
        """A copy that no longer changes."""
        return copy.deepcopy(self)

    def restart(self) -> None:
        """Counts from here what this worker sends and waits for, but not rounds."""
        self.bytes_sent = self.setup_bytes = self.skipped_rounds = 0
        self.exposed_s = 0.0
        for counts in self.streams.values():
            counts.bytes_sent, counts.exposed_s = 0, 0.0

    def state_dict(self) -> dict[str, Any]:
        """The counts as plain types."""
        return dataclasses.asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes the counts of `state_dict` in place of its own."""
        for name, count in state.items():
            setattr(self, name, count)
        self.streams = {n: StreamStats(**s) for n, s in state["streams"].items()}
