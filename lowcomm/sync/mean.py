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

import itertools
import math
import statistics
import struct
import threading
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowcomm.sync.codec import Codec
from lowcomm.sync.errors import PeerLost, PeerMismatch
from lowcomm.sync.fingerprint import number_of
from lowcomm.sync.seam import Exchange, Group, Handle

#: Slices begin at multiples of this many values: kernels give other bits for what is
#: behind the last whole vector.
ALIGN = 16

#: Buckets on the wire at once. 4 MB buckets: the fastest setting on a slow link, within
#: a few per cent of it on loopback.
DEPTH = 4

_HEADER = struct.Struct("<24sqqidqqqdI")


class Header(NamedTuple):
    """What a worker says of itself before its share counts.

    Args:
        stream: the name of what it exchanges, cut to 24 bytes; empty if it is absent.
        round: how often that stream was exchanged before; of who is absent, whether it
            will be back.
        step: its clock, in inner steps.
        contributes: whether its share is to be counted.
        weight: of its share in the mean.
        agreed: fingerprint of the values that must be equal on all workers.
        tensors: fingerprint of the tensors' names, kinds and order.
        members: fingerprint of who takes part, where all must.
        norm: Euclidean length of its share, where that is limited.
        mark: of its share, where it must differ from the others'; else 0.
    """

    stream: str
    round: int
    step: int
    contributes: int
    weight: float
    agreed: int
    tensors: int
    members: int = 0
    norm: float = 0.0
    mark: int = 0

    @classmethod
    def of_finished(cls, step: int) -> Header:
        """Of a worker that exchanges nothing of its own any more."""
        return cls("", 0, step, 0, 0.0, 0, 0)

    @classmethod
    def of_setup(cls, what: str) -> Header:
        """Before a check or a broadcast, so that it meets its like only."""
        return cls(what, 0, 0, 1, 1.0, 0, 0)

    @classmethod
    def of_absent(cls, step: int) -> Header:
        """Of a worker without which the others go on this time."""
        return cls("", 1, step, 0, 0.0, 0, 0)

    @property
    def absent(self) -> bool:
        """Whether the worker has no share of its own."""
        return not self.stream

    @property
    def finished(self) -> bool:
        """Whether it is in `finish`, and will have none again."""
        return self.absent and not self.round

    def pack(self) -> Tensor:
        """The header as uint8, shape `(88,)`."""
        packed = _HEADER.pack(self.stream.encode(), *self[1:])
        return torch.frombuffer(bytearray(packed), dtype=torch.uint8)

    @classmethod
    def unpack(cls, message: Tensor) -> Header:
        """The header in a uint8 message."""
        name, *numbers = _HEADER.unpack(message.cpu().numpy().tobytes())
        return cls(name.rstrip(b"\0").decode(), *numbers)


