"""When: which inner steps launch an exchange. Integers only."""

from __future__ import annotations

from dataclasses import dataclass


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
    """

    period: int
    offset: int | None = None
    overlap: int = 0

    def after(self, step: int) -> int | None:
        """The first launching step after `step`; None for never."""
        if self.period == 0:
            return None
        offset = self.period if self.offset is None else self.offset
        return max(0, (step - offset) // self.period + 1) * self.period + offset


def staggered(period: int, count: int, overlap: int) -> list[Periodic]:
    """Schedules of `count` fragments, spread evenly over the period.

    >>> [schedule.offset for schedule in staggered(period=10, count=4, overlap=0)]
    [3, 5, 8, 10]
    """
    return [
        Periodic(period, -(-(i + 1) * period // count), overlap) for i in range(count)
    ]


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
            f"overlap must be smaller than the period, got {overlap=} with "
            f"sync_every={period}. Overlap of a whole round is eager=True, where the "
            "method has it."
        )
    return overlap
