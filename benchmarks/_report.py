"""Timing in turns, and one JSON line for each figure."""

import json
import statistics
import time
from collections.abc import Callable
from typing import Any


def in_turns(
    *calls: Callable[[], Any], repeats: int, number: int = 1
) -> list[list[float]]:
    """Seconds per call of each, timed in turns, so that drift hits all alike."""
    for call in calls:
        call()
    seconds: list[list[float]] = [[] for _ in calls]
    for _ in range(repeats):
        for call, times in zip(calls, seconds, strict=True):
            start = time.perf_counter()
            for _ in range(number):
                call()
            times.append((time.perf_counter() - start) / number)
    return seconds


def ratio(times: list[float], base: list[float]) -> float:
    """The median of the paired ratios."""
    return statistics.median(a / b for a, b in zip(times, base, strict=True))


def report(benchmark: str, figure: str, value: float, unit: str, **more: Any) -> None:
    """Prints one figure; `limit` among `more` is what the value should not exceed."""
    line = {"benchmark": benchmark, "figure": figure, "value": round(value, 4)}
    print(json.dumps(line | {"unit": unit} | more), flush=True)