class Wire:
    """Messages of one exchange: who takes part, which tags, how many bytes were sent.

    Args:
        group: carries the messages.
        members: ranks that take part, sorted.
        lane: number of the engine, so that two optimizers are not confused.
        exchange: what is exchanged, as a number: its name, round, step and tensors.
        partial: whether it is a round of some of the workers, which goes on without
            those that are absent; else they serve it.
    """

    def __init__(
        self,
        group: Group,
        members: Sequence[int],
        lane: int,
        exchange: int,
        *,
        partial: bool = False,
    ) -> None:
        self.group = group
        self.partial = partial
        self.bytes_sent = 0
        self._prepared: Outcome | None = None
        self._is_sealed = False
        self._lock = threading.Lock()
        #: messages that nobody waits for here: others take and send them in their time
        self.loose: list[Handle] = []
        # 31 bits: lane 4, exchange 21, bucket 5, phase 1. A backend that gets a message
        # of another length than it expects ends the process, so workers that are not in
        # the same exchange must not have the same tags; their headers tell them. Lanes
        # count from 1, so small tags remain for others' use.
        self._lane = (lane % 15 + 1) << 27
        self._number = exchange
        self.narrow(members)

    @property
    def header_tag(self) -> int:
        """One tag for all exchanges: workers in different ones must find out."""
        # Another one for rounds of some: who says that it is absent from those may be
        # in a round of everyone before anybody has asked.
        return self._lane | ((1 << 21) - 1) << 6 | self.partial << 1

    def narrow(self, members: Sequence[int]) -> None:
        """Takes these members, before anything but headers has been sent."""
        self.members = tuple(members)
        # In the order of sending. Each begins with its next one, so that not all
        # send to the same worker at a time.
        mine = self.members.index(self.group.rank)
        self.others = self.members[mine + 1 :] + self.members[:mine]
        # Slices depend on who takes part.
        number = number_of(f"{self._number} {self.members}") % ((1 << 21) - 1)
        self._exchange = self._lane | number << 6

    def tag(self, bucket: int, phase: int) -> int:
        """The tag of a bucket's shares (phase 0) or finished slices (phase 1)."""
        return self._exchange | (bucket % 31) << 1 | phase

    @property
    def last_tag(self) -> int:
        """The tag of what is told after all buckets."""
        return self._exchange | 31 << 1

    @property
    def confirm_tag(self) -> int:
        """The tag of the word that all of a result is here."""
        return self.last_tag | 1

    def prepare(self, outcome: Outcome) -> None:
        """Notes that all of the result is here; raises if it is not wanted any more."""
        with self._lock:
            if self._is_sealed:
                raise PeerLost("the workers have been settled anew")
            self._prepared = outcome

    def seal(self) -> Outcome | None:
        """Ends the exchange where it is: what has been prepared by now, if anything."""
        with self._lock:
            self._is_sealed = True
            return self._prepared

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
        likeness: of this worker's share to the mean; None if it was not asked for, or
            is not in the mean.
        factors: to which shares were shortened, by rank.
    """

    headers: dict[int, Header]
    included: tuple[int, ...]
    bytes_sent: int
    likeness: Likeness | None = None
    factors: Mapping[int, float] = MappingProxyType({})


class Robust(NamedTuple):
    """What keeps a few bad shares from spoiling a mean.

    Args:
        clip: longer shares are shortened to so many times the median length; None for
            no limit.
        trim: of each value, so many of the smallest and of the largest are left out.
    """

    clip: float | None = None
    trim: int = 0

    def factors(self, norms: Mapping[int, float]) -> dict[int, float]:
        """To which shares are shortened, by rank; those that are not are left out.

        >>> Robust(clip=2.0).factors({0: 1.0, 1: 1.0, 2: 8.0})
        {2: 0.25}
        """
        if self.clip is None or not norms:
            return {}
        limit = self.clip * statistics.median(norms.values())
        return {rank: limit / norm for rank, norm in norms.items() if norm > limit > 0}


class Likeness(NamedTuple):
    """Lengths of a share and of the mean, and the cosine between them.

    >>> Likeness.of(dot=3.0, share=9.0, mean=4.0)
    Likeness(share_norm=3.0, mean_norm=2.0, cosine=0.5)
    """

    share_norm: float
    mean_norm: float
    cosine: float

    @classmethod
    def of(cls, *, dot: float, share: float, mean: float) -> Likeness:
        """From the scalar product and the squared lengths."""
        lengths = math.sqrt(share * mean)
        return cls(math.sqrt(share), math.sqrt(mean), dot / lengths if lengths else 0.0)


class _Greeting(NamedTuple):
    """Headers under way."""

    messages: dict[int, Tensor]  # the others', by rank
    arriving: dict[int, Handle]
    leaving: dict[int, Handle]


def cut_name(name: str) -> str:
    """As much of a stream's name as a header has room for."""
    return name.encode()[:24].decode(errors="ignore")


def handshake(wire: Wire, mine: Header) -> Generator[Handle, None, dict[int, Header]]:
    """Exchanges headers with all members."""
    return (yield from _headers(wire, mine, _greet(wire, mine, wire.others)))


