"""When: which inner steps launch an exchange. Integers only."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


class Schedule(Protocol):
    """When a stream is launched, and how much later it lands."""

    @property
    def never(self) -> bool:
        """Whether it is launched on request only."""

    @property
    def is_late(self) -> bool:
        """Whether the next launch is only known in the step after the last one."""

    @property
    def shortest(self) -> int:
        """The shortest period, in inner steps; what an overlap must be smaller than."""

    def after(self, step: int) -> int | None:
        """The first launching step after the round that began at `step`."""

    def overlap_at(self, step: int) -> int:
        """How many steps after its launch at `step` an exchange lands."""


@dataclass(frozen=True)
class Periodic:
    r"""Launches at the end of inner steps :math:`kH + o`, :math:`k = 0, 1, \dots`

    >>> schedule, steps = Periodic(period=4), [0]
    >>> while steps[-1] < 12:
    ...     steps.append(schedule.after(steps[-1]))
    >>> steps
    [0, 4, 8, 12]

    Args:
        period: inner steps between launches, :math:`H`; 0 for never.
        offset: the first launch, :math:`1 \le o \le H`; `period` if None.
        overlap: inner steps from a launch to its landing.
        warmup: so many rounds of one step come first; H is counted from there.
    """

    period: int
    offset: int | None = None
    overlap: int = 0
    warmup: int = 0

    is_late = False

    @property
    def never(self) -> bool:
        return self.period == 0

    @property
    def shortest(self) -> int:
        return self.period

    def after(self, step: int) -> int | None:
        if self.never:
            return None
        if step < self.warmup:
            return step + 1
        offset = self.period if self.offset is None else self.offset
        step -= self.warmup
        due = max(0, (step - offset) // self.period + 1) * self.period + offset
        return due + self.warmup

    def overlap_at(self, step: int) -> int:
        return 0 if step <= self.warmup else self.overlap


@dataclass(frozen=True)
class Nested:
    """Several periods at a time; of those that are due, the longest wins.

    >>> schedule, steps = Nested(periods=(2, 6)), [0]
    >>> while steps[-1] < 8:
    ...     steps.append(schedule.after(steps[-1]))
    >>> [(step, schedule.level(step)) for step in steps[1:]]
    [(2, 0), (4, 0), (6, 1), (8, 0)]

    Args:
        periods: in inner steps, ascending.
        overlap: inner steps from a launch to its landing.
        warmup: so many rounds of one step, all of the longest period, come first.
    """

    periods: tuple[int, ...]
    overlap: int = 0
    warmup: int = 0

    never = False
    is_late = False

    @property
    def shortest(self) -> int:
        return self.periods[0]

    def after(self, step: int) -> int | None:
        launches = [p.after(step) for p in self._parts()]
        return min(launch for launch in launches if launch is not None)

    def overlap_at(self, step: int) -> int:
        return self._parts()[0].overlap_at(step)

    def level(self, step: int) -> int:
        """The place of the period that a launching step belongs to."""
        last = len(self.periods) - 1
        if step <= self.warmup:
            return last
        due = [(step - self.warmup) % period == 0 for period in self.periods]
        return max((i for i in range(last + 1) if due[i]), default=last)

    def _parts(self) -> list[Periodic]:
        return [
            Periodic(period, overlap=self.overlap, warmup=self.warmup)
            for period in self.periods
        ]


@dataclass(frozen=True)
class QSR:
    r"""The quadratic synchronization rule: rounds grow as the learning rate falls.

    .. math:: H = \max\left( H_0, \lfloor (\alpha / \eta)^2 \rfloor \right)

    with the learning rate :math:`\eta` of the first parameter group at the start of the
    round. For `sync_every`. Gu et al., A Quadratic Synchronization Rule for Distributed
    Deep Learning, 2024. https://arxiv.org/abs/2310.14423

    >>> rule = QSR(base=4, alpha=0.0175)
    >>> [rule.period(lr, step=0) for lr in (0.008, 0.006, 0.004, 0.002, 0.001, 0.0005)]
    [4, 8, 19, 76, 306, 1225]

    Args:
        base: the shortest period, :math:`H_0`, in inner steps.
        alpha: :math:`\alpha`, in units of the learning rate.
        warmup_steps: rounds that start before this step have the base period.
        max_period: the longest period; None for no bound.
    """

    base: int
    alpha: float
    warmup_steps: int = 0
    max_period: int | None = None

    def __post_init__(self) -> None:
        check_period("base", self.base)
        if not (math.isfinite(self.alpha) and self.alpha >= 0):
            raise ValueError(
                f"alpha must be a finite number of at least 0, got alpha={self.alpha}."
            )
        check_period("warmup_steps", self.warmup_steps, least=0)
        if self.max_period is not None:
            check_period("max_period", self.max_period, least=self.base)

    def period(self, lr: float, step: int) -> int:
        """The inner steps of a round that starts at `step` with this learning rate."""
        if lr <= 0 or step < self.warmup_steps:
            return self.base
        period = max(self.base, math.floor((self.alpha / lr) ** 2))
        return period if self.max_period is None else min(period, self.max_period)


@dataclass(frozen=True)
class ByLearningRate:
    """The schedule of a `QSR`, which looks at the learning rate as rounds begin.

    Args:
        rule: the rule.
        lr: says the learning rate of now.
        overlap: inner steps from a launch to its landing.
    """

    rule: QSR
    lr: Callable[[], float]
    overlap: int = 0

    never = False
    # A scheduler sets the rate of the new round after the step that ends the old one.
    is_late = True

    @property
    def shortest(self) -> int:
        return self.rule.base

    def after(self, step: int) -> int | None:
        return step + self.rule.period(self.lr(), step)

    def overlap_at(self, step: int) -> int:
        return self.overlap


def staggered(period: int, count: int, overlap: int) -> list[Periodic]:
    """Schedules of `count` fragments, spread evenly over the period.

    >>> [schedule.offset for schedule in staggered(period=10, count=4, overlap=0)]
    [3, 5, 8, 10]
    """
    return [
        Periodic(period, -(-(i + 1) * period // count), overlap) for i in range(count)
    ]


def check_number(
    name: str, value: object, kind: type[int] | type[float], *, least: float = 0
) -> None:
    """Raises in its name unless `value` is a finite number of at least `least`."""
    numbers = (int,) if kind is int else (int, float)
    if not isinstance(value, numbers) or isinstance(value, bool):
        what = "a whole number" if kind is int else "a number"
        raise TypeError(f"{name} must be {what}, got {name}={value!r}.")
    if not (math.isfinite(value) and value >= least):
        raise ValueError(
            f"{name} must be a finite number of at least {least}, got {name}={value}."
        )


def check_positive(name: str, value: object) -> None:
    """Raises in its name unless `value` is a finite number above 0."""
    check_number(name, value, float)
    assert isinstance(value, int | float)
    if not value > 0:
        raise ValueError(f"{name} must be positive, got {name}={value}.")


def check_decay(name: str, value: object) -> float:
    """Returns `value` if it can be what is left after a step, raises otherwise."""
    check_number(name, value, float)
    assert isinstance(value, int | float)
    if not value < 1:
        raise ValueError(f"{name} must be at least 0 and below 1, got {name}={value}.")
    return value


def check_period(name: str, period: object, *, least: int = 1) -> int:
    """Returns `period` if it counts inner steps, raises in its name otherwise."""
    if not isinstance(period, int) or isinstance(period, bool):
        raise TypeError(
            f"{name} must be a whole number of inner steps, got {name}={period!r}."
        )
    if period < least:
        raise ValueError(f"{name} must be at least {least}, got {name}={period}.")
    return period


def check_overlap(overlap: object, period: int) -> int:
    """Returns `overlap` if it fits into the period, raises otherwise."""
    overlap = check_period("overlap", overlap, least=0)
    if overlap and overlap >= period:
        raise ValueError(
            f"overlap must be smaller than the period, got {overlap=} with a shortest "
            f"period of {period}. Overlap of a whole round is eager=True, where the "
            "method has it."
        )
    return overlap
