"""What was found, and what to say of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from lowcomm.doctor.machine import IFNAME, Machine, outward
from lowcomm.plan import Row

#: Why nothing was measured, where addresses are to blame.
NOT_REACHED = "neither reaches the other"
NO_CONNECTION = "no connection"

#: More pairs than this are not printed.
_SHOWN = 28


class Pair(NamedTuple):
    """Two workers, and what lies between them; None for what could not be measured.

    Args:
        ranks: the lower one first.
        latency_s: of a message, in seconds.
        gbit_s: from the lower rank to the higher, in 10^9 bits per second.
        back_gbit_s: the other way.
        error: why nothing was measured; empty if it was.
    """

    ranks: tuple[int, int]
    latency_s: float | None = None
    gbit_s: float | None = None
    back_gbit_s: float | None = None
    error: str = ""

    @property
    def slower_gbit_s(self) -> float:
        """The rate of its slower direction; 0 if none is known."""
        return min(self.gbit_s or 0.0, self.back_gbit_s or 0.0)


@dataclass(frozen=True)
class Report:
    """What was found, the same on all workers.

    Args:
        machines: the workers, in rank order.
        reached: at which addresses each reaches the others, by rank and rank.
        pairs: what lies between them.
        rows: what DiLoCo costs over the slowest of these links, in fp32 and in int8.
        step_s: seconds of an inner step, if they are known.
    """

    machines: tuple[Machine, ...]
    reached: dict[int, dict[int, list[str]]]
    pairs: tuple[Pair, ...]
    rows: tuple[Row, ...] = ()
    step_s: float | None = None

    @property
    def is_well(self) -> bool:
        """Whether every pair of workers can exchange."""
        return not any(pair.error for pair in self.pairs) and not any(
            machine.listens is None for machine in self.machines
        )

    @property
    def slowest(self) -> Pair | None:
        """The pair with the lowest rate, of those that were measured."""
        measured = [pair for pair in self.pairs if not pair.error]
        return min(measured, key=lambda pair: pair.slower_gbit_s, default=None)

    @property
    def slow_worker(self) -> int | None:
        """A worker whose links are all less than half as fast as any other one."""
        for machine in self.machines:
            own = [p.slower_gbit_s for p in self.pairs if machine.rank in p.ranks]
            other = [p.slower_gbit_s for p in self.pairs if machine.rank not in p.ranks]
            if len(own) > 1 and other and 2 * max(own) < min(other):
                return machine.rank
        return None

    def serving(self, rank: int) -> list[str]:
        """Interfaces of a worker at which all others reach it."""
        return [
            name
            for name, address in self.machines[rank].outside.items()
            if all(
                address in reached[rank]
                for other, reached in self.reached.items()
                if other != rank
            )
        ]

    def as_dict(self) -> dict[str, Any]:
        """All of it in plain types, for JSON."""
        slowest = self.slowest
        return {
            "machines": [asdict(machine) for machine in self.machines],
            "reached": self.reached,
            "pairs": [pair._asdict() for pair in self.pairs],
            "slowest": None if slowest is None else slowest.ranks,
            "slow_worker": self.slow_worker,
            "interfaces": {m.rank: self.serving(m.rank) for m in self.machines},
            "plan": [asdict(row) for row in self.rows],
            "is_well": self.is_well,
        }


# --------------------------------------------------------------------------------------
# In words


def lines(report: Report) -> Iterator[str]:
    """The report, for people."""
    machine = report.machines[0]
    there = {n: v for n, v in machine.versions.items() if v is not None}
    missing = [name for name in machine.versions if name not in there]
    yield ", ".join(f"{name} {version}" for name, version in there.items())
    if missing:
        yield f"not installed, and not needed by lowcomm: {', '.join(missing)}"
    yield f"backends: {', '.join(machine.backends)}; device: {machine.device}"
    yield from _differences(report.machines)
    yield ""
    yield from _places(report.machines)
    yield from _advice(report)
    if report.pairs:
        yield ""
        yield from _table(report)
    if report.rows:
        yield ""
        yield from _plan(report)


def _differences(machines: Sequence[Machine]) -> Iterator[str]:
    first = machines[0]
    for machine in machines[1:]:
        for name in ("python", "torch", "lowcomm"):
            one, other = first.versions[name], machine.versions[name]
            if one != other:
                yield (
                    f"! {name} must be the same everywhere, got {one} on rank 0 and "
                    f"{other} on rank {machine.rank}."
                )


def _places(machines: Sequence[Machine]) -> Iterator[str]:
    table = [["rank", "host", "gloo listens at", "interfaces"]]
    for machine in machines:
        others = [f"{name} {address}" for name, address in machine.outside.items()]
        at = machine.listens or "nowhere"
        cells = [str(machine.rank), machine.host, at, ", ".join(others) or "-"]
        table.append(cells)
    return _aligned(table)


def _advice(report: Report) -> Iterator[str]:
    """What is wrong with addresses, and the line that would help."""
    for machine in report.machines:
        if machine.listens is None:
            names = ", ".join(machine.interfaces)
            yield (
                f"! {IFNAME} must name an interface of each machine, got "
                f"{machine.asked} on {_name(machine)}. It has {names}."
            )
    if len(report.machines) == 1:
        yield from _advice_alone(report.machines[0])
        return
    apart = [pair for pair in report.pairs if pair.error]
    for pair in apart[:_SHOWN]:
        low, high = (report.machines[rank] for rank in pair.ranks)
        yield (
            f"! {_name(low)} at {low.listens or 'no address'} and {_name(high)} at "
            f"{high.listens or 'no address'} do "
            f"not exchange: {pair.error}."
        )
    if len(apart) > _SHOWN:
        yield f"! and {len(apart) - _SHOWN} other pairs."
    if not any(pair.error.startswith((NOT_REACHED, NO_CONNECTION)) for pair in apart):
        return
    serving = {m.rank: report.serving(m.rank) for m in report.machines}
    common = set.intersection(*(set(names) for names in serving.values()))
    if common:
        yield "All reach each other at another interface. On all machines:"
        for name in sorted(common):
            yield f"    export {IFNAME}={name}"
    elif all(serving.values()):
        yield "All reach each other at other interfaces:"
        for machine in report.machines:
            name = serving[machine.rank][0]
            yield f"    export {IFNAME}={name}  # on {_name(machine)}"
    else:
        lost = [_name(report.machines[rank]) for rank in serving if not serving[rank]]
        yield (
            f"Not all reach {', '.join(lost)} at any address: look at firewalls (all "
            "ports above 1024 must be open between workers), routes and VPN."
        )


def _advice_alone(machine: Machine) -> Iterator[str]:
    names = list(machine.outside)
    if machine.is_local and names:
        reason = f"{machine.asked} was asked for"
        if machine.asked is None:
            reason = f"the host name {machine.host} leads there"
        yield (
            f"! Other machines do not reach {machine.listens}, and {reason}. If "
            "workers run on several:"
        )
        yield f"    export {IFNAME}={outward(machine) or names[0]}"
    elif len(names) > 1 and machine.asked is None:
        yield f"Of several interfaces, {IFNAME}=NAME takes another one."
    yield "To measure links, start it as a run: torchrun ... -m lowcomm doctor"


def _name(machine: Machine) -> str:
    return f"rank {machine.rank} on {machine.host}"


def _table(report: Report) -> Iterator[str]:
    measured = [pair for pair in report.pairs if not pair.error]
    if not measured:
        return
    shown = measured
    if len(measured) > _SHOWN:
        shown = sorted(measured, key=lambda pair: pair.slower_gbit_s)[:_SHOWN]
        yield f"the slowest {_SHOWN} of {len(measured)} pairs:"
    table = [["pair", "latency ms", "Mbit/s", "and back"]]
    for pair in shown:
        numbers = (pair.latency_s or 0, pair.gbit_s or 0, pair.back_gbit_s or 0)
        low, high = pair.ranks
        cells = [f"{1000 * number:.4g}" for number in numbers]
        table.append([f"{low} - {high}", *cells])
    yield from _aligned(table)
    slowest = report.slowest
    assert slowest is not None
    both = " and ".join(_name(report.machines[rank]) for rank in slowest.ranks)
    yield f"slowest: {both}, {1000 * slowest.slower_gbit_s:.4g} Mbit/s."
    if report.slow_worker is not None:
        machine = report.machines[report.slow_worker]
        yield (
            f"It is {_name(machine)} that is slow: all others are twice as fast among "
            "each other."
        )


def _plan(report: Report) -> Iterator[str]:
    """What hides an exchange over the slowest link."""
    assert report.step_s is not None
    for row in report.rows:
        codec = "in fp32" if row.codec is None else f'with codec="{row.codec}"'
        yield (
            f"an exchange {codec} takes {row.exchange_s:.3g} s, "
            f"{row.exchange_s / report.step_s:.3g} steps:"
        )
        if row.smallest_overlap is not None:
            overlap = int(row.smallest_overlap)
            period = max(100, 2 * overlap)
            yield f"    sync_every={period}, overlap={overlap} hides it"
        if row.shortest_period is not None:
            yield f"    sync_every={row.shortest_period} without overlap costs 5 %"


def _aligned(table: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for cells in table:
        padded = (c.ljust(w) for c, w in zip(cells, widths, strict=True))
        yield "  ".join(padded).rstrip()