def announce(
    wire: Wire, mine: Header, *, times: int = 1, awaits: bool = False
) -> Generator[Handle, None, None]:
    """Puts this worker's header on the wire, and waits for nothing.

    Args:
        wire: to whom.
        mine: the header.
        times: how often it is said.
        awaits: whether a header of each other will come for it.
    """
    yield from ()
    for _ in range(times):
        greeting = _greet(wire, mine, wire.others if awaits else ())
        wire.loose += [*greeting.arriving.values(), *greeting.leaving.values()]


def drain(
    wire: Wire, mine: Header, peer: int, times: int
) -> Generator[Handle, None, None]:
    """Returns when a member has said so often that it is finished.

    Headers of rounds come before, each of which wants one of this worker.
    """
    room = torch.empty_like(mine.pack()).to(wire.group.device)
    while times:
        yield wire.recv(peer, room, wire.header_tag)
        if Header.unpack(room).finished:
            times -= 1
        else:
            packed = mine.pack().to(wire.group.device)
            wire.loose.append(wire.send(peer, packed, wire.header_tag))


def _greet(wire: Wire, mine: Header, answers: Sequence[int]) -> _Greeting:
    packed, tag = mine.pack().to(wire.group.device), wire.header_tag
    messages = {peer: torch.empty_like(packed) for peer in answers}
    return _Greeting(
        messages,
        {peer: wire.recv(peer, room, tag) for peer, room in messages.items()},
        {peer: wire.send(peer, packed, tag) for peer in wire.others},
    )


def _headers(
    wire: Wire, mine: Header, greeting: _Greeting
) -> Generator[Handle, None, dict[int, Header]]:
    """All members' headers, by rank."""
    yield from greeting.arriving.values()
    headers = {peer: Header.unpack(room) for peer, room in greeting.messages.items()}
    for peer, leaving in greeting.leaving.items():
        # Who is missing from a round of some takes headers when it has the time.
        if wire.partial and headers[peer].absent:
            wire.loose.append(leaving)
        else:
            yield leaving
    headers[wire.group.rank] = mine
    return dict(sorted(headers.items()))


