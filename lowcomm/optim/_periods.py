"""Averages of parameters and inner states, each on a period of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from lowcomm.optim._states import States, is_first_moment, is_second_moment
from lowcomm.optim._streams import AverageState
from lowcomm.sync.flat import Layout
from lowcomm.sync.schedule import Periodic, check_period
from lowcomm.sync.stream import Stream

#: The name under which a mapping of periods has the parameters' own.
PARAMS = "params"


def check_periods(sync_every: object) -> int | dict[str, int]:
    """Returns one period, or a mapping of periods by state name; raises otherwise."""
    if not isinstance(sync_every, Mapping):
        return check_period("sync_every", sync_every)
    periods = {
        name: check_period(f"sync_every[{name!r}]", period, least=0)
        for name, period in sync_every.items()
    }
    if not periods.get(PARAMS):
        raise ValueError(
            f"sync_every must have a period of at least 1 for {PARAMS!r}, got "
            f"{sync_every=}."
        )
    return periods


def periods_of(
    sync_every: int | Mapping[str, int],
    names: Mapping[str, Any],
    *,
    first: int = 1,
    second: int = 1,
) -> dict[str, int]:
    """The period of the parameters and of each state.

    Args:
        sync_every: the parameters' period, or all of them by name; 0 for never.
        names: of the states that there are.
        first: for one period, that of first moments in its multiples.
        second: that of second moments.
    """
    if isinstance(sync_every, Mapping):
        unknown = [n for n in sync_every if n != PARAMS and n not in names]
        if unknown:
            raise ValueError(
                "sync_every must name states of the inner optimizer, got "
                f"{unknown[0]!r} with states {sorted(names)}."
            )
        return {PARAMS: 0, **dict.fromkeys(names, 0), **sync_every}
    periods = {PARAMS: sync_every}
    for name in names:
        if is_second_moment(name):
            periods[name] = second * sync_every
        elif is_first_moment(name):
            periods[name] = first * sync_every
        else:
            raise ValueError(
                f"sync_every must be a mapping for this inner optimizer, got "
                f"{sync_every} with a state {name!r} of which it is not known whether "
                f"it is a first or a second moment. Name a period for {PARAMS!r} and "
                f"for each of {sorted(names)}; 0 is never."
            )
    return periods


def state_streams(
    periods: Callable[[Mapping[str, Any]], Mapping[str, int]],
    params: dict[str, Tensor],
    states: States,
    overlap: int,
) -> list[Stream]:
    """A stream for each state that has a period, in order of their names."""
    examples = states.names(params)
    chosen = periods(examples)
    return [
        AverageState(
            name,
            states,
            params,
            Layout(examples[name]),
            Periodic(chosen[name], overlap=overlap),
        )
        for name in sorted(examples)
        if chosen[name]
    ]
