"""Latency and rate between two workers, by messages as an exchange sends them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowcomm.sync.seam import Exchange, Group, Handle

_BATCHES = 3
_PINGS = 3
_FIRST_BYTES = 8 << 10
_GROWTH = 4
#: Messages of a volley: time is taken from the arrival of the first one. Not of a later
#: one: packets of 64 kB make short times inexact.
_PARTS = 8


class Measured(NamedTuple):
    """What lies between two workers.

    Args:
        latency_s: of a message, in seconds: half of the way there and back.
        gbit_s: rate from the lower rank to the higher, in 10^9 bits per second.
        back_gbit_s: rate of the other direction.
    """

    latency_s: float
    gbit_s: float
    back_gbit_s: float


def measure(
    group: Group, peer: int, *, seconds: float, max_bytes: int, timeout_s: float
) -> Measured:
    """Measures what lies between two workers; both call it, and nothing else meanwhile.

    Rates are of what arrives, without headers, by the receiver's clock alone. Volleys
    grow until the time is used up; the last one counts, which is the longest: then a
    connection has found its pace, and a limiter has spent what it lets through at once.

    >>> import lowcomm
    >>> def worker(rank, group):
    ...     limits = {"seconds": 1.0, "max_bytes": 1 << 24, "timeout_s": 30.0}
    ...     return measure(group, 1 - rank, **limits)
    >>> link = lowcomm.Link(gbit_s=0.02, latency_s=0.05, step_s=0.0)
    >>> measured, same = lowcomm.simulate(worker, 2, link=link)
    >>> round(measured.latency_s, 4), round(measured.gbit_s, 4), measured == same
    (0.05, 0.02, True)

    Args:
        group: that both are in.
        peer: the other's rank.
        seconds: about so long in each direction.
        max_bytes: so much at most in each direction.
        timeout_s: bound of every wait, in seconds.

    Raises:
        PeerLost: if the other one does not answer.
    """
    ends = _Ends(group, peer, timeout_s)
    is_first = group.rank < peer
    latency_s = ends.ping() if is_first else ends.answer()
    rates = [0.0, 0.0]
    for direction in (0, 1):
        if is_first == (direction == 0):
            rates[direction] = ends.send()
        else:
            rates[direction] = ends.receive(seconds, max_bytes)
    return Measured(latency_s, *rates)


class _Ends:
    """This worker and another one."""

    def __init__(self, group: Group, peer: int, timeout_s: float) -> None:
        self._group = group
        self._peer = peer
        self._timeout_s = timeout_s

    def ping(self) -> float:
        """Seconds that a message takes; tells the other one too."""
        seconds = []
        for _ in range(1 + _BATCHES):
            since = self._group.now()
            self._run(self._pings())
            seconds.append((self._group.now() - since) / (2 * _PINGS))
        # The first messages may have come before the other one was there.
        latency_s = sorted(seconds[1:])[_BATCHES // 2]
        self._run(self._post(out=[_numbers(latency_s)]))
        return latency_s

    def answer(self) -> float:
        """The other end of `ping`."""
        for _ in range(1 + _BATCHES):
            self._run(self._pongs())
        told = _numbers(0.0)
        self._run(self._post(into=[told]))
        return told.item()

    def send(self) -> float:
        """The rate, as `receive` on the other end has measured it."""
        # Some links compress: zeros would take no time there.
        generator = torch.Generator().manual_seed(0)
        num_bytes, rate = _FIRST_BYTES, 0.0
        while num_bytes:
            parts = torch.empty(_PARTS, num_bytes // _PARTS, dtype=torch.uint8)
            parts.random_(generator=generator)
            verdict = _numbers(0.0, 0.0)
            self._run(self._post(list(parts), [verdict]))
            num_bytes, rate = int(verdict[0]), verdict[1].item()
        return rate

    def receive(self, seconds: float, max_bytes: int) -> float:
        """The rate at which volleys arrive; says how large the next one is to be."""
        now = self._group.now
        start, num_bytes, total = now(), _FIRST_BYTES, 0
        verdict: list[Tensor] = []
        while True:
            # To be received before it is asked for, so that it need not wait.
            parts = torch.empty(_PARTS, num_bytes // _PARTS, dtype=torch.uint8)
            rest = self._run(self._first_of(list(parts), verdict))
            since = now()
            self._run(_await(rest))
            took = max(now() - since, 1e-9)
            total += num_bytes
            rate = parts[1:].nbytes / took
            left = rate * (start + seconds - now())
            following = int(min(_GROWTH * num_bytes, left, max_bytes - total))
            if following <= num_bytes:
                break
            num_bytes = following // _PARTS * _PARTS
            verdict = [_numbers(num_bytes, 0.0)]
        gbit_s = rate * 8e-9
        self._run(self._post(out=[_numbers(0.0, gbit_s)]))
        return gbit_s

    def _run(self, exchange: Exchange) -> Any:
        return self._group.run(exchange).wait(self._timeout_s)

    def _pings(self) -> Exchange:
        inbox = [self._recv(_numbers(0.0)) for _ in range(_PINGS)]
        for pong in inbox:
            ping = self._send(_numbers(0.0))
            yield pong
            yield ping

    def _pongs(self) -> Exchange:
        inbox = [self._recv(_numbers(0.0)) for _ in range(_PINGS)]
        for ping in inbox:
            yield ping
            yield self._send(_numbers(0.0))

    def _post(
        self, out: Sequence[Tensor] = (), into: Sequence[Tensor] = ()
    ) -> Exchange:
        handles = [self._recv(tensor) for tensor in into]
        handles += [self._send(tensor) for tensor in out]
        yield from handles

    def _first_of(self, into: Sequence[Tensor], out: Sequence[Tensor]) -> Exchange:
        """Ends when the first has come; returns the rest."""
        first, *rest = [self._recv(tensor) for tensor in into]
        yield from [self._send(tensor) for tensor in out]
        yield first
        return rest

    def _send(self, tensor: Tensor) -> Handle:
        return self._group.send(self._peer, tensor, 0)

    def _recv(self, tensor: Tensor) -> Handle:
        return self._group.recv(self._peer, tensor, 0)


def _await(handles: Sequence[Handle]) -> Exchange:
    yield from handles


def _numbers(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)