def check_headers(headers: dict[int, Header], name: str) -> None:
    """Raises unless all who are not absent are in the same round of stream `name`.

    All workers hold the same headers, so all raise or none does.
    """
    (first, one), *rest = (
        (rank, header) for rank, header in headers.items() if not header.absent
    )
    for rank, other in rest:
        for field, what in (
            ("stream", "exchange the same stream"),
            ("round", "be in the same round"),
            ("step", "have taken the same number of steps"),
            ("tensors", "hold the same tensors"),
            ("members", "agree on who is lost"),
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

    An absent worker only serves.
    """
    return tuple(
        rank
        for rank, header in headers.items()
        if header.contributes and header.weight > 0
    )


class Job(NamedTuple):
    """What is to be averaged, and how.

    Args:
        name: of the stream, for messages.
        shares: this worker's contribution, one-dimensional tensors.
        results: of the same shapes, updated with the mean; may be the shares.
        bucket_bytes: largest message.
        codec: puts values into fewer bits; None sends them as they are.
        lost: of the shares' shapes, updated with what the codec lost of them; or None.
        compare: whether the shares' likeness to the mean is wanted.
        staged: done when the shares may be read; None if they may be at once.
        robust: how the mean is kept from bad shares.
    """

    name: str
    shares: Sequence[Tensor]
    results: Sequence[Tensor]
    bucket_bytes: int
    codec: Codec | None = None
    lost: Sequence[Tensor] | None = None
    compare: bool = False
    staged: Handle | None = None
    robust: Robust = Robust()


def mean_(wire: Wire, job: Job, mine: Header) -> Generator[Handle, None, Outcome]:
    """Headers, then the weighted mean of the members' shares.

    Args:
        wire: the exchange's messages.
        job: what is to be averaged.
        mine: this worker's header.
    """
    if job.staged is not None:
        yield job.staged
    greeting = _greet(wire, mine, wire.others)
    pipeline = None
    if not wire.partial:  # the first shares need not wait for the headers
        pipeline = _Pipeline(wire, job, wire.members)
        pipeline.fill()
    headers = yield from _headers(wire, mine, greeting)
    check_headers(headers, job.name)
    if pipeline is None:
        wire.narrow([rank for rank, header in headers.items() if not header.absent])
        if not wire.others:  # nothing is sent, so nothing need be lost
            job = job._replace(codec=None)
        pipeline = _Pipeline(wire, job, wire.members)
    return (yield from _finish(pipeline, wire, job, headers))


def serve_(
    wire: Wire, job: Job, headers: dict[int, Header]
) -> Generator[Handle, None, Outcome]:
    """The rest of `mean_` for a worker that has seen the headers already."""
    pipeline = _Pipeline(wire, job, wire.members)
    return (yield from _finish(pipeline, wire, job, headers))


def _finish(
    pipeline: _Pipeline, wire: Wire, job: Job, headers: dict[int, Header]
) -> Generator[Handle, None, Outcome]:
    included = counted(headers)
    factors = job.robust.factors({rank: headers[rank].norm for rank in included})
    weights = {rank: headers[rank].weight for rank in included}
    yield from pipeline.run(weights, factors)
    likeness = pipeline.likeness if wire.group.rank in included else None
    outcome = Outcome(headers, included, wire.bytes_sent, likeness, factors)
    if wire.group.confirms:
        wire.prepare(outcome)
        yield from _confirm(wire)
    return outcome._replace(bytes_sent=wire.bytes_sent)


def _confirm(wire: Wire) -> Exchange:
    """Returns when all members hold the result.

    So whoever uses it knows that no other need go without, whatever happens next.
    """
    word = torch.zeros(1, dtype=torch.uint8, device=wire.group.device)
    words = {peer: torch.empty_like(word) for peer in wire.others}
    tag = wire.confirm_tag
    arriving = [wire.recv(peer, room, tag) for peer, room in words.items()]
    leaving = [wire.send(peer, word, tag) for peer in wire.others]
    yield from leaving
    yield from arriving


def broadcast_(
    wire: Wire, flats: Sequence[Tensor], bucket_bytes: int, mine: Header
) -> Generator[Handle, None, int]:
    """The first member's buffers to all, bit by bit, in place; returns bytes sent.

    As a mean to which one worker contributes: its uplink carries every value once,
    the others pass the slices on.
    """
    check_headers((yield from handshake(wire, mine)), mine.stream)
    job = Job("broadcast", flats, flats, bucket_bytes)
    source = wire.members[:1]
    yield from _Pipeline(wire, job, source).run({source[0]: 1.0}, {})
    return wire.bytes_sent


class _Bucket(NamedTuple):
    """A bucket under way: everything its waits need."""

    number: int
    shares: dict[int, Tensor]  # own, by owner of the slice
    results: dict[int, Tensor]  # by owner of the slice
    lost: dict[int, Tensor | None]  # by owner of the slice
    codes: dict[int, Tensor]  # others' shares of the own slice, or results, by sender
    arriving: list[Handle]
    leaving: list[Handle]


class _Pipeline:
    def __init__(self, wire: Wire, job: Job, senders: tuple[int, ...]) -> None:
        self._wire = wire
        self._me = wire.group.rank
        self._senders = senders
        self._codec = job.codec
        self._mean_codec = job.codec and job.codec.of_mean(len(wire.members))
        self._compare = job.compare
        self._trim = job.robust.trim
        blocks = [c.block for c in (self._codec, self._mean_codec) if c is not None]
        align = math.lcm(ALIGN, *blocks)
        num = len(wire.members)
        lost: Sequence[Tensor | None] = job.lost or [None] * len(job.shares)
        self._todo = enumerate(
            [_slices(flat, a, b, num, align) for flat in (share, result, rest)]
            for share, result, rest in zip(job.shares, job.results, lost, strict=True)
            for a, b in _bounds(share, job.bucket_bytes, align)
        )
        self._sharing: deque[_Bucket] = deque()
        self._gathering: deque[_Bucket] = deque()
        self._dots = dict.fromkeys(wire.members, 0.0)
        self._squares = dict.fromkeys(wire.members, 0.0)
        self._mean_square = 0.0
        self._spare: dict[tuple[torch.dtype, int], list[Tensor]] = {}
        self._parts: dict[int, Tensor] = {}
        self.likeness: Likeness | None = None

    def fill(self) -> None:
        """Puts shares on the wire until as many buckets as allowed are under way."""
        todo = itertools.islice(self._todo, DEPTH - len(self._sharing))
        # gloo sends what it knows to be awaited, and is told so by messages that queue
        # behind those under way: whatever is received is said before anything is sent.
        buckets = [self._expect(number, *slices) for number, slices in todo]
        for bucket in buckets:
            self._share(bucket)
        self._sharing += buckets

    def run(self, weights: dict[int, float], factors: dict[int, float]) -> Exchange:
        """Finishes all buckets with the mean under these weights, by rank.

        Args:
            weights: of the shares that count.
            factors: by which some of these are multiplied.
        """
        self.fill()
        while self._sharing:
            bucket = self._sharing.popleft()
            yield from self._reduce(bucket, weights, factors)
            self._gathering.append(bucket)
            self.fill()
            if len(self._gathering) > DEPTH:
                yield from self._collect(self._gathering.popleft())
        # The owners' numbers travel with their last slices: no latency more.
        told = self._tell() if self._compare and weights else []
        while self._gathering:
            yield from self._collect(self._gathering.popleft())
        yield from told
        if self._parts:
            parts = torch.stack([*self._parts.values()])
            dot, share, mean = parts.sum(0).tolist()
            self.likeness = Likeness.of(dot=dot, share=share, mean=mean)

    def _expect(
        self, number: int, shares: _Slices, results: _Slices, lost: _Slices
    ) -> _Bucket:
        """A bucket, with receives of the others' shares of the own slice."""
        wire, members = self._wire, self._wire.members
        bucket = _Bucket(
            number,
            dict(zip(members, shares, strict=True)),
            dict(zip(members, results, strict=True)),
            dict(zip(members, lost, strict=True)),
            {},
            [],
            [],
        )
        mine = bucket.shares[self._me]
        for peer in wire.others:
            if peer in self._senders and mine.numel():
                bucket.codes[peer] = codes = self._room(self._codec, mine)
                bucket.arriving.append(wire.recv(peer, codes, wire.tag(number, 0)))
        return bucket

    def _share(self, bucket: _Bucket) -> None:
        """Sends shares to the slices' owners."""
        if self._me not in self._senders:
            return
        wire, tag = self._wire, self._wire.tag(bucket.number, 0)
        for peer in (*wire.others, self._me):
            codes = _encode(self._codec, bucket.shares[peer])
            rest = bucket.lost[peer]
            if rest is not None:
                # What the others will see, and what is missing from it.
                _decode_(self._codec, codes, rest)
                torch.sub(bucket.shares[peer], rest, out=rest)
            if peer == self._me:
                bucket.codes[peer] = codes
            elif codes.numel():
                bucket.leaving.append(wire.send(peer, codes, tag))

    def _reduce(
        self, bucket: _Bucket, weights: dict[int, float], factors: dict[int, float]
    ) -> Exchange:
        """Finishes the own slice, receives the others', sends it to all."""
        wire, mine = self._wire, bucket.results[self._me]
        yield from bucket.arriving
        bucket.arriving.clear()
        if mine.numel() and weights:
            shares = {
                rank: _values(self._codec, bucket.codes[rank], len(mine))
                for rank in weights
            }
            mean = self._room_for_mean(mine, shares)
            counted = [
                share * factors[rank] if rank in factors else share
                for rank, share in shares.items()
            ]
            if self._trim and len(counted) > 2 * self._trim:
                trimmed_mean_(counted, self._trim, out=mean)
            else:
                mean_of_(counted, [*weights.values()], out=mean)
            if self._compare:
                self._measure(shares, mean)
        else:
            mean = mine
        self._give_back(bucket)
        codes = _encode(self._mean_codec, mean)
        rest = bucket.lost[self._me]
        if rest is not None and self._me in weights:
            # What coding the mean loses is owed by its owner, at its weight.
            error = torch.empty_like(rest)
            _decode_(self._mean_codec, codes, error)
            factor = sum(weights.values()) / weights[self._me]
            rest.add_(mean.to(rest.dtype) - error, alpha=factor)
        tag = wire.tag(bucket.number, 1)
        for peer in wire.others:
            if bucket.results[peer].numel():
                # Its owner sends only after our share has arrived there, so the memory
                # that the share left from is free when this is written.
                room = bucket.results[peer]
                if self._mean_codec is not None:
                    room = self._room(self._mean_codec, room)
                bucket.codes[peer] = room
                bucket.arriving.append(wire.recv(peer, room, tag))
        for peer in wire.others if codes.numel() else ():
            bucket.leaving.append(wire.send(peer, codes, tag))
        _decode_(self._mean_codec, codes, mine)

    def _collect(self, bucket: _Bucket) -> Exchange:
        """Takes the others' finished slices in."""
        yield from bucket.arriving
        for peer, codes in bucket.codes.items():
            _decode_(self._mean_codec, codes, bucket.results[peer])
        if self._mean_codec is not None:
            self._give_back(bucket)
        yield from bucket.leaving

    def _room(self, codec: Codec | None, values: Tensor) -> Tensor:
        """Memory for the codes of so many values, used before if possible."""
        # Memory that is new to the process costs more than what comes into it.
        size = len(values) if codec is None else codec.wire_bytes(len(values))
        dtype = values.dtype if codec is None else torch.uint8
        if spare := self._spare.get((dtype, size)):
            return spare.pop()
        return torch.empty(size, dtype=dtype, device=values.device)

    def _give_back(self, bucket: _Bucket) -> None:
        """Takes memory back that others' messages came into."""
        for peer, codes in bucket.codes.items():
            if peer != self._me:
                self._spare.setdefault((codes.dtype, len(codes)), []).append(codes)
        bucket.codes.clear()

    def _room_for_mean(self, mine: Tensor, shares: dict[int, Tensor]) -> Tensor:
        """The result's own memory, unless a share is there that is needed later."""
        own = shares.get(self._me)
        if own is None or own.data_ptr() != mine.data_ptr():
            return mine
        early = [*shares].index(self._me) < 2
        return mine if early and not self._compare else torch.empty_like(mine)

    def _measure(self, shares: dict[int, Tensor], mean: Tensor) -> None:
        """Adds this slice's part to the shares' likeness to the mean."""
        for rank, share in shares.items():
            share = share.to(mean.dtype)
            self._dots[rank] += float(torch.dot(share, mean))
            self._squares[rank] += float(torch.dot(share, share))
        self._mean_square += float(torch.dot(mean, mean))

    def _tell(self) -> list[Handle]:
        """Tells each worker what this owner has measured of its share."""
        wire, tag = self._wire, self._wire.last_tag
        handles = []
        for rank in wire.members:
            numbers = [self._dots[rank], self._squares[rank], self._mean_square]
            self._parts[rank] = mine = torch.tensor(
                numbers, dtype=torch.float64, device=wire.group.device
            )
            if rank != self._me:
                handles.append(wire.send(rank, mine, tag))
                self._parts[rank] = torch.empty_like(mine)
                handles.append(wire.recv(rank, self._parts[rank], tag))
        return handles


def _encode(codec: Codec | None, values: Tensor) -> Tensor:
    return values if codec is None else codec.encode(values.float())


def _values(codec: Codec | None, codes: Tensor, size: int) -> Tensor:
    return codes if codec is None else codec.decode(codes, size)


def _decode_(codec: Codec | None, codes: Tensor, out: Tensor) -> None:
    if codec is not None and out.dtype == torch.float32:
        codec.decode(codes, len(out), out)
    elif codec is not None:
        out.copy_(codec.decode(codes, len(out)))
    elif codes.data_ptr() != out.data_ptr():
        out.copy_(codes)


def mean_of_(shares: Sequence[Tensor], weights: Sequence[float], out: Tensor) -> None:
    """The weighted mean, summed in the order given, into `out`, which is updated.

    One share alone keeps its bits. `out` may be one of the first two.

    >>> out = torch.empty(1)
    >>> mean_of_([torch.tensor([1.0]), torch.tensor([4.0])], [2.0, 1.0], out)
    >>> out
    tensor([2.])
    """
    first, *rest = shares
    if not rest:
        if out.data_ptr() != first.data_ptr():
            out.copy_(first)
    elif all(weight == weights[0] for weight in weights):
        torch.add(first, rest[0], out=out)
        for share in rest[1:]:
            out.add_(share)
        out.div_(len(shares))
    else:
        factors = [weight / sum(weights) for weight in weights]
        torch.add(first * factors[0], rest[0], alpha=factors[1], out=out)
        for share, factor in zip(rest[1:], factors[2:], strict=True):
            out.add_(share, alpha=factor)


def trimmed_mean_(shares: Sequence[Tensor], trim: int, out: Tensor) -> None:
    """The mean of what is left of each value without the extremes, into `out`.

    >>> out = torch.empty(1)
    >>> trimmed_mean_([torch.tensor([x]) for x in (9e9, 1.0, 3.0, -9e9)], 1, out)
    >>> out
    tensor([2.])
    """
    ordered = torch.stack([*shares]).sort(dim=0).values
    torch.mean(ordered[trim : len(shares) - trim], dim=0, out=out)


def _bounds(flat: Tensor, bucket_bytes: int, align: int) -> Iterator[tuple[int, int]]:
    """Of buckets that are no larger than a message may be."""
    values = max(bucket_bytes // flat.element_size() // align, 1) * align
    for start in range(0, len(flat), values):
        yield start, min(start + values, len(flat))


#: A bucket's slices in order of their owners.
_Slices = Sequence[Any]


def _slices(
    flat: Tensor | None, start: int, stop: int, num_slices: int, align: int
) -> _Slices:
    """Equal slices up to alignment; the last ones may be short or empty."""
    if flat is None:
        return [None] * num_slices
    values = -(-(stop - start) // (num_slices * align)) * align
    bounds = [min(start + i * values, stop) for i in range(num_slices + 1)]
    return [flat[a:b] for a, b in itertools.pairwise(bounds)]


# --------------------------------------------------------------------------------------
# Short byte strings, for checks


def gather_bytes(
    wire: Wire, mine: bytes, header: Header
) -> Generator[Handle, None, dict[int, bytes]]:
    """Every member's bytes, by rank."""
    check_headers((yield from handshake(wire, header)), header.stream)
    device = wire.group.device
    length = torch.tensor([len(mine)], device=device)
    sent = [wire.send(peer, length, wire.tag(0, 0)) for peer in wire.others]
    lengths = {peer: torch.empty_like(length) for peer in wire.others}
    for peer, theirs in lengths.items():
        yield wire.recv(peer, theirs, wire.tag(0, 0))
    payload = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(device)
    sent += [wire.send(peer, payload, wire.tag(0, 1)) for peer in wire.others]
    result = {wire.group.rank: mine}
    for peer, theirs in lengths.items():
        message = torch.empty(int(theirs), dtype=torch.uint8, device=device)
        yield wire.recv(peer, message, wire.tag(0, 1))
        result[peer] = message.cpu().numpy().tobytes()
    yield from sent
    return dict(sorted(result.items()))
