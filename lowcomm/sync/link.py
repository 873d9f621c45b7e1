"""A slow network that exists only as a virtual clock."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """Every worker's connection to the network, and its speed, for `simulate`.

    Messages of a worker leave one after another at the link's rate and arrive after its
    latency. Exchanges run beside the steps; arithmetic in them takes no time. So time
    passes by steps and by waiting, and a day can be simulated in minutes.

    >>> import torch, lowcomm
    >>> def worker(rank, group):
    ...     weight = torch.nn.Parameter(torch.zeros(1_000_000))
    ...     weight.grad = torch.zeros_like(weight)
    ...     inner = torch.optim.SGD([weight], lr=1.0)
    ...     opt = lowcomm.LocalSGD(inner, sync_every=10)
    ...     start = group.now()
    ...     for _ in range(10):
    ...         opt.step()
    ...     return round(group.now() - start, 2)
    >>> link = lowcomm.Link(gbit_s=0.032, latency_s=0.1, step_s=0.5)
    >>> lowcomm.simulate(worker, 2, link=link)  # 10 steps, 4 MB at 4 MB/s, 2 latencies
    [6.2, 6.2]

    Args:
        gbit_s: rate at which a worker sends, in 10^9 bits per second; it receives as
            fast as others send.
        latency_s: from a message's last byte sent to its arrival, in seconds.
        step_s: seconds of an inner step, one for all workers or one for each; None for
            the time that it really takes here.
        jitter: standard deviation of the logarithm of a step's time.
    """

    gbit_s: float
    latency_s: float
    step_s: float | Sequence[float] | None = None
    jitter: float = 0.0

    def __post_init__(self) -> None:
        if not self.gbit_s > 0:
            raise ValueError(f"gbit_s must be positive, got gbit_s={self.gbit_s}.")
        for name in ("latency_s", "jitter"):
            if not getattr(self, name) >= 0:
                value = getattr(self, name)
                raise ValueError(f"{name} must be at least 0, got {name}={value}.")
        if self.jitter and self.step_s is None:
            raise ValueError(
                f"jitter must be 0 without step_s, got jitter={self.jitter}: the time "
                "that really passes is not changed."
            )
        steps = self.step_s if isinstance(self.step_s, Sequence) else [self.step_s]
        if not all(step_s is None or step_s >= 0 for step_s in steps):
            raise ValueError(f"step_s must be at least 0, got step_s={self.step_s}.")

    def step_of(self, rank: int) -> float | None:
        """Seconds of a step of one worker."""
        return self.step_s[rank] if isinstance(self.step_s, Sequence) else self.step_s


class Clock:
    """The workers' times on a link; without one, the time that really passes.

    Args:
        link: the network; None for none.
        num_workers: how many workers there are.
    """

    def __init__(self, link: Link | None, num_workers: int) -> None:
        if link is not None and isinstance(link.step_s, Sequence):
            if len(link.step_s) != num_workers:
                raise ValueError(
                    "step_s must have one entry for each worker, got "
                    f"{len(link.step_s)} with num_workers={num_workers}."
                )
        self._link = link
        self._now = [0.0] * num_workers
        self._uplink_free = [0.0] * num_workers
        self._random = [random.Random(rank) for rank in range(num_workers)]
        self._mark = time.monotonic()

    def now(self, rank: int) -> float:
        """The worker's time, in seconds."""
        if self._link is None:
            return time.monotonic()
        self._pass_real_time(rank)
        return self._now[rank]

    def tick(self, rank: int) -> None:
        """The worker has taken a step."""
        if self._link is None:
            return
        self._pass_real_time(rank)
        step_s = self._link.step_of(rank)
        if step_s is not None:
            factor = math.exp(self._random[rank].gauss(0.0, self._link.jitter))
            self._now[rank] += step_s * factor

    def mark(self) -> None:
        """What passes from here on is the time of the worker whose turn it is."""
        self._mark = time.monotonic()

    def wait_until(self, rank: int, moment: float) -> None:
        """The worker waits for a moment, if it is still to come."""
        if self._link is not None:
            self._now[rank] = max(self._now[rank], moment)

    def send(
        self, rank: int, num_bytes: int, moment: float, *, beside: bool
    ) -> tuple[float, float]:
        """When a message that is ready at `moment` has left, and when it arrives.

        Args:
            rank: of the sender.
            num_bytes: size of the message.
            moment: in seconds.
            beside: whether it is of an exchange that nobody waits for here, whose time
                is not the worker's; it takes none from other messages.
        """
        if self._link is None:
            return moment, moment
        start = moment if beside else max(moment, self._uplink_free[rank])
        left = start + num_bytes * 8e-9 / self._link.gbit_s
        if not beside:
            self._uplink_free[rank] = left
        return left, left + self._link.latency_s

    def _pass_real_time(self, rank: int) -> None:
        if self._link is not None and self._link.step_of(rank) is None:
            before, self._mark = self._mark, time.monotonic()
            self._now[rank] += self._mark - before
