"""The mean over workers, made from messages between two.

Each worker owns one slice of every bucket. It receives the others' shares of its slice,
adds them up in rank order, divides, and sends the finished slice to everybody. A ring
moves the same bytes in 2(n-1) latencies instead of two; and only here can a share be
weighted or left out before it is summed, and do all workers get the same bits on every
backend. Buckets follow one another in a pipeline.

Everything is a generator over messages, so that threads, turn-taking workers and tests
drive the same code.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lowcomm.sync.errors import PeerMismatch
from lowcomm.sync.seam import Exchange, Group, Handle

#: Slices begin at multiples of this many values: see `flat.CHUNK_VALUES`.
ALIGN = 16

#: Buckets on the wire at once. 4 MB buckets: the fastest setting on a slow link, within
#: a few per cent of it on loopback.
DEPTH = 4

_HEADER = struct.Struct("<qqqqqdqq")


class Header(NamedTuple):
    """What a worker says of itself before its share counts.

    Args:
        stream: which stream it exchanges, a hash of its name; 0 if it has finished.
        round: how often that stream was exchanged before.
        step: its clock, in inner steps.
        settled: bit i is set if nothing has changed since stream i's last exchange.
        contributes: whether its share is to be counted.
        weight: of its share in the mean.
        agreed: fingerprint of the values that must be equal on all workers.
        plan: fingerprint of the tensors and their order.
    """

    stream: int
    round: int
    step: int
    settled: int
    contributes: int
    weight: float
    agreed: int
    plan: int

    @property
    def finished(self) -> bool:
        """Whether the worker is in `finish` and serves the others' rounds."""
        return self.stream == 0

    def pack(self) -> Tensor:
        """The header as uint8, shape `(64,)`."""
        return torch.frombuffer(bytearray(_HEADER.pack(*self)), dtype=torch.uint8)

    @classmethod
    def unpack(cls, message: Tensor) -> Header:
        """The header in a uint8 message."""
        return cls(*_HEADER.unpack(message.numpy().tobytes()))


class Wire:
    """Messages of one exchange: who takes part, which tags, how many bytes were sent.

    Args:
        group: carries the messages.
        members: ranks that take part, sorted.
        lane: number of the engine, so that two optimizers are never confused.
        exchange: counts the engine's exchanges: two rounds are never paired wrongly.
    """

    def __init__(
        self, group: Group, members: Sequence[int], lane: int, exchange: int
    ) -> None:
        self.group = group
        self.members = tuple(members)
        self.others = tuple(rank for rank in members if rank != group.rank)
        self.bytes_sent = 0
        # 31 bits: lane 5, exchange 9, bucket 16, phase 1. Lanes count from 1 and the
        # topmost exchange is for headers, so small tags remain for others' use.
        self._lane = (lane % 31 + 1) << 26
        self._exchange = self._lane | (exchange % 511) << 17

    @property
    def header_tag(self) -> int:
        """One tag for all exchanges: workers in different rounds must find out."""
        return self._lane | 511 << 17

    def tag(self, bucket: int, phase: int) -> int:
        """The tag of a bucket's shares (phase 0) or finished slices (phase 1)."""
        return self._exchange | (bucket % (1 << 16)) << 1 | phase

    def send(self, peer: int, tensor: Tensor, tag: int) -> Handle:
        """Sends, and counts the bytes."""
        self.bytes_sent += tensor.nbytes
        return self.group.send(peer, tensor, tag)

    def recv(self, peer: int, tensor: Tensor, tag: int) -> Handle:
        """Receives into `tensor`, which is updated."""
        return self.group.recv(peer, tensor, tag)


class Outcome(NamedTuple):
    """How an exchange went.

    Args:
        headers: of all who took part, by rank.
        included: ranks whose shares are in the result, sorted; empty for no result.
        bytes_sent: by this worker.
    """

    headers: dict[int, Header]
    included: tuple[int, ...]
    bytes_sent: int


def handshake(wire: Wire, mine: Header) -> Generator[Handle, None, dict[int, Header]]:
    """Exchanges headers with all members."""
    packed = mine.pack()
    sent = [wire.send(peer, packed, wire.header_tag) for peer in wire.others]
    messages = {peer: torch.empty_like(packed) for peer in wire.others}
    arriving = [
        wire.recv(peer, message, wire.header_tag) for peer, message in messages.items()
    ]
    yield from arriving
    yield from sent
    headers = {peer: Header.unpack(message) for peer, message in messages.items()}
    headers[wire.group.rank] = mine
    return dict(sorted(headers.items()))


