"""The planner beside what others have published, and beside a measured wall clock.

- `bandwidth`: the rate at which a model of 10B parameters computes half of the time:
  Charles et al., 2025, https://arxiv.org/abs/2503.09799. The published rates lie on a
  grid, each 1.2068 times the one before it, so each stands for an interval. The time of
  a step is fitted to data-parallel training, whose gradients travel before the step
  (`gbit_s_h10` and so on) or beside 0.3 of it (`..._beside_0.3`).
- `hours`: of 1B parameters at 1 Gbit/s: Douillard et al., 2025,
  https://arxiv.org/abs/2501.18512. Steps and their time come from the hours without a
  wire and from what data-parallel training exchanged, 16 bits a parameter and step;
  `by_dp_hours` takes the steps from its hours at 1 Gbit/s in place of that.
- `idle`: the part of DiLoCo's time that NoLoCo saves by waiting for one other worker
  only: Kolehmainen et al., 2025, https://arxiv.org/abs/2506.10911. How much their steps
  spread is not known here, so several spreads are taken.
- `link`: the seconds of `slow_link.py`, planned from a step without traffic. Beside
  them a step's seconds in the run, and all that was no step. Needs root and iproute2,
  and a quiet machine.

    python benchmarks/planner.py
    python benchmarks/planner.py --only bandwidth hours idle
    python benchmarks/planner.py --only link --steps 60
"""

import argparse
import math
from typing import Any, NamedTuple

from _report import report

from lowcomm.plan import Method, Row, plan

NAME = "planner"


def row_of(method: Method, codec: str | None = None, **asked: Any) -> Row:
    asked = {"num_workers": 2, "latency_s": 0.0, "num_steps": 1000} | asked
    (row,) = plan(methods=[method], codecs=[codec], **asked).rows
    return row


def compare(figure: str, planned: float, other: float, unit: str, **more: Any) -> None:
    ratio = round(planned / other, 3)
    report(NAME, figure, planned, unit, published=other, ratio=ratio, **more)


# --------------------------------------------------------------------------------------
# The rate for half of the time

GBIT_S = {1: 104.8, 10: 16.0, 50: 3.0, 100: 1.4, 300: 0.5}  # by H; 1 is data-parallel
GRID = 10 ** (4 / 49)  # 50 rates from 0.1 to 1000 Gbit/s
TEN_B = {"num_params": 10e9}


def grid_index(gbit_s: float) -> int:
    return round(math.log(gbit_s / 0.1) / math.log(GRID))


def grid_rate(index: int) -> float:
    return float(0.1 * GRID**index)


def step_for_half(gbit_s: float, overlap: float) -> float:
    """Seconds of a step, if DDP computes half of the time at this rate."""
    row = row_of(Method("DDP"), gbit_s=gbit_s, step_s=1.0, **TEN_B)
    return row.exchange_s / (1 + overlap)


def rate_for_half(method: Method, step_s: float) -> float:
    """Gbit/s at which half of the time is spent in steps."""
    low, high = 1e-2, 1e4
    while high / low > 1 + 1e-6:
        gbit_s = math.sqrt(low * high)
        row = row_of(method, gbit_s=gbit_s, step_s=step_s, **TEN_B)
        low, high = (low, gbit_s) if row.compute_utilization > 0.5 else (gbit_s, high)
    return high


def rates_for_half(overlap: float) -> dict[int, float]:
    """By H, with the time of a step that data-parallel training tells."""
    step_s = step_for_half(grid_rate(grid_index(GBIT_S[1])), overlap)
    return {
        period: rate_for_half(Method("DiLoCo", period), step_s)
        for period in GBIT_S
        if period > 1
    }


def common_factor() -> tuple[float, float]:
    """What all published rates may be above the planned ones, from and to.

    A published rate, and that of data-parallel training too, may stand for any between
    it and its neighbour on the grid.
    """
    ratios = [
        grid_rate(grid_index(GBIT_S[period])) / planned
        for period, planned in rates_for_half(0.0).items()
    ]
    return max(ratios) / GRID, min(ratios) * GRID


