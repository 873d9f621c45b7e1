"""What low-communication training costs on a link, asked before a machine is rented.

Arithmetic on bytes and seconds, and a small play of rounds for what has no formula:
exchanges that queue, and waiting for the slowest. Nothing is trained or measured.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from lowcomm.sync.codec import Codec, make_codec
from lowcomm.sync.link import Link
from lowcomm.sync.mean import DEPTH
from lowcomm.sync.schedule import check_number, check_overlap, check_period, staggered

#: fp32: what is kept, and sent without a codec.
_VALUE_BYTES = 4


class _Kind(NamedTuple):
    kept: int = 0  # copies of the parameters
    averages: bool = False  # in place, so a codec needs a copy to code the change of
    moments: tuple[int, ...] = ()  # their periods, in those of the parameters
    is_pair: bool = False
    is_eager: bool = False
    is_ddp: bool = False


_KINDS = {
    "DDP": _Kind(is_ddp=True),
    "LocalSGD": _Kind(averages=True),
    "LocalAdam": _Kind(averages=True, moments=(1, 1)),
    "DiLoCo": _Kind(kept=2),
    "StreamingDiLoCo": _Kind(kept=2),
    "EagerDiLoCo": _Kind(kept=3, is_eager=True),
    "NoLoCo": _Kind(kept=2, is_pair=True),
    "DESLOC": _Kind(averages=True, moments=(3, 6)),
    "MTDAO": _Kind(averages=True, moments=(1, 1)),
}


@dataclass(frozen=True)
class Method:
    """A method and its settings, for `plan`.

    Args:
        name: DDP, LocalSGD, LocalAdam (Adam's moments averaged too), DiLoCo,
            StreamingDiLoCo, EagerDiLoCo, NoLoCo, DESLOC (moments every 3 and 6 periods)
            or MTDAO (one momentum, one period). SlowMo costs what DiLoCo does.
        sync_every: inner steps between exchanges of the parameters; 1 for DDP.
        overlap: inner steps from launching an exchange to applying its result; of DDP
            the part of a step, from 0 to 1, beside which gradients travel.
        fragments: equal parts that are exchanged by themselves.

    Raises:
        ValueError: if a setting is out of its range.
    """

    name: str
    sync_every: int = 1
    overlap: float = 0
    fragments: int = 1

    def __post_init__(self) -> None:
        if self.name not in _KINDS:
            names = ", ".join(_KINDS)
            raise ValueError(f"name must be one of {names}, got {self.name!r}.")
        check_period("sync_every", self.sync_every)
        if check_period("fragments", self.fragments) > 1 and "DiLoCo" not in self.name:
            raise ValueError(
                f"fragments must be 1 for {self.name}, got {self.fragments}. Take "
                "StreamingDiLoCo."
            )
        if self._kind.is_ddp and (self.sync_every != 1 or not 0 <= self.overlap <= 1):
            raise ValueError(
                "overlap must be from 0 to 1 and sync_every 1 for DDP, got overlap="
                f"{self.overlap} and sync_every={self.sync_every}. Its overlap is a "
                "part of a step."
            )
        if self._kind.is_eager and self.overlap:
            raise ValueError(
                f"overlap must be 0 for {self.name}, got {self.overlap}. Its exchange "
                "has the whole round."
            )
        if not self._kind.is_ddp:
            check_overlap(self.overlap, self.sync_every)

    @property
    def _kind(self) -> _Kind:
        return _KINDS[self.name]

    @property
    def _late(self) -> int:
        """Steps from a launch to its landing."""
        if self._kind.is_ddp:
            return 0
        return self.sync_every if self._kind.is_eager else int(self.overlap)

    def _with(self, sync_every: int, overlap: int) -> Method:
        name = "DiLoCo" if self._kind.is_eager else self.name
        return Method(name, sync_every, overlap, self.fragments)


#: What `plan` compares, with periods for which each is known.
METHODS = (
    Method("DDP"),
    Method("LocalSGD", sync_every=16),
    Method("LocalAdam", sync_every=16),
    Method("DiLoCo", sync_every=100),
    Method("StreamingDiLoCo", sync_every=100, overlap=10, fragments=4),
    Method("EagerDiLoCo", sync_every=100),
    Method("NoLoCo", sync_every=50),
    Method("DESLOC", sync_every=32),
    Method("MTDAO", sync_every=32),
)


@dataclass(frozen=True)
class Row:
    """What a method costs with a codec: means over workers, in a long run.

    Args:
        method: and its settings.
        codec: of the parameters; None for fp32.
        bytes_per_step: that a worker sends.
        ratio: of these to DDP's.
        exchange_s: seconds on the wire in `sync_every` steps.
        exposed_s: seconds that a worker waits in a step, for wire and workers.
        compute_utilization: part of the time that is spent in steps.
        hours: of the run, if nothing fails.
        extra_gb: peak, beyond parameters, gradients and inner states; 10^9 bytes.
        shortest_period: that reaches the utilization without overlap.
        smallest_overlap: that hides the exchange, were steps equally long.
        failures: expected in these hours; None if no rate was given.
        restart_h: hours they cost if all go back; None if more than there are.
        go_on_h: hours they cost if the others go on.
        note: what does not work; empty if all does.
    """

    method: Method
    codec: str | None
    bytes_per_step: float
    ratio: float
    exchange_s: float
    exposed_s: float
    compute_utilization: float
    hours: float
    extra_gb: float
    shortest_period: int | None
    smallest_overlap: float | None
    failures: float | None
    restart_h: float | None
    go_on_h: float | None
    note: str


@dataclass(frozen=True)
class Plan:
    """The rows, in the order of the methods, then of the codecs."""

    rows: tuple[Row, ...]

    def as_dicts(self) -> list[dict[str, Any]]:
        """The rows in plain types, for JSON or a data frame."""
        return [asdict(row) for row in self.rows]


# --------------------------------------------------------------------------------------
# Bytes and seconds


def mean_bytes(
    num_values: int,
    num_members: int,
    codec: Codec | None = None,
    value_bytes: float = _VALUE_BYTES,
) -> float:
    r"""Bytes that each of :math:`n` members sends for a mean: :math:`2 S (n-1)/n`.

    >>> mean_bytes(1_000_000, num_members=4)
    6000000.0
    """
    share = mean = value_bytes * num_values
    if codec is not None:
        share = codec.wire_bytes(num_values)
        mean = codec.of_mean(num_members).wire_bytes(num_values)
    return (share + mean) * (num_members - 1) / num_members


def exchange_seconds(
    num_bytes: float, link: Link, *, num_buckets: int = 1, is_pair: bool = False
) -> float:
    r"""Seconds from the last member's launch to the result.

    .. math::

        \frac{s}{B} + 2 l + \max\left(0, \frac{k}{4} - 1\right)
            \max\left(0, l - 3 \frac{s}{k B}\right)

    for :math:`s` bytes in :math:`k` buckets; in pairs a latency more, for headers that
    come first. The last term is of links so fast and long that four buckets on their
    way do not fill them.

    >>> slow, long = Link(gbit_s=0.8, latency_s=0.1), Link(gbit_s=80, latency_s=0.1)
    >>> round(exchange_seconds(6e8, slow, num_buckets=40), 3)  # 600 MB at 100 MB/s
    6.2
    >>> round(exchange_seconds(6e8, long, num_buckets=40), 2)  # ten turns of 0.1 s
    1.12
    """
    wire_s, latency_s = num_bytes * 8e-9 / link.gbit_s, link.latency_s
    turns = max(0.0, num_buckets / DEPTH - 1)
    stall_s = max(0.0, latency_s - (DEPTH - 1) * wire_s / num_buckets)
    return wire_s + (3 if is_pair else 2) * latency_s + turns * stall_s


class _Asked(NamedTuple):
    """The arguments of `plan`, checked."""

    num_params: int
    num_workers: int
    link: Link
    step_s: float  # mean
    num_steps: int
    dtype_bytes: float
    mtbf_h: float | None
    checkpoint_every_s: float
    restart_s: float
    utilization: float
    bucket_bytes: int
    seed: int


class _Exchange(NamedTuple):
    """What is repeated."""

    period: int
    first: int  # step of the first launch
    part: float  # of the parameters
    num_bytes: float
    seconds: float


def _exchanges(method: Method, codec: Codec | None, asked: _Asked) -> list[_Exchange]:
    kind, period = method._kind, method.sync_every
    num_members = 2 if kind.is_pair else asked.num_workers
    value_bytes = asked.dtype_bytes if kind.is_ddp else _VALUE_BYTES

    def make(period: int, first: int, part: float, codec: Codec | None) -> _Exchange:
        num_values = math.ceil(asked.num_params * part)
        num_bytes = mean_bytes(num_values, num_members, codec, value_bytes)
        num_buckets = math.ceil(num_values * _VALUE_BYTES / asked.bucket_bytes)
        seconds = exchange_seconds(
            num_bytes, asked.link, num_buckets=num_buckets, is_pair=kind.is_pair
        )
        return _Exchange(period, first, part, num_bytes, seconds)

    exchanges = [
        make(period, schedule.after(0) or period, 1 / method.fragments, codec)
        for schedule in staggered(period, method.fragments, 0)
    ]
    exchanges += [make(m * period, m * period, 1.0, None) for m in kind.moments]
    if kind.is_pair and codec is not None:  # anchors, as they are
        exchanges.insert(0, make(period, period, 1.0, None))
    return exchanges


# --------------------------------------------------------------------------------------
# Rounds in time


def _play(
    method: Method, exchanges: Sequence[_Exchange], asked: _Asked
) -> tuple[float, float]:
    """Seconds that a worker waits in a step, and the most that is under way, in copies.

    Shares are launched after a step and land some steps later. Exchanges of a worker
    follow one another, and begin when the last of their members has launched them.
    """
    rng, kind = np.random.default_rng(asked.seed), method._kind
    is_random = asked.link.jitter > 0 or kind.is_pair
    num = asked.num_workers if is_random else 1  # all are alike
    warmup, cycles = 4, 4
    if is_random:
        warmup, cycles = 16, max(16, min(256, (1 << 16) // num))
    cycle = math.lcm(*(e.period for e in exchanges))
    start, stop = warmup * cycle, (warmup + cycles) * cycle
    hidden_s = method.overlap * asked.step_s if kind.is_ddp else 0.0

    launches: dict[int, list[_Exchange]] = {}
    for exchange in exchanges:
        for step in range(exchange.first, stop + 1, exchange.period):
            launches.setdefault(step, []).append(exchange)
    events = launches.keys() | {step + method._late for step in launches}
    now, free, waited = np.zeros(num), np.zeros(num), np.zeros(num)
    pending: deque[tuple[int, float, Any]] = deque()  # landing step, part, moments
    before, peak = 0, 0.0
    for step in sorted(event for event in events if event <= stop):
        now = now + _sum_of_steps(step - before, num, asked, rng)
        before = step
        pairs = rng.permutation(num)[: num // 2 * 2].reshape(-1, 2)
        for due in (launches.get(step, []), []):  # those that do not overlap land again
            while pending and pending[0][0] <= step:
                end = pending.popleft()[2]
                waited += np.maximum(0.0, end - now)
                now = np.maximum(now, end)
            for exchange in due:
                ready, seconds = np.maximum(now, free), exchange.seconds - hidden_s
                free = np.full(num, ready.max() + max(0.0, seconds))
                if kind.is_pair:
                    free = now.copy()  # of an odd number one rests
                    free[pairs] = ready[pairs].max(axis=1, keepdims=True) + seconds
                pending.append((step + method._late, exchange.part, free))
            peak = max(peak, sum(part for _, part, _ in pending))
        if step == start:
            waited[:] = 0.0
    return float(waited.mean()) / (stop - start), peak


def _sum_of_steps(count: int, num: int, asked: _Asked, rng: np.random.Generator) -> Any:
    """Seconds of so many steps, for each worker.

    A step is log-normal. The sum is drawn from the log-normal of its mean and variance:
    exact for one step, and normal, as it should be, for many.
    """
    if not asked.link.jitter or not count:
        return count * asked.step_s
    variance = math.log1p(math.expm1(asked.link.jitter**2) / count)
    normal = rng.standard_normal(num)
    return count * asked.step_s * np.exp(math.sqrt(variance) * normal - variance / 2)


# --------------------------------------------------------------------------------------
# The plan


def plan(
    *,
    num_params: float,
    num_workers: int,
    gbit_s: float,
    latency_s: float,
    step_s: float,
    num_steps: int,
    dtype_bytes: float = 4,
    jitter: float = 0.0,
    mtbf_h: float | None = None,
    checkpoint_every_s: float = 1800.0,
    restart_s: float = 300.0,
    utilization: float = 0.95,
    methods: Sequence[Method] = METHODS,
    codecs: Sequence[str | Codec | None] = (None, "int8", "int4"),
    bucket_bytes: int = 4 << 20,
    seed: int = 0,
) -> Plan:
    """What methods cost on a link: bytes, waiting, hours and memory of each.

    docs/planner.md has the formulas, and what they leave out.

    >>> link = {"num_workers": 4, "gbit_s": 0.2, "latency_s": 0.03, "step_s": 0.8}
    >>> diloco = Method("DiLoCo", sync_every=100)
    >>> answer = plan(num_params=150e6, num_steps=88_000, methods=[diloco], **link)
    >>> row = answer.rows[0]
    >>> row.bytes_per_step, row.ratio  # 2 * 600 MB * 3/4 in 100 steps
    (9000000.0, 0.01)
    >>> round(row.exchange_s, 2)  # 900 MB at 25 MB/s, two latencies
    36.06
    >>> round(row.compute_utilization, 3), round(row.hours, 1)  # 80 of 116.06 s
    (0.689, 28.4)
    >>> row.shortest_period, row.smallest_overlap  # 45.08 steps are 1 in 20; and all
    (857, 46)

    Args:
        num_params: parameters of the model.
        num_workers: workers, at least 2.
        gbit_s: rate at which each sends, in 10^9 bits per second.
        latency_s: of a message, in seconds.
        step_s: seconds of an inner step; with jitter their median, as in `Link`.
        num_steps: inner steps that each worker takes.
        dtype_bytes: of a gradient in DDP's all-reduce: 4 for fp32, 2 for bf16. The
            other methods send fp32, unless they have a codec.
        jitter: standard deviation of the logarithm of a step's time.
        mtbf_h: hours between failures of one worker, on average; None for no failures.
        checkpoint_every_s: seconds between checkpoints.
        restart_s: seconds until a worker that has failed, or another, is in its place.
        utilization: part of the time that is to be spent in steps, by which
            `shortest_period` goes.
        methods: what to compare.
        codecs: what the optimizers take as `codec`. DDP has none.
        bucket_bytes: largest message, in bytes of fp32 values.
        seed: of step times and pairs.

    Raises:
        ValueError: if a number is out of its range.
    """
    check_number("num_params", num_params, float, least=1)
    if check_period("num_workers", num_workers) < 2:
        raise ValueError(
            f"num_workers must be at least 2, got {num_workers}. One sends nothing."
        )
    for name, value, below, way_out in (
        ("step_s", step_s, math.inf, "Time some steps on one worker."),
        ("dtype_bytes", dtype_bytes, math.inf, "fp32 has 4, bf16 2."),
        ("mtbf_h", mtbf_h, math.inf, "None stands for no failures."),
        ("utilization", utilization, 1, "Write 0.95 for 95 per cent."),
    ):
        if value is not None and not 0 < value < below:
            raise ValueError(
                f"{name} must be above 0 and below {below}, got {value}. {way_out}"
            )
    check_period("num_steps", num_steps)
    check_number("checkpoint_every_s", checkpoint_every_s, float)
    check_number("restart_s", restart_s, float)
    check_number("bucket_bytes", bucket_bytes, int, least=1)
    asked = _Asked(
        num_params=math.ceil(num_params),
        num_workers=num_workers,
        link=Link(gbit_s, latency_s, step_s, jitter),
        step_s=step_s * math.exp(jitter**2 / 2),
        num_steps=num_steps,
        dtype_bytes=dtype_bytes,
        mtbf_h=mtbf_h,
        checkpoint_every_s=checkpoint_every_s,
        restart_s=restart_s,
        utilization=utilization,
        bucket_bytes=bucket_bytes,
        seed=seed,
    )
    return Plan(
        tuple(
            _row(method, make_codec(codec), asked)
            for method in methods
            for codec in ([None] if method._kind.is_ddp else codecs)
        )
    )


def _row(method: Method, codec: Codec | None, asked: _Asked) -> Row:
    kind, num = method._kind, asked.num_workers
    exchanges = _exchanges(method, codec, asked)
    (ddp,) = _exchanges(Method("DDP"), None, asked)
    taking_part = num // 2 * 2 / num if kind.is_pair else 1.0
    num_bytes = taking_part * sum(e.num_bytes / e.period for e in exchanges)
    exchange_s = sum(e.seconds / e.period for e in exchanges) * method.sync_every
    exposed_s, under_way = _play(method, exchanges, asked)
    seconds = asked.step_s + exposed_s
    copies: float = kind.kept + (kind.averages and codec is not None)
    if not kind.is_ddp:  # which sums gradients where they are
        copies += under_way * (2 if kind.is_pair or method._late else 1)
    period = _shortest_period(method, codec, asked, taking_part * exchange_s)
    overlap = _smallest_overlap(method, codec, asked)
    failures, restart_h, go_on_h = _failures(method, seconds, asked)
    notes = []
    if period is None and not kind.is_ddp:
        notes.append(f"no blocking H of this run reaches {asked.utilization:.0%}")
    if overlap is None:
        in_a_row = math.ceil(sum(e.seconds for e in exchanges) / asked.step_s)
        notes.append(f"no overlap hides {in_a_row} steps of exchanges")
    if kind.is_pair and codec is not None:
        notes.append("anchors go as they are: a codec adds bytes")
    return Row(
        method=method,
        codec=None if codec is None else codec.name,
        bytes_per_step=num_bytes,
        ratio=num_bytes / ddp.num_bytes,
        exchange_s=exchange_s,
        exposed_s=exposed_s,
        compute_utilization=asked.step_s / seconds,
        hours=asked.num_steps * seconds / 3600,
        extra_gb=copies * _VALUE_BYTES * asked.num_params / 1e9,
        shortest_period=period,
        smallest_overlap=overlap,
        failures=failures,
        restart_h=restart_h,
        go_on_h=go_on_h,
        note="; ".join(notes),
    )


def _exposed_s(method: Method, codec: Codec | None, asked: _Asked) -> float:
    return _play(method, _exchanges(method, codec, asked), asked)[0]


def _shortest_period(
    method: Method, codec: Codec | None, asked: _Asked, exchange_s: float
) -> int | None:
    if method._kind.is_ddp:
        return None
    most_s = asked.step_s * (1 / asked.utilization - 1) * (1 + 1e-9)  # of a step

    def is_enough(period: int) -> bool:
        return _exposed_s(method._with(period, 0), codec, asked) <= most_s

    # Were there no others to wait for, the first would do.
    low = high = max(1, math.ceil(exchange_s / most_s))
    while high <= asked.num_steps and not is_enough(high):
        low, high = high + 1, 2 * high
    if high > asked.num_steps:
        return None
    return low + bisect_left(range(low, high), True, key=is_enough)


def _smallest_overlap(
    method: Method, codec: Codec | None, asked: _Asked
) -> float | None:
    if method._kind.is_ddp:
        (exchange,) = _exchanges(method, codec, asked)
        part = exchange.seconds / asked.step_s
        return part if part <= 1 else None
    asked = asked._replace(link=replace(asked.link, jitter=0.0))

    def hides(overlap: int) -> bool:
        trial = method._with(method.sync_every, overlap)
        return _exposed_s(trial, codec, asked) <= 1e-9 * asked.step_s

    overlap = bisect_left(range(method.sync_every), True, key=hides)
    return overlap if overlap < method.sync_every else None


def _failures(
    method: Method, seconds: float, asked: _Asked
) -> tuple[float | None, ...]:
    """How many there are, and the hours that they cost with and without restarts.

    A model. Workers fail at a constant rate. A restart costs everybody half of the time
    between checkpoints, and the restart. If the others go on, one worker loses half a
    round and the time until it is back, and all of them together its share of that.
    """
    if asked.mtbf_h is None:
        return None, None, None
    rate = asked.num_workers / asked.mtbf_h
    failures = rate * asked.num_steps * seconds / 3600
    lost_h = (asked.checkpoint_every_s / 2 + asked.restart_s) / 3600
    left = 1 - rate * lost_h  # of an hour: what is made up for may be lost again
    own_h = (method.sync_every * seconds / 2 + asked.restart_s) / 3600
    return (
        failures,
        failures * lost_h / left if left > 0 else None,
        None if method._kind.is_ddp else failures * own_h / asked.num_workers,
    )


# --------------------------------------------------------------------------------------
# What a study of model sizes suggests

#: Evaluation loss, A N^a, by workers; 0 is data-parallel training.
_LOSS_FITS = {
    0: (18.129, -0.0953),
    1: (18.363, -0.0961),
    2: (18.768, -0.0969),
    4: (19.762, -0.0992),
    8: (21.051, -0.1018),
}
_OUTER_LRS = {1: 0.4, 2: 0.6, 4: 0.6, 8: 0.8}


class Suggestion(NamedTuple):
    """What to begin with and what to expect; None outside of what was studied.

    Args:
        outer_lr: DiLoCo's outer learning rate, with Nesterov momentum of 0.9.
        loss: of evaluation, in nats, on the study's data.
        loss_ddp: that of data-parallel training.
    """

    outer_lr: float | None
    loss: float | None
    loss_ddp: float | None


def suggest(num_params: float, num_workers: int) -> Suggestion:
    """DiLoCo's outer learning rate, and its loss, by a study's fits over model sizes.

    Charles et al., Communication-Efficient Language Model Training Scales Reliably and
    Robustly: Scaling Laws for DiLoCo, 2025. https://arxiv.org/abs/2503.09799

    For 1, 2, 4 or 8 workers and rounds of 30 steps; the best outer rate grows with
    both. It was the same for all models from 335M parameters, up to 10B. Losses are of
    35M to 2.4B, where the fits are within 1 per cent of the runs; at 10B they would be
    3 to 4 too low. Another corpus or tokenizer has another level: compare the two
    losses, and take neither for a forecast.

    >>> advice = suggest(num_params=1.3e9, num_workers=4)
    >>> advice.outer_lr, round(advice.loss, 2), round(advice.loss_ddp, 2)
    (0.6, 2.46, 2.45)

    Args:
        num_params: parameters of the model.
        num_workers: workers.

    Raises:
        ValueError: if one of them is less than 1.
    """
    check_number("num_params", num_params, float, least=1)
    check_period("num_workers", num_workers)
    outer_lr = _OUTER_LRS.get(num_workers) if 335e6 <= num_params <= 10e9 else None
    if num_workers not in _LOSS_FITS or not 35e6 <= num_params <= 2.4e9:
        return Suggestion(outer_lr, None, None)
    fits = _LOSS_FITS[num_workers], _LOSS_FITS[0]
    loss, loss_ddp = (factor * num_params**power for factor, power in fits)
    return Suggestion(outer_lr, loss, loss_ddp)