def check_headers(headers: dict[int, Header], name: str) -> None:
    """Raises unless all who are not finished are in the same round of stream `name`.

    All workers hold the same headers, so all raise or none does.
    """
    (first, one), *rest = (
        (rank, header) for rank, header in headers.items() if not header.finished
    )
    for rank, other in rest:
        for field, what in (
            ("stream", "exchange the same stream"),
            ("round", "be in the same round"),
            ("step", "have taken the same number of steps"),
            ("plan", "hold the same tensors"),
            ("agreed", "agree on the last synchronized values"),
        ):
            mine, theirs = getattr(one, field), getattr(other, field)
            if mine != theirs:
                raise PeerMismatch(
                    f"workers must {what}, got {field}={mine} on rank {first} (round "
                    f"{one.round}, step {one.step}) and {field}={theirs} on rank {rank}"
                    f" (round {other.round}, step {other.step}) in {name!r}. Resume "
                    "all workers from the same checkpoint, and let each call step() "
                    "equally often."
                )


def counted(headers: dict[int, Header]) -> tuple[int, ...]:
    """Ranks whose shares are in the mean: those that have a finite one, and weight.

    A finished worker only serves, until all are finished.
    """
    all_finished = all(header.finished for header in headers.values())
    return tuple(
        rank
        for rank, header in headers.items()
        if header.contributes
        and header.weight > 0
        and (all_finished or not header.finished)
    )


def mean_(
    wire: Wire, flats: Sequence[Tensor], mine: Header, name: str, bucket_bytes: int
) -> Generator[Handle, None, Outcome]:
    """Headers, then the weighted mean of the members' flat buffers, in place.

    Args:
        wire: the exchange's messages.
        flats: this worker's share, one-dimensional; updated with the mean.
        mine: this worker's header.
        name: of the stream, for messages.
        bucket_bytes: largest message.
    """
    pipeline = _Pipeline(wire, flats, bucket_bytes, wire.members)
    pipeline.fill()  # the first shares need not wait for the headers
    headers = yield from handshake(wire, mine)
    check_headers(headers, name)
    included = counted(headers)
    yield from pipeline.run({rank: headers[rank].weight for rank in included})
    return Outcome(headers, included, wire.bytes_sent)


def serve_(
    wire: Wire, flats: Sequence[Tensor], headers: dict[int, Header], bucket_bytes: int
) -> Generator[Handle, None, Outcome]:
    """The rest of `mean_` for a worker that has seen the headers already."""
    pipeline = _Pipeline(wire, flats, bucket_bytes, wire.members)
    included = counted(headers)
    yield from pipeline.run({rank: headers[rank].weight for rank in included})
    return Outcome(headers, included, wire.bytes_sent)


def broadcast_(
    wire: Wire, flats: Sequence[Tensor], bucket_bytes: int
) -> Generator[Handle, None, int]:
    """The first member's buffers to all, bit by bit, in place; returns bytes sent.

    As a mean to which one worker contributes: its uplink carries every value once,
    the others pass the slices on.
    """
    source = wire.members[:1]
    yield from _Pipeline(wire, flats, bucket_bytes, source).run({source[0]: 1.0})
    return wire.bytes_sent


class _Bucket(NamedTuple):
    """A bucket under way: everything its waits need."""

    number: int
    flat: Tensor
    slices: dict[int, Tensor]  # by owner; views of `flat`
    shares: dict[int, Tensor]  # of the own slice, by sender
    arriving: list[Handle]
    leaving: list[Handle]


