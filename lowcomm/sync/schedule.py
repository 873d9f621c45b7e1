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
    """

    period: int
    offset: int | None = None

    def after(self, step: int) -> int | None:
        """The first launching step after `step`; None for never."""
        if self.period == 0:
            return None
        offset = self.period if self.offset is None else self.offset
        return max(0, (step - offset) // self.period + 1) * self.period + offset


def check_period(name: str, period: object, *, least: int = 1) -> int:
    """Returns `period` if it counts inner steps, raises in its name otherwise."""
    if not isinstance(period, int) or isinstance(period, bool):
        raise TypeError(
            f"{name} must be a whole number of inner steps, got {name}={period!r}."
        )
    if period < least:
        raise ValueError(f"{name} must be at least {least}, got {name}={period}.")
    return period