def compare_bandwidth() -> None:
    for name, overlap in (("", 0.0), ("_beside_0.3", 0.3)):
        for period, planned in rates_for_half(overlap).items():
            index = grid_index(GBIT_S[period])
            more = {
                "interval": [
                    round(grid_rate(index - 1), 3),
                    round(grid_rate(index), 3),
                ],
                "on_grid": math.ceil(math.log(planned / 0.1) / math.log(GRID)) - index,
            }
            figure = f"gbit_s_h{period}{name}"
            compare(figure, planned, GBIT_S[period], "Gbit/s", **more)
    low, high = common_factor()
    report(NAME, "gbit_s_common_factor", low, "of planned", to=round(high, 4))


# --------------------------------------------------------------------------------------
# Hours at 1 Gbit/s


class Run(NamedTuple):
    """A column of the paper's table."""

    hours_dp: float
    hours_streaming: float
    hours_eager: float
    hours_of_steps: float  # on a link without a limit
    terabits_dp: float  # headed TB; but bytes would take nine times the hours


RUNS = {  # by 10^9 tokens
    25: Run(109, 0.88, 0.67, 0.67, 441),
    100: Run(438, 3.5, 2.7, 2.7, 1767),
    250: Run(1097, 8.75, 6.75, 6.75, 4418),
}
BITS_OF_DP = (
    16  # 441 TB of data-parallel training are 400 times 1.10: 100 steps, 16 / 4
)
STREAMING = Method("StreamingDiLoCo", 100, overlap=1, fragments=8)
EAGER = Method("EagerDiLoCo", 100)


def hours_of(
    run: Run, method: Method, codec: str | None = None, *, by_dp_hours: bool = False
) -> float:
    """Planned hours, for steps that data-parallel training tells."""
    terabits = run.terabits_dp
    if by_dp_hours:
        terabits = 3.6 * (run.hours_dp - run.hours_of_steps)
    num_steps = round(terabits * 1e12 / (BITS_OF_DP * 1e9))
    return row_of(
        method,
        codec,
        num_params=1e9,
        gbit_s=1.0,
        step_s=3600 * run.hours_of_steps / num_steps,
        num_steps=num_steps,
        dtype_bytes=BITS_OF_DP / 8,
    ).hours


def compare_hours() -> None:
    for tokens, run in RUNS.items():
        dp = hours_of(run, Method("DDP"))
        beside = hours_of(run, Method("DDP", overlap=1))
        compare(f"hours_dp_{tokens}b", dp, run.hours_dp, "h", all_beside=beside)
        by_dp_hours = hours_of(run, STREAMING, "int4", by_dp_hours=True)
        compare(
            f"hours_streaming_{tokens}b",
            hours_of(run, STREAMING, "int4"),
            run.hours_streaming,
            "h",
            by_dp_hours=round(by_dp_hours, 4),
            by_dp_hours_ratio=round(by_dp_hours / run.hours_streaming, 3),
        )
        eager = hours_of(run, EAGER, "int4")
        compare(f"hours_eager_{tokens}b", eager, run.hours_eager, "h")


# --------------------------------------------------------------------------------------
# Waiting for others

IDLE_SAVED = 0.2  # published, for 1024 workers and H = 100
NUM_WORKERS = (16, 128, 1024)
JITTERS = (0.25, 0.5, 0.71, 1.0)


class Idle(NamedTuple):
    """Parts of the time that a worker waits for others."""

    diloco: float
    noloco: float
    saved: float  # of DiLoCo's time


def idle_of(num_workers: int, jitter: float) -> Idle:
    """With nothing to send."""
    asked = {"num_workers": num_workers, "jitter": jitter, "num_params": 1e9}
    diloco, noloco = (
        row_of(Method(name, 100), gbit_s=math.inf, step_s=1.0, **asked)
        for name in ("DiLoCo", "NoLoCo")
    )
    return Idle(
        1 - diloco.compute_utilization,
        1 - noloco.compute_utilization,
        1 - noloco.hours / diloco.hours,
    )


def jitter_for(saved: float, num_workers: int) -> float:
    low, high = 0.0, 2.0
    while high - low > 0.005:
        jitter = (low + high) / 2
        less = idle_of(num_workers, jitter).saved < saved
        low, high = (jitter, high) if less else (low, jitter)
    return high


