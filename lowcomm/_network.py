"""Network namespaces of one machine, joined by a bridge that can be cut."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator

_numbers = itertools.count()

_CLONE_NEWNET = 0x40000000  # os.setns is of Python 3.12


class Network:
    """Namespaces of their own, each with an interface eth0; places count from 0.

    `network` makes one; `run_workers(..., network=net)` runs workers in it. A worker
    may be given it as an argument, to cut the network in the midst of a run.

    Args:
        names: of the namespaces; `ip netns exec NAME COMMAND` runs in one.
        hub: of the namespace with the bridge.
    """

    def __init__(self, names: list[str], hub: str) -> None:
        self.names = names
        self._hub = hub

    @staticmethod
    def address(place: int) -> str:
        """The address of the namespace at a place."""
        return f"10.77.0.{place + 1}"

    def enter(self, place: int) -> None:
        """Moves this thread, and those that it starts from here on, to a namespace."""
        libc = ctypes.CDLL(None, use_errno=True)
        with open(f"/run/netns/{self.names[place]}") as file:
            if libc.setns(file.fileno(), _CLONE_NEWNET):
                error = ctypes.get_errno()
                raise OSError(error, os.strerror(error), file.name)

    def limit(self, place: int, mbit_s: float) -> None:
        """Sets the rate of a namespace, in each direction."""
        for where, device in self._ends(place):
            at = ("qdisc", "replace", "dev", device, "root", "tbf")
            rate = ("rate", f"{round(mbit_s * 1e6)}bit")
            _call("tc", "-n", where, *at, *rate, "burst", "128kb", "latency", "100ms")

    def cut(self, place: int) -> None:
        """Takes a namespace off the network."""
        _call("ip", "-n", self._hub, "link", "set", f"port{place}", "down")

    def heal(self, place: int) -> None:
        """Puts it back."""
        _call("ip", "-n", self._hub, "link", "set", f"port{place}", "up")

    def part(self, *places: int) -> None:
        """Lets these namespaces reach all others, but not each other."""
        for place in places:
            port = ("link", "set", "dev", f"port{place}")
            _call("bridge", "-n", self._hub, *port, "isolated", "on")

    def _ends(self, place: int) -> tuple[tuple[str, str], tuple[str, str]]:
        return (self.names[place], "eth0"), (self._hub, f"port{place}")


def why_no_network() -> str | None:
    """Why there can be no such network here; None if there can."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "network namespaces need Linux and root"
    if not (shutil.which("ip") and shutil.which("tc")):
        return "network namespaces need iproute2 (ip and tc)"
    try:
        with network(1):
            return None
    except subprocess.CalledProcessError as error:
        return f"{' '.join(error.cmd)} failed: {error.stderr.strip()}"


@contextlib.contextmanager
def network(num_workers: int, *, mbit_s: float | None = None) -> Iterator[Network]:
    """A network of namespaces, removed at the end, also after Ctrl+C.

    >>> from lowcomm.testing import network, run_workers, why_no_network
    >>> if why_no_network() is None:
    ...     with network(2, mbit_s=50) as net:
    ...         assert run_workers(pow, 2, 2, network=net) == [0, 1]

    Linux only; needs root and iproute2, see `why_no_network`. A namespace's interface
    lets its rate through in each direction, in bursts of 128 kB: with smaller ones the
    kernel cuts its large packets itself, which takes a third of a core from whoever
    computes. There is no delay: that needs netem, which kernels may lack.

    Args:
        num_workers: number of namespaces.
        mbit_s: rate of each; None for no limit.
    """
    prefix = f"lowcomm-{os.getpid()}-{next(_numbers)}"
    names = [f"{prefix}-{i}" for i in range(num_workers)]
    hub = f"{prefix}-hub"
    terminate = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        net = Network(names, hub)
        for name in (hub, *names):
            _call("ip", "netns", "add", name)
            _call("ip", "-n", name, "link", "set", "lo", "up")
        _call("ip", "-n", hub, "link", "add", "bridge", "up", "type", "bridge")
        for i, name in enumerate(names):
            port = f"port{i}"
            pair = ("eth0", "type", "veth", "peer", "name", port, "netns", hub)
            _call("ip", "-n", name, "link", "add", *pair)
            _call("ip", "-n", hub, "link", "set", port, "master", "bridge", "up")
            if mbit_s is not None:
                net.limit(i, mbit_s)
            address = f"{Network.address(i)}/24"
            _call("ip", "-n", name, "address", "add", address, "dev", "eth0")
            _call("ip", "-n", name, "link", "set", "eth0", "up")
        yield net
    finally:
        interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
        for name in (*names, hub):
            subprocess.run(["ip", "netns", "delete", name], stderr=subprocess.DEVNULL)
        signal.signal(signal.SIGINT, interrupt)
        signal.signal(signal.SIGTERM, terminate)


def _call(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
