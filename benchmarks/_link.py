"""Workers in network namespaces of their own, joined by a bridge at a given rate.

Linux only; needs root and iproute2, see `lowcomm.testing.network`.
"""

import contextlib
import importlib
import inspect
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lowcomm.testing import network
from lowcomm.testing import why_no_network as missing

__all__ = ["missing", "run_over_link", "sent_bytes", "skip"]

_SENT = Path("/sys/class/net/eth0/statistics/tx_bytes")


def skip(benchmark: str, reason: str) -> None:
    """Prints that a benchmark, or a part of it, was left out."""
    print(json.dumps({"benchmark": benchmark, "skipped": reason}), flush=True)


def sent_bytes() -> int:
    """What this worker's interface has sent so far, in bytes, every header included."""
    return int(_SENT.read_text())


def run_over_link(
    worker: Callable[..., Any],
    num_workers: int,
    *args: Any,
    mbit_s: float | None,
    timeout_s: float,
) -> list[Any]:
    """Runs `worker(rank, *args)` in one namespace each; returns results by rank.

    The workers form torch's default process group. Arguments and results travel as
    JSON.

    Args:
        worker: a function at the top level of a module beside this one.
        num_workers: number of namespaces, with one process of one thread each.
        args: further arguments, the same for every rank.
        mbit_s: rate of each worker's link in either direction; None for no limit.
        timeout_s: seconds until all must have returned.

    Raises:
        RuntimeError: if a worker failed, or was not done in time.
    """
    module = Path(inspect.getfile(worker)).stem
    command = [sys.executable, __file__, module, worker.__name__, json.dumps(args)]
    processes: list[subprocess.Popen[str]] = []
    with network(num_workers, mbit_s=mbit_s) as net:
        try:
            for rank, name in enumerate(net.names):
                env = {
                    **os.environ,
                    "RANK": str(rank),
                    "WORLD_SIZE": str(num_workers),
                    "MASTER_ADDR": net.address(0),
                    "MASTER_PORT": "29500",
                    "GLOO_SOCKET_IFNAME": "eth0",
                    "OMP_NUM_THREADS": "1",
                    "TORCH_CPP_LOG_LEVEL": "ERROR",  # addresses here have no names
                }
                processes.append(
                    subprocess.Popen(
                        ["ip", "netns", "exec", name, *command],
                        env=env,
                        stdout=subprocess.PIPE,
                        text=True,
                    )
                )
            _await(processes, time.monotonic() + timeout_s)
            return [json.loads(process.communicate()[0]) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()


def _await(processes: list[subprocess.Popen[str]], deadline: float) -> None:
    while any(codes := [process.poll() for process in processes]) or None in codes:
        if failed := {rank: code for rank, code in enumerate(codes) if code}:
            raise RuntimeError(f"workers failed, with exit codes by rank: {failed}")
        if time.monotonic() > deadline:
            raise RuntimeError("the workers were not done in time")
        time.sleep(0.05)


def _work(module: str, function: str, args: str) -> None:
    """A worker's process: prints its result, the only thing that goes to stdout."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl+C is for who started this
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with contextlib.redirect_stdout(sys.stderr):
        worker = getattr(importlib.import_module(module), function)
        result = worker(dist.get_rank(), *json.loads(args))
        dist.barrier()
    print(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    _work(*sys.argv[1:])
