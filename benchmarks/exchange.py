"""What an exchange costs: its mean, its launch, its memory.

- The mean of 25M values, in place, against one flat `all_reduce` (the sum alone) over
  the same buffer in gloo; on loopback and between namespaces at 200 Mbit/s, which need
  root and iproute2.
- What `step()` takes longer when it launches an exchange and does not wait for it.
- By how much memory grows in an exchange, in copies of the parameters.
- A whole exchange of Local SGD beside the averaging of PyTorch and of torchft.

    python benchmarks/exchange.py
"""

import contextlib
import importlib.util
import os
import statistics
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _link import missing, run_over_link, skip
from _report import in_turns, ratio, report
from step_overhead import Nothing
from torch.distributed.algorithms.model_averaging.utils import average_parameters

import lowcomm
from lowcomm.sync.codec import make_codec
from lowcomm.sync.group import TorchGroup
from lowcomm.sync.mean import Header, Job, Wire, mean_
from lowcomm.testing import free_port, run_workers

NAME = "exchange"
MILLION = 1_000_000
MBIT_S = 200.0

# Times of an all_reduce, by number of workers.
LOOPBACK_LIMIT = 1.5
LINK_LIMITS = {2: 1.03, 4: 1.10}


def params_of(count: int, size: int) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.randn(size)) for _ in range(count)]


# --------------------------------------------------------------------------------------
# The mean


class Exchange:
    """The engine's mean of one buffer, in place; called until all workers are done."""

    def __init__(self, flat: torch.Tensor, codec: str | None = None) -> None:
        self.group = TorchGroup()
        self.lane = self.group.new_lane()
        self.count = 0
        self.job = Job("flat", [flat], [flat], 4 << 20, codec=make_codec(codec))

    def __call__(self) -> None:
        self.count += 1
        wire = Wire(self.group, self.group.members(0), self.lane, self.count)
        self.group.run(mean_(wire, self.job, Header.of_setup("flat"))).wait(60.0)
        dist.barrier()


def time_means(
    rank: int, values: int, repeats: int, with_int8: bool
) -> dict[str, list[float]]:
    flat = torch.randn(values)

    def total() -> None:
        dist.all_reduce(flat)
        dist.barrier()

    def divided() -> None:
        dist.all_reduce(flat)
        flat.div_(dist.get_world_size())
        dist.barrier()

    calls: dict[str, Callable[[], None]] = {
        "all_reduce": total,
        "mean": Exchange(flat),
        "int8" if with_int8 else "all_reduce_divided": (
            Exchange(flat, "int8") if with_int8 else divided
        ),
    }
    times = in_turns(*calls.values(), repeats=repeats)
    return dict(zip(calls, times, strict=True))


def report_means_on_loopback(workers: int) -> None:
    times = run_workers(time_means, workers, 25 * MILLION, 9, False, timeout_s=120)[0]
    sums, means, divided = times.values()
    report(
        NAME,
        f"mean_{workers}_workers",
        ratio(means, sums),
        "of all_reduce",
        limit=LOOPBACK_LIMIT,
        ms=1e3 * statistics.median(means),
        all_reduce_ms=1e3 * statistics.median(sums),
    )
    figure = f"mean_{workers}_workers_against_divided"
    report(NAME, figure, ratio(means, divided), "of all_reduce and division")


def report_means_on_link(workers: int) -> None:
    times = run_over_link(
        time_means, workers, 12 * MILLION, 3, True, mbit_s=MBIT_S, timeout_s=120
    )[0]
    sums, means, codes = times.values()
    on_link = f"{workers}_workers_{MBIT_S:.0f}_mbit_s"
    report(
        NAME,
        f"mean_{on_link}",
        ratio(means, sums),
        "of all_reduce",
        limit=LINK_LIMITS[workers],
        ms=1e3 * statistics.median(means),
        all_reduce_ms=1e3 * statistics.median(sums),
    )
    speed = ratio(means, codes)
    report(NAME, f"int8_{on_link}", speed, "times as fast", at_least=3.5)


# --------------------------------------------------------------------------------------
# The launch


def time_launch(rank: int, repeats: int) -> dict[str, list[float]]:
    """Seconds of a step that launches, and of taking and judging the share in it.

    The thread's own: what others take from it depends on the number of cores.
    """
    opt = lowcomm.DiLoCo(Nothing(params_of(100, 250_000)), sync_every=2, overlap=1)
    rounds, packs = opt._engine.rounds, []
    take_share = rounds.take_share

    def timed(stream: Any) -> Any:
        start = time.thread_time()
        share = take_share(stream)
        packs.append(time.thread_time() - start)
        return share

    rounds.take_share = timed  # type: ignore[method-assign]
    launches, elapsed = [], []
    for _ in range(repeats + 1):
        opt.step()  # waits for what was launched
        dist.barrier()
        begin, start = time.perf_counter(), time.thread_time()
        opt.step()
        launches.append(time.thread_time() - start)
        elapsed.append(time.perf_counter() - begin)
    times = {"launch": launches, "pack": packs, "elapsed": elapsed}
    return {name: seconds[1:] for name, seconds in times.items()}


