"""Workers in network namespaces of their own, joined by a bridge at a given rate.

Linux only; needs root and iproute2. Each worker has an interface eth0 that lets a given
rate through in each direction. Its bursts are of 128 kB: with smaller ones the kernel
cuts its large packets itself, which takes a third of a core from whoever computes.

There is no delay: that needs netem, which kernels may lack. Everything is removed at
the end, also after Ctrl+C.
"""

import contextlib
import importlib
import inspect
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_SENT = Path("/sys/class/net/eth0/statistics/tx_bytes")


def missing() -> str | None:
    """Why there can be no such network here; None if there can."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "network namespaces need Linux and root"
    if not (shutil.which("ip") and shutil.which("tc")):
        return "network namespaces need iproute2 (ip and tc)"
    try:
        with _network(1, 100.0):
            return None
    except subprocess.CalledProcessError as error:
        return f"{' '.join(error.cmd)} failed: {error.stderr.strip()}"


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
    with _network(num_workers, mbit_s) as names:
        try:
            for rank, name in enumerate(names):
                env = {
                    **os.environ,
                    "RANK": str(rank),
                    "WORLD_SIZE": str(num_workers),
                    "MASTER_ADDR": _address(0),
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


@contextlib.contextmanager
def _network(num_workers: int, mbit_s: float | None) -> Iterator[list[str]]:
    """Names of namespaces around a bridge, which lies in one more."""
    names = [f"lowcomm-{os.getpid()}-{i}" for i in range(num_workers)]
    hub = f"lowcomm-{os.getpid()}-hub"
    terminate = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        for name in (hub, *names):
            _call("ip", "netns", "add", name)
            _call("ip", "-n", name, "link", "set", "lo", "up")
        _call("ip", "-n", hub, "link", "add", "bridge", "up", "type", "bridge")
        for i, name in enumerate(names):
            port = f"port{i}"
            pair = ("eth0", "type", "veth", "peer", "name", port, "netns", hub)
            _call("ip", "-n", name, "link", "add", *pair)
            _call("ip", "-n", hub, "link", "set", port, "master", "bridge", "up")
            for where, device in ((name, "eth0"), (hub, port)):
                if mbit_s is not None:
                    rate = f"{round(mbit_s * 1e6)}bit"
                    bucket = ("rate", rate, "burst", "128kb", "latency", "100ms")
                    at = ("qdisc", "add", "dev", device, "root", "tbf")
                    _call("tc", "-n", where, *at, *bucket)
            address = f"{_address(i)}/24"
            _call("ip", "-n", name, "address", "add", address, "dev", "eth0")
            _call("ip", "-n", name, "link", "set", "eth0", "up")
        yield names
    finally:
        interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
        for name in (*names, hub):
            subprocess.run(["ip", "netns", "delete", name], stderr=subprocess.DEVNULL)
        signal.signal(signal.SIGINT, interrupt)
        signal.signal(signal.SIGTERM, terminate)


def _address(rank: int) -> str:
    return f"10.77.0.{rank + 1}"


def _call(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


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