class _Pipeline:
    def __init__(
        self,
        wire: Wire,
        flats: Sequence[Tensor],
        bucket_bytes: int,
        senders: tuple[int, ...],
    ) -> None:
        self._wire = wire
        self._me = wire.group.rank
        self._senders = senders
        self._todo = enumerate(_cut(flats, bucket_bytes, len(wire.members)))
        self._sharing: deque[_Bucket] = deque()
        self._gathering: deque[_Bucket] = deque()

    def fill(self) -> None:
        """Puts shares on the wire until as many buckets as allowed are under way."""
        while len(self._sharing) < DEPTH and (item := next(self._todo, None)):
            self._sharing.append(self._share(*item))

    def run(self, weights: dict[int, float]) -> Exchange:
        """Finishes all buckets with the mean under these weights, by rank."""
        self.fill()
        while self._sharing:
            bucket = self._sharing.popleft()
            yield from self._reduce(bucket, weights)
            self._gathering.append(bucket)
            self.fill()
            if len(self._gathering) > DEPTH:
                yield from _settle(self._gathering.popleft())
        while self._gathering:
            yield from _settle(self._gathering.popleft())

    def _share(self, number: int, flat: Tensor) -> _Bucket:
        """Sends shares to the slices' owners, receives those of the own slice."""
        wire, members = self._wire, self._wire.members
        slices = dict(zip(members, _slices(flat, len(members)), strict=True))
        mine = slices[self._me]
        bucket = _Bucket(number, flat, slices, {}, [], [])
        tag = wire.tag(number, 0)
        if self._me in self._senders:
            for peer in wire.others:
                if slices[peer].numel():
                    bucket.leaving.append(wire.send(peer, slices[peer], tag))
        for peer in self._senders:
            if peer != self._me and mine.numel():
                bucket.shares[peer] = share = torch.empty_like(mine)
                bucket.arriving.append(wire.recv(peer, share, tag))
        return bucket

    def _reduce(self, bucket: _Bucket, weights: dict[int, float]) -> Exchange:
        """Finishes the own slice, sends it to all, receives the others'."""
        wire, mine = self._wire, bucket.slices[self._me]
        yield from bucket.arriving
        bucket.arriving.clear()
        if mine.numel() and weights:
            shares = bucket.shares | {self._me: mine}
            mean_of([shares[rank] for rank in weights], [*weights.values()], out=mine)
        bucket.shares.clear()
        tag = wire.tag(bucket.number, 1)
        for peer in wire.others:
            if mine.numel():
                bucket.leaving.append(wire.send(peer, mine, tag))
            if bucket.slices[peer].numel():
                # Its owner sends only after our share has arrived there, so the memory
                # that the share left from is free when this is written.
                handle = wire.recv(peer, bucket.slices[peer], tag)
                bucket.arriving.append(handle)


def mean_of(shares: Sequence[Tensor], weights: Sequence[float], out: Tensor) -> None:
    """The weighted mean, summed in the order given, into `out`, which is updated.

    Uses the first share up. `out` may be any of them. One alone keeps its bits.
    """
    first, *rest = shares
    if not rest:
        if first is not out:
            out.copy_(first)
        return
    if all(weight == weights[0] for weight in weights):
        for share in rest:
            first.add_(share)
        torch.div(first, len(shares), out=out)
    else:
        total = sum(weights)
        first.mul_(weights[0] / total)
        for share, weight in zip(rest, weights[1:], strict=True):
            first.add_(share, alpha=weight / total)
        if first is not out:
            out.copy_(first)


def _settle(bucket: _Bucket) -> Exchange:
    yield from bucket.arriving
    yield from bucket.leaving


def _cut(
    flats: Sequence[Tensor], bucket_bytes: int, num_slices: int
) -> Iterator[Tensor]:
    """Buckets, none of whose slices is a message of more than `bucket_bytes`."""
    for flat in flats:
        values = max(bucket_bytes // flat.element_size() // ALIGN, 1) * ALIGN
        for start in range(0, len(flat), values):
            yield flat[start : start + values]


def _slices(bucket: Tensor, num_slices: int) -> list[Tensor]:
    """Equal slices up to alignment; the last ones may be short or empty."""
    values = -(-bucket.numel() // (num_slices * ALIGN)) * ALIGN
    bounds = [min(i * values, bucket.numel()) for i in range(num_slices + 1)]
    return [bucket[a:b] for a, b in zip(bounds[:-1], bounds[1:], strict=True)]


# --------------------------------------------------------------------------------------
# Short byte strings, for checks


def gather_bytes(wire: Wire, mine: bytes) -> Generator[Handle, None, dict[int, bytes]]:
    """Every member's bytes, by rank."""
    length = torch.tensor([len(mine)])
    sent = [wire.send(peer, length, wire.tag(0, 0)) for peer in wire.others]
    lengths = {peer: torch.empty_like(length) for peer in wire.others}
    for peer, theirs in lengths.items():
        yield wire.recv(peer, theirs, wire.tag(0, 0))
    payload = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
    sent += [wire.send(peer, payload, wire.tag(0, 1)) for peer in wire.others]
    result = {wire.group.rank: mine}
    for peer, theirs in lengths.items():
        message = torch.empty(int(theirs), dtype=torch.uint8)
        yield wire.recv(peer, message, wire.tag(0, 1))
        result[peer] = message.numpy().tobytes()
    yield from sent
    return dict(sorted(result.items()))