def report_launch() -> None:
    times = run_workers(time_launch, 2, 21, timeout_s=120)[0]
    launch, pack, elapsed = (1e3 * statistics.median(t) for t in times.values())
    rest = 1e3 * statistics.median(
        a - b for a, b in zip(times["launch"], times["pack"], strict=True)
    )
    report(NAME, "launch", launch, "ms", pack_ms=pack, elapsed_ms=elapsed)
    report(NAME, "launch_without_pack", rest, "ms", limit=1)


# --------------------------------------------------------------------------------------
# Memory


def memory_of(field: str) -> int:
    """What /proc says of this process: VmRSS or its highest, VmHWM, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) << 10
    raise ValueError(f"/proc/self/status must have {field}, got none.")


def grow(rank: int, settings: dict[str, Any]) -> float:
    """Highest growth of memory in an exchange, in copies of the parameters."""
    params = params_of(50, MILLION)
    opt = lowcomm.DiLoCo(Nothing(params), sync_every=2, init_sync=False, **settings)
    while opt.stats.rounds < 1:  # takes the anchor, and memory for the momentum
        opt.step()
    before = memory_of("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # begins a new VmHWM
    while opt.stats.rounds < 2:
        opt.step()
    return (memory_of("VmHWM") - before) / (200 * MILLION)


def report_memory() -> None:
    for figure, settings in (
        ("memory_blocking", {}),
        ("memory_overlapped", {"overlap": 1}),
        ("memory_overlapped_int8", {"overlap": 1, "codec": "int8"}),
    ):
        copies = max(run_workers(grow, 2, settings, timeout_s=60))
        report(NAME, figure, copies, "copies of the parameters")


# --------------------------------------------------------------------------------------
# Other libraries


def time_averaging(rank: int, repeats: int, port: int) -> dict[str, list[float]]:
    """Seconds of one averaging of 25M parameters in 100 tensors, by library."""
    params = params_of(100, 250_000)
    local_sgd = lowcomm.LocalSGD(Nothing(params), sync_every=1)
    calls: dict[str, Callable[[], Any]] = {
        "local_sgd": local_sgd.step,
        # What PeriodicModelAverager calls once in a period.
        "torch": lambda: average_parameters(iter(params), dist.group.WORLD),
    }
    with contextlib.ExitStack() as stack:
        if importlib.util.find_spec("torchft") is not None:
            calls["torchft"] = stack.enter_context(torchft_averaging(rank, port))
        times = in_turns(*calls.values(), repeats=repeats)
    return dict(zip(calls, times, strict=True))


@contextlib.contextmanager
def torchft_averaging(rank: int, port: int) -> Iterator[Callable[[], Any]]:
    """A step of torchft's LocalSGD that averages; each worker is a replica group."""
    os.environ["RUST_LOG"] = "error"  # or it logs every round
    from torchft import Manager, ProcessGroupGloo
    from torchft.coordination import LighthouseServer
    from torchft.local_sgd import LocalSGD

    os.environ["TORCHFT_LIGHTHOUSE"] = f"http://127.0.0.1:{port}"
    host = LighthouseServer(f"127.0.0.1:{port}", min_replicas=2) if rank == 0 else None
    dist.barrier()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    model = torch.nn.ParameterList(params_of(100, 250_000))
    inner = Nothing(model.parameters())
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=30)),
        load_state_dict=model.load_state_dict,
        state_dict=model.state_dict,
        min_replica_size=2,
        use_async_quorum=False,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        replica_id=f"replica_{rank}",
    )
    with LocalSGD(manager, model, inner, sync_every=1):
        yield inner.step
        dist.barrier()
    manager.shutdown()
    if host is not None:
        host.shutdown()


def report_averaging() -> None:
    times = run_workers(time_averaging, 2, 7, free_port(), timeout_s=120)[0]
    for name, seconds in times.items():
        milliseconds = 1e3 * statistics.median(seconds)
        report(NAME, f"averaging_{name}", milliseconds, "ms")
    if "torchft" not in times:
        skip(NAME, "torchft is not installed (pip install torchft==0.2.0)")


def main() -> None:
    for workers in (2, 4):
        report_means_on_loopback(workers)
    report_launch()
    report_memory()
    report_averaging()
    if reason := missing():
        skip(NAME, reason)
        return
    for workers in (2, 4):
        report_means_on_link(workers)


if __name__ == "__main__":
    main()