def compare_idle() -> None:
    for num_workers in NUM_WORKERS:
        for jitter in JITTERS:
            idle = idle_of(num_workers, jitter)
            more = {"diloco": round(idle.diloco, 4), "noloco": round(idle.noloco, 4)}
            if num_workers == 1024:
                more["published"] = IDLE_SAVED
            figure = f"idle_saved_{num_workers}_jitter_{jitter}"
            report(NAME, figure, idle.saved, "of the time", **more)
    jitter = jitter_for(IDLE_SAVED, 1024)
    report(NAME, "jitter_of_20_per_cent", jitter, "of the logarithm", workers=1024)


# --------------------------------------------------------------------------------------
# A measured wall clock


def compare_link(num_steps: int) -> None:
    import slow_link  # transformers takes seconds
    from _link import missing, run_over_link, skip

    if reason := missing():
        skip(NAME, reason)
        return
    sync_every, fragments, overlap = 20, 10, 3
    options = {"sync_every": sync_every, "fragments": fragments, "overlap": overlap}
    streaming = Method("StreamingDiLoCo", sync_every, overlap, fragments)
    methods = {
        "ddp": (Method("DDP"), None),
        "local_sgd": (Method("LocalSGD", sync_every), None),
        "diloco": (Method("DiLoCo", sync_every), None),
        "streaming": (streaming, None),
        "streaming_int8": (streaming, "int8"),
        "streaming_int4": (streaming, "int4"),
    }

    def run(ways: list[tuple[str, int]], mbit_s: float | None) -> Any:
        args = (slow_link.work, 2, ways, options)
        by_rank = run_over_link(*args, mbit_s=mbit_s, timeout_s=600)
        return {workers[0]["way"]: workers for workers in zip(*by_rank, strict=True)}

    ddp = run([("ddp", 6)], None)["ddp"]
    step_s = max(worker["alone_step_s"] for worker in ddp)
    num_params = ddp[0]["parameters"]
    for link, blocking, ways in (
        ("link_1", slow_link.BLOCKING[0], ("local_sgd", "diloco", "streaming")),
        (
            "link_2",
            slow_link.BLOCKING[1],
            ("diloco", "streaming_int8", "streaming_int4"),
        ),
    ):
        mbit_s = slow_link.rate_for(blocking, step_s, 4 * num_params, sync_every)
        asked = {"num_params": num_params, "gbit_s": 1e-3 * slow_link.PAYLOAD * mbit_s}
        results = run([("ddp", 6), *((way, num_steps) for way in ways)], mbit_s)
        for way, workers in results.items():
            method, codec = methods[way]
            alone_s = max(worker["alone_step_s"] for worker in workers)
            steps, wall_s = workers[0]["steps"], workers[0]["wall_s"]
            row = row_of(method, codec, step_s=alone_s, num_steps=steps, **asked)
            planned_s = 3600 * row.hours
            more = {"measured": wall_s, "ratio": planned_s / wall_s, "mbit_s": mbit_s}
            more |= {"steps": steps, "step_s": alone_s, "wait_s": steps * row.exposed_s}
            if way != "ddp":  # of the slower worker
                slower = max(workers, key=lambda worker: worker["compute_s"])
                compute_s = slower["compute_s"]
                more["measured_step_s"] = measured_s = compute_s / steps
                more["measured_wait_s"] = slower["wall_s"] - compute_s
                row = row_of(method, codec, step_s=measured_s, num_steps=steps, **asked)
                more["ratio_by_measured_step"] = 3600 * row.hours / wall_s
            more = {name: round(number, 4) for name, number in more.items()}
            report(NAME, f"seconds_{way}_{link}", planned_s, "s", **more)


# --------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parts = ("bandwidth", "hours", "idle", "link")
    parser.add_argument("--only", nargs="+", choices=parts, default=parts)
    parser.add_argument("--steps", type=int, default=120, help="over the slow link")
    args = parser.parse_args()
    if "bandwidth" in args.only:
        compare_bandwidth()
    if "hours" in args.only:
        compare_hours()
    if "idle" in args.only:
        compare_idle()
    if "link" in args.only:
        compare_link(args.steps)


if __name__ == "__main__":
    main()
